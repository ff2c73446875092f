"""The files of a sandbox: read, write, list and move them, and copy trees in and out."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from pathlib import Path

from atoll.guest import tree_copy
from atoll.guest.files import AsyncWatch, FileInfo
from atoll.sandbox.sandbox_access import SandboxAccess


class FileMethods:
    """The methods of `AsyncSandbox` that handle files."""

    access: SandboxAccess

    async def read_file(self, path: str) -> str:
        """Return the text of a file. FileNotFoundError if it does not exist; UnicodeDecodeError if it is not UTF-8."""
        return (await self.read_bytes(path)).decode()

    async def read_bytes(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Return the content of a file, or a part of it."""
        return await self.access.files().read(self.access.path(path), offset=offset, length=length)

    async def read_stream(self, path: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Yield the content of a file in pieces, so that its size does not matter."""
        async for piece in self.access.files().read_stream(self.access.path(path), offset=offset, length=length):
            yield piece

    async def write_file(self, path: str, content: str | bytes, *, mode: int | None = None) -> None:
        """Write a file atomically: readers see the old content or the new, never a part. Creates missing parents."""
        data = content.encode() if isinstance(content, str) else content
        await self.access.files().write(self.access.path(path), data, mode=mode)

    async def write_stream(
        self,
        path: str,
        pieces: AsyncIterable[bytes] | Iterable[bytes],
        *,
        mode: int | None = None,
        append: bool = False,
    ) -> None:
        """Write a file from pieces, like `write_file`; with `append`, like `append_file`."""
        await self.access.files().write_stream(self.access.path(path), pieces, mode=mode, append=append)

    async def append_file(self, path: str, content: str | bytes) -> None:
        """Append to a file, which is created if missing."""
        data = content.encode() if isinstance(content, str) else content
        await self.access.files().write(self.access.path(path), data, append=True)

    async def list_files(self, path: str = ".") -> list[FileInfo]:
        """Return the entries of a directory, sorted by name."""
        return await self.access.files().list(self.access.path(path))

    async def walk(self, path: str = ".", *, limit: int = 100_000) -> AsyncIterator[FileInfo]:
        """Yield everything below a directory, parents first. Symbolic links are never followed."""
        async for info in self.access.files().walk(self.access.path(path), limit=limit):
            yield info

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """Return the type, size, mode, owner and modification time of a file."""
        return await self.access.files().stat(self.access.path(path), follow=follow)

    async def exists(self, path: str) -> bool:
        """Return whether the path exists. A symbolic link exists even if its target does not."""
        try:
            await self.stat(path, follow=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def make_dir(self, path: str, *, mode: int = 0o755) -> None:
        """Create a directory and its parents. An existing directory is not an error."""
        await self.access.files().make_dir(self.access.path(path), mode=mode, parents=True)

    async def move(self, path: str, target: str) -> None:
        """Rename a file or directory. An existing file at the target is replaced."""
        await self.access.files().rename(self.access.path(path), self.access.path(target), parents=True)

    async def remove(self, path: str, *, recursive: bool = True, missing_ok: bool = False) -> None:
        """Remove a file, or a directory and everything in it. Symbolic links are removed, not followed."""
        await self.access.files().remove(self.access.path(path), recursive=recursive, missing_ok=missing_ok)

    async def chmod(self, path: str, mode: int) -> None:
        """Change the permissions of a file."""
        await self.access.files().chmod(self.access.path(path), mode)

    def watch(self, path: str = ".", *, recursive: bool = True) -> AsyncWatch:
        """Watch a directory for changes: `async with sandbox.watch() as events`, then iterate."""
        return self.access.files().watch(self.access.path(path), recursive=recursive)

    async def copy_to(self, source: str | Path, target: str) -> None:
        """Copy a file or a tree from the host into the sandbox.

        A file goes to `target`, or into it if `target` ends with `/` or is a directory. The content of a directory
        goes into the directory `target`. Modes, empty directories and unusual names are kept; symbolic links are copied
        as links.
        """
        self.access.handle()
        if not Path(source).exists():
            raise FileNotFoundError(f"Source file not found: {source}")
        async with self.access.transfer():
            await tree_copy.copy_to(self.access.connect, source, self.access.path(target))

    async def copy_from(
        self, source: str, target: str | Path, *, max_bytes: int | None = None, max_items: int | None = None
    ) -> None:
        """Copy a file or a tree from the sandbox to the host. Nothing outside `target` is changed.

        The rules are those of `copy_to`, except that set-uid bits and owners are not kept. Raises SandboxResourceError
        beyond `max_bytes` or `max_items`.
        """
        self.access.handle()
        async with self.access.transfer():
            await tree_copy.copy_from(
                self.access.connect, self.access.path(source), target, max_bytes=max_bytes, max_items=max_items
            )
