"""Files that are in a sandbox only while a RUN runs: secrets, scripts, the configuration of mirrors, mounted files.

They are written before the command and removed after it, before its state is saved. A file of the image that is in the
way is moved aside for that time. If a file cannot be removed, the step fails, and its sandbox is deleted with it.
"""

from __future__ import annotations

import posixpath
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from atoll.errors import BuildError
from atoll.guest.file_records import FILE
from atoll.guest.files import Files
from atoll.guest.put_items import Owner, PutItem, put_items
from atoll.sandbox.sandbox import AsyncSandbox


@dataclass(frozen=True, slots=True)
class PlacedFile:
    path: str
    content: bytes | Callable[[], int]
    """The content, or a function that opens it."""
    size: int
    mode: int = 0o644
    owner: Owner = (0, 0)

    @classmethod
    def of(cls, path: str, content: bytes, mode: int = 0o644, owner: Owner = (0, 0)) -> PlacedFile:
        return cls(path, content, len(content), mode, owner)


@dataclass(slots=True)
class _Placed:
    sandbox: AsyncSandbox
    aside: str = field(default_factory=lambda: f"/.atoll-{secrets.token_hex(8)}")
    written: list[str] = field(default_factory=list)
    moved: list[tuple[str, str]] = field(default_factory=list)
    """Paths, and where their files are meanwhile."""
    made: list[str] = field(default_factory=list)
    """Directories that were missing, outermost first."""

    @property
    def _files(self) -> Files:
        return self.sandbox.access.files()

    async def put(self, file: PlacedFile) -> None:
        path = posixpath.normpath(file.path)
        await self._note_missing(path)
        kind = await _kind(self._files, path)
        if kind == "directory":
            raise BuildError(
                f"{path[:200]!r} is a directory in this stage", hint="Choose another target for the mount."
            )
        if kind is not None:
            await self._move_aside(path)
        item = PutItem(FILE, b"", file.mode, file.owner, file.size, time.time_ns(), content=file.content)
        self.written.append(path)
        await put_items(self.sandbox.access.connect, path, [item])

    async def remove_all(self) -> None:
        for path in reversed(self.written):
            await self._files.remove(path, recursive=True, missing_ok=True)
        for path, kept in reversed(self.moved):
            await self._files.rename(kept, path, parents=True)
        if self.moved:
            await self._files.remove(self.aside, recursive=True, missing_ok=True)
        for path in reversed(self.made):
            try:
                await self._files.remove(path)
            except OSError:
                return  # the command has put something there, which stays

    async def _note_missing(self, path: str) -> None:
        missing = []
        above = posixpath.dirname(path)
        while above != "/" and await _kind(self._files, above, follow=True) is None:
            missing.append(above)
            above = posixpath.dirname(above)
        self.made += reversed(missing)

    async def _move_aside(self, path: str) -> None:
        if not self.moved:
            await self._files.make_dir(self.aside, mode=0o700)
        kept = f"{self.aside}/{len(self.moved)}"
        await self._files.rename(path, kept)
        self.moved.append((path, kept))


@asynccontextmanager
async def placed(sandbox: AsyncSandbox, files: Sequence[PlacedFile]) -> AsyncIterator[None]:
    """Have these files in the sandbox during the block. After an error in it they stay, and the sandbox must not be
    used for anything but looking at it."""
    if not files:
        yield
        return
    state = _Placed(sandbox)
    for file in files:
        await state.put(file)
    yield
    await state.remove_all()


async def _kind(files: Files, path: str, *, follow: bool = False) -> str | None:
    try:
        return (await files.stat(path, follow=follow)).kind
    except (FileNotFoundError, NotADirectoryError):
        return None
