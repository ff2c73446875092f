"""Carrying out COPY, ADD and WORKDIR: files go in through the agent, which resolves every path inside the sandbox."""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Iterator, Sequence

from atoll import workers
from atoll.builds import archives
from atoll.builds.link_targets import resolved
from atoll.builds.site import Site
from atoll.builds.source_tree import Entry, Source, SourceTree
from atoll.builds.steps import CopyFiles, MakeDirectory, Step
from atoll.builds.users import owner_of
from atoll.errors import BuildError
from atoll.guest.file_records import DIRECTORY, FILE, LINK
from atoll.guest.put_items import Owner, PutItem, put_items
from atoll.model import Cause
from atoll.printable import printable
from atoll.sandbox.sandbox import AsyncSandbox

_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOT: Owner = (0, 0)
_MOST_REPLACED = 16


async def copy(site: Site, sandbox: AsyncSandbox, step: Step, action: CopyFiles) -> None:
    await _Copying(site, sandbox, action, await _owner(sandbox, action)).run(step)


async def make_directory(sandbox: AsyncSandbox, action: MakeDirectory) -> None:
    """Make a directory and its missing parents. One that exists stays as it is."""
    files = sandbox.access.files()
    owner = await owner_of(files, action.owner) if action.owner else _ROOT
    await _put(sandbox, await resolved(files, action.path), [_root_item(owner)], owner)


async def _owner(sandbox: AsyncSandbox, action: CopyFiles) -> Owner | None:
    return await owner_of(sandbox.access.files(), action.owner) if action.owner else None


class _Copying:
    def __init__(self, site: Site, sandbox: AsyncSandbox, action: CopyFiles, owner: Owner | None) -> None:
        self._site = site
        self._sandbox = sandbox
        self._action = action
        self._owner = owner
        self._target = action.target.rstrip("/") or "/"
        self._is_directory = action.target.endswith("/")

    async def run(self, step: Step) -> None:
        self._target = await resolved(self._sandbox.access.files(), self._target)
        if not self._is_directory:
            self._is_directory = await self._target_is_directory()
        if self._action.heredocs:
            await self._put_heredocs()
        if not self._action.sources:
            return
        if self._action.origin.kind == "context":
            await self._put_sources(self._site.context, self._site.selections[step.key])
            return
        async with self._site.opened(self._action.origin) as tree:
            sources = await workers.run(workers.TRANSFER, self._selected, tree)
            for note in tree.notes:
                self._site.reporter.warn(note)
            await self._put_sources(tree, sources)

    def _selected(self, tree: SourceTree) -> list[Source]:
        return [each for pattern in self._action.sources for each in tree.select(pattern, self._action.exclude)]

    async def _target_is_directory(self) -> bool:
        try:
            return (await self._sandbox.access.files().stat(self._target)).kind == "directory"
        except OSError:
            return False

    async def _put_heredocs(self) -> None:
        owner = self._owner or _ROOT
        mode = 0o644 if self._action.mode is None else self._action.mode
        for each in self._action.heredocs:
            content = each.content.encode(errors="surrogateescape")
            path = f"{self._target.rstrip('/')}/{each.name}" if self._is_directory else self._target
            item = PutItem(FILE, b"", mode, owner, len(content), time.time_ns(), content=content)
            await _put(self._sandbox, path, [item], owner)

    async def _put_sources(self, tree: SourceTree, sources: Sequence[Source]) -> None:
        """Copy the sources in their order. Those that go into the target directory go in one stream."""
        together: list[Source] = []
        for source in sources:
            if self._action.is_add and await workers.run(workers.TRANSFER, archives.is_archive, tree, source):
                await self._put_into(tree, together)
                together = []
                await self._unpack(tree, source)
                self._is_directory = True
            elif source.is_directory or self._is_directory:
                together.append(source)
                self._is_directory = True
            else:
                item = self._item(tree, source.entries[0], b"")
                await _put(self._sandbox, self._target, [item], self._owner or _ROOT)
        await self._put_into(tree, together)

    async def _put_into(self, tree: SourceTree, sources: Sequence[Source]) -> None:
        if sources:
            await _put(self._sandbox, self._target, self._items(tree, sources), self._owner or _ROOT)

    async def _unpack(self, tree: SourceTree, source: Source) -> None:
        """Unpack an archive on the host, in a private directory, and copy what is in it."""
        async with archives.unpacked(self._site, tree, source) as (inside, whole):
            # What is in an archive keeps its owners and modes, whatever the flags of ADD are.
            top = [
                _root_item(self._owner or _ROOT),
                *(_item_of(inside, each, each.below) for each in whole.entries[1:]),
            ]
            for _ in range(_MOST_REPLACED):
                try:
                    await _put(self._sandbox, self._target, top, self._owner or _ROOT, replace=True)
                    return
                except _InTheWayError as error:  # a directory, where the archive has a file
                    await self._sandbox.access.files().remove(error.path, recursive=True)
            raise BuildError("the archive replaces too many directories by files")

    def _items(self, tree: SourceTree, sources: Sequence[Source]) -> Iterator[PutItem]:
        yield _root_item(self._owner or _ROOT)
        for source in sources:
            if source.is_directory:
                for entry in source.entries[1:]:
                    yield self._item(tree, entry, entry.below)
            else:
                yield self._item(tree, source.entries[0], source.name)

    def _item(self, tree: SourceTree, entry: Entry, path: bytes) -> PutItem:
        item = _item_of(tree, entry, path)
        if self._action.mode is not None and entry.kind != LINK:
            item = item._replace(mode=self._action.mode)
        return item if self._owner is None else item._replace(owner=self._owner)


class _InTheWayError(Exception):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def _item_of(tree: SourceTree, entry: Entry, path: bytes) -> PutItem:
    content = functools.partial(tree.open, entry) if entry.kind == FILE else b""
    owner = (entry.uid, entry.gid)
    return PutItem(entry.kind, path, entry.mode, owner, entry.size, entry.mtime_ns, entry.target, content)


def _root_item(owner: Owner) -> PutItem:
    return PutItem(DIRECTORY, b"", 0o755, owner, 0, time.time_ns())


async def _put(
    sandbox: AsyncSandbox,
    path: str,
    items: Iterator[PutItem] | Sequence[PutItem],
    owner: Owner,
    *,
    replace: bool = False,
) -> None:
    try:
        async with sandbox.access.transfer():
            await put_items(sandbox.access.connect, path, items, owner=owner, replace=replace)
    except OSError as error:
        if error.errno in _FULL:
            hint = "Give the build more by --disk, or copy less: see .dockerignore."
            raise BuildError("the disk of the build is full", hint=hint, cause=Cause.DISK_FULL) from error
        said, number = error.strerror or str(error), error.errno or 0
        if number == errno.EISDIR and replace:
            raise _InTheWayError(said.removesuffix(f": {os.strerror(number)}")) from error
        raise BuildError(printable(said)[:300], hint=_HINTS.get(number)) from error


_HINTS = {
    errno.EISDIR: "There is a directory of that name already: copy the file into it, or remove it by a RUN.",
    errno.ENOTDIR: "There is something else of that name already, perhaps a link: remove it by a RUN.",
}
