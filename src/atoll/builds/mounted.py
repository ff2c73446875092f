"""The directories that RUN mounts: caches, files of the context or of other stages, and empty ones.

Each is a volume of its own: a cache has the name of its id and is kept, the others are new and removed afterwards. What
a bind mount shows is copied into its volume first, through a sandbox that does nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from atoll import workers
from atoll.archive.work import Work
from atoll.builds.archives import builds_of
from atoll.builds.running import tree_of
from atoll.builds.site import Site
from atoll.builds.source_tree import Source, SourceTree
from atoll.builds.steps import RunCommand, RunMount
from atoll.cancellation import finish, finish_or_stop
from atoll.errors import BuildError, SandboxError
from atoll.guest.file_records import DIRECTORY, FILE
from atoll.guest.put_items import PutItem, put_items
from atoll.images.locks import locked
from atoll.model import Volume
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from atoll.storage import Volumes

CACHE_BYTES = 20 << 30
"""How much all caches of one owner may use before the oldest are removed."""
_CACHE_MODE = 0o755


@dataclass(slots=True)
class Mounted:
    volumes: list[Volume] = field(default_factory=list)
    """What the sandbox of the command mounts."""
    caches: list[RunMount] = field(default_factory=list)

    async def prepare(self, sandbox: AsyncSandbox) -> None:
        """Give the directories of caches their owners and modes."""
        for mount in self.caches:
            files = sandbox.access.files()
            mode = _CACHE_MODE if mount.mode is None else mount.mode
            await files.chown(mount.target, mount.uid, mount.gid)
            await files.chmod(mount.target, mode & 0o1777)


def needs_volumes(action: RunCommand) -> bool:
    """Return whether a RUN may need a sandbox of its own, which has volumes."""
    return any(mount.type in ("cache", "tmpfs", "bind") for mount in action.mounts)


def volumes_of(settings: Settings) -> Volumes:
    return Volumes(settings.data_dir, settings.resources.volumes)


@asynccontextmanager
async def mounted(site: Site, action: RunCommand, image: str) -> AsyncIterator[Mounted]:
    """Provide the volumes of a RUN. `image` is what its sandbox starts from."""
    found, temporary = Mounted(), list[str]()
    try:
        async with contextlib.AsyncExitStack() as opened:
            await _take_locks(site, action, opened)
            for mount in action.mounts:
                if mount.type == "cache":
                    found.volumes.append(_cache(mount))
                    if mount.writable:
                        found.caches.append(mount)
                elif mount.type == "tmpfs":
                    found.volumes.append(_temporary(mount, temporary, read_only=False))
                    found.caches.append(mount)
                elif mount.type == "bind":
                    await _bind(site, mount, image, found, temporary, opened)
            yield found
    finally:
        if temporary:
            await finish(_remove(site, temporary))


async def _bind(
    site: Site,
    mount: RunMount,
    image: str,
    found: Mounted,
    temporary: list[str],
    opened: contextlib.AsyncExitStack,
) -> None:
    tree = await tree_of(site, mount, opened)
    source = (await workers.run(workers.TRANSFER, tree.select, mount.source))[0]
    if not source.is_directory:
        return  # files are written to their place, see `running`
    volume = _temporary(mount, temporary, read_only=not mount.writable)
    await _fill(site, image, volume, tree, source)
    found.volumes.append(volume)


async def _fill(site: Site, image: str, volume: Volume, tree: SourceTree, source: Source) -> None:
    sandbox = await site.new_sandbox(image, [volume.model_copy(update={"read_only": False})])
    try:
        top = source.entries[0]
        files = sandbox.access.files()
        await put_items(sandbox.access.connect, volume.path, _items(tree, source))
        await files.chown(volume.path, top.uid, top.gid)
        await files.chmod(volume.path, top.mode)
    except OSError as error:
        raise BuildError(f"the mount on {volume.path} cannot be filled: {error.strerror}") from error
    finally:
        await finish(sandbox.cleanup())


def _items(tree: SourceTree, source: Source) -> Iterator[PutItem]:
    yield PutItem(DIRECTORY, b"", 0o755, (0, 0), 0, time.time_ns())
    for entry in source.entries[1:]:
        content = (lambda each=entry: tree.open(each)) if entry.kind == FILE else b""
        owner = (entry.uid, entry.gid)
        yield PutItem(entry.kind, entry.below, entry.mode, owner, entry.size, entry.mtime_ns, entry.target, content)


def _cache(mount: RunMount) -> Volume:
    return Volume.cache(f"build {mount.id}", mount.target, read_only=not mount.writable)


def _temporary(mount: RunMount, made: list[str], *, read_only: bool) -> Volume:
    volume = Volume.cache(secrets.token_hex(16), mount.target, read_only=read_only)
    made.append(volume.name)
    return volume


async def _remove(site: Site, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(SandboxError):  # what is left is removed with the oldest caches
            await workers.run(workers.ENGINE, volumes_of(site.settings).remove, site.request.owner, name)


async def _take_locks(site: Site, action: RunCommand, opened: contextlib.AsyncExitStack) -> None:
    """Wait for the caches that only one command may use at a time. All builds take them in the same order."""
    alone = {_cache(mount).name for mount in action.mounts if mount.type == "cache" and mount.sharing != "shared"}
    for name in sorted(alone):
        await opened.enter_async_context(_alone(site, name))


@asynccontextmanager
async def _alone(site: Site, name: str) -> AsyncIterator[None]:
    home = builds_of(site.settings.data_dir) / "locks"
    work = Work(timeout_s=max(site.deadline.left(), 1.0))
    key = hashlib.sha256(f"{site.request.owner}\0{name}".encode()).hexdigest()[:40]
    with contextlib.ExitStack() as held:

        def wait() -> None:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(locked(home / key, work))

        await finish_or_stop(workers.run(workers.IMAGE, wait), work.cancel)
        yield
