"""Files of a sandbox. Paths are resolved inside it, so symbolic links cannot lead to files of the host."""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, TypedDict, Unpack

from atoll import buffers, workers
from atoll.errors import ProtocolError, SandboxResourceError
from atoll.guest.connection import Connection
from atoll.guest.file_contents import fits, read_pieces, write_pieces, write_whole
from atoll.guest.file_records import ERROR, KINDS, LINK, FileInfo, FileRecord, FileRecordParser, Kind, check_relative
from atoll.guest.file_watch import AsyncWatch, FileEvent, FileEventKind
from atoll.guest.frames import Fields, Op, Tag, decode_text, encode_fields
from atoll.guest.inbox import Inbox
from atoll.guest.sandbox_paths import GuestPath, check_path, naming, os_error, text
from atoll.tracing import span, traced

if TYPE_CHECKING:
    from atoll.guest.guest import Guest

__all__ = ["AsyncWatch", "FileEvent", "FileEventKind", "FileInfo", "Files", "Kind"]

_READ_LIMIT = 1 << 30
_LIST_LIMIT = 100_000
_MANY = 5_000
_STEP = 100
"""How many records are processed before other tasks get a turn."""
_ENTRY_BYTES = 512
"""The approximate size of one entry in memory."""
_path_of = operator.attrgetter("path")
_FOLLOW = _PARENTS = _RECURSIVE = 1
_MISSING_OK = _IN_PLACE = 2
_EXCLUSIVE = 4
_APPEND = 8


class WriteOptions(TypedDict, total=False):
    """Options of a write. By default the whole file is replaced, and missing parents are created."""

    mode: int | None
    parents: bool
    in_place_offset: int | None
    exclusive: bool
    append: bool


class Files:
    """File operations in one sandbox.

    They raise the built-in OSErrors, with the path. Relative paths start from `work_dir`, or by default from the
    agent's work directory.
    """

    def __init__(self, guest: Guest, work_dir: str | None = None) -> None:
        self._guest = guest
        self.work_dir = work_dir

    async def stat(self, path: GuestPath, follow: bool = True) -> FileInfo:
        fields = await self._request(Op.STAT, path, (Tag.FLAGS, _FOLLOW if follow else 0))
        kind = fields.bytes(Tag.KIND)
        if len(kind) != 1 or kind[0] not in KINDS:
            raise ProtocolError("the agent sent a file of unknown kind")
        return FileInfo(
            path=text(path),
            kind=KINDS[kind[0]],
            mode=fields.int(Tag.MODE) & 0o7777,
            uid=fields.int(Tag.UID),
            gid=fields.int(Tag.GID),
            size=fields.int(Tag.SIZE),
            mtime_s=fields.int(Tag.MTIME_NS) / 1e9,
            target=decode_text(fields.bytes(Tag.TARGET, b"")) if kind[0] == LINK else None,
        )

    @traced("agent.list_files")
    async def list(self, path: GuestPath, limit: int = _LIST_LIMIT) -> list[FileInfo]:
        """Return the entries, sorted by name. Each `path` is a name. SandboxResourceError if more than `limit`."""
        found: list[FileInfo] = []
        async for record in self._records(Op.LIST, path):
            if record.kind == ERROR:
                continue  # the entry was removed between readdir and stat
            found.append(record.info())
            if len(found) > limit:
                raise SandboxResourceError(f"{text(path)!r} has more than {limit} entries")
            if len(found) % _MANY == 0:
                buffers.need(_MANY * _ENTRY_BYTES)
        if len(found) < _MANY:
            return sorted(found, key=_path_of)
        return await workers.run(workers.TRANSFER, sorted, found, key=_path_of)

    async def walk(
        self, path: GuestPath, limit: int = _LIST_LIMIT, on_error: Callable[[OSError], None] | None = None
    ) -> AsyncIterator[FileInfo]:
        """Yield at most `limit` files below a directory, parents first. As in os.walk, errors go to `on_error`."""
        count = 0
        async for record in self._records(Op.WALK, path, (Tag.LENGTH, limit)):
            count += 1
            if count > limit:
                return
            if record.kind != ERROR:
                yield record.info()
                continue
            where = "/".join(filter(None, (text(path).rstrip("/"), decode_text(record.path))))
            error = os_error(record.size, where)
            if not record.path:
                raise error
            if on_error is not None:
                on_error(error)

    async def make_dir(self, path: GuestPath, mode: int = 0o755, parents: bool = True) -> None:
        """Create a directory. With `parents`, missing parents are created and an existing directory is no error."""
        await self._request(Op.MKDIR, path, (Tag.MODE, mode), (Tag.FLAGS, _PARENTS if parents else 0))

    async def rename(self, path: GuestPath, target: GuestPath, parents: bool = False) -> None:
        check_path(target)
        flags = _PARENTS if parents else 0
        await self._request(Op.RENAME, path, (Tag.TARGET, target), (Tag.FLAGS, flags), second=target)

    async def remove(self, path: GuestPath, recursive: bool = False, missing_ok: bool = False) -> None:
        flags = (_RECURSIVE if recursive else 0) | (_MISSING_OK if missing_ok else 0)
        await self._request(Op.REMOVE, path, (Tag.FLAGS, flags))

    async def chmod(self, path: GuestPath, mode: int) -> None:
        await self._request(Op.CHMOD, path, (Tag.MODE, mode))

    async def chown(self, path: GuestPath, uid: int, gid: int) -> None:
        await self._request(Op.CHOWN, path, (Tag.UID, uid), (Tag.GID, gid))

    async def symlink(self, path: GuestPath, target: GuestPath) -> None:
        """Create a symbolic link at `path` that points to `target`."""
        check_path(target)
        await self._request(Op.SYMLINK, path, (Tag.TARGET, target))

    @traced("agent.read_file")
    async def read(
        self, path: GuestPath, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
    ) -> bytes:
        """Return the content of a file. OSError (EFBIG) beyond `limit_bytes` (default: 1 GiB).

        Use `read_stream` or a copy for larger files.
        """
        limit = _READ_LIMIT if limit_bytes is None else limit_bytes
        pieces = self._read(await self._guest.connection(), path, offset, length, limit)
        async with contextlib.aclosing(pieces):
            return b"".join([piece async for piece in pieces])

    async def read_stream(self, path: GuestPath, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        with span("agent.read_file"):  # until it begins: a generator must not keep a span while it waits for its caller
            pieces = self._read(await self._guest.connection(), path, offset, length, None)
            first = await anext(pieces, b"")
        async with contextlib.aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    @traced("agent.write_file")
    async def write(self, path: GuestPath, data: bytes, **options: Unpack[WriteOptions]) -> int:
        """Write a file and return its size. Readers see the old content or the new, unless in place or appended."""
        fields = self._write_fields(path, options)
        connection = await self._guest.connection()
        if fits(data):
            return await write_whole(connection, fields, path, data)
        return await write_pieces(connection, fields, path, [data])

    @traced("agent.write_file")
    async def write_stream(
        self, path: GuestPath, pieces: AsyncIterable[bytes] | Iterable[bytes], **options: Unpack[WriteOptions]
    ) -> int:
        """Write a file from pieces, like `write`. If `pieces` raises or this is cancelled, the file is unchanged."""
        fields = self._write_fields(path, options)
        return await write_pieces(await self._guest.connection(), fields, path, pieces)

    def watch(self, path: GuestPath, recursive: bool = True) -> AsyncWatch:
        return AsyncWatch(self._guest, self._fields(path, (Tag.FLAGS, _RECURSIVE if recursive else 0)), text(path))

    def _fields(self, path: GuestPath, *more: tuple[Tag, int | bytes | str]) -> bytes:
        check_path(path)
        where: list[tuple[Tag, int | bytes | str]] = [(Tag.PATH, path)]
        if self.work_dir is not None:
            where.append((Tag.CWD, self.work_dir))
        return encode_fields([*where, *more])

    def _write_fields(self, path: GuestPath, options: WriteOptions) -> bytes:
        mode, offset = options.get("mode"), options.get("in_place_offset")
        flags = _PARENTS if options.get("parents", True) else 0
        flags |= (_EXCLUSIVE if options.get("exclusive") else 0) | (_APPEND if options.get("append") else 0)
        more: list[tuple[Tag, int | bytes | str]] = [] if mode is None else [(Tag.MODE, mode)]
        if offset is not None:
            flags |= _IN_PLACE
            more.append((Tag.OFFSET, offset))
        return self._fields(path, (Tag.FLAGS, flags), *more)

    async def _request(
        self, op: Op, path: GuestPath, *more: tuple[Tag, int | bytes | str], second: GuestPath | None = None
    ) -> Fields:
        fields = self._fields(path, *more)
        with span(f"agent.{op.name.lower()}"):
            connection = await self._guest.connection()
            with naming(path, second):
                return await connection.request(op, fields)

    def _read(
        self, connection: Connection, path: GuestPath, offset: int, length: int | None, limit: int | None
    ) -> AsyncGenerator[bytes, None]:
        part: list[tuple[Tag, int | bytes | str]] = [(Tag.OFFSET, offset)] if offset else []
        if length is not None:
            part.append((Tag.LENGTH, length))
        return read_pieces(connection, self._fields(path, *part), path, offset, length, limit)

    async def _records(
        self, op: Op, path: GuestPath, *more: tuple[Tag, int | bytes | str]
    ) -> AsyncGenerator[FileRecord, None]:
        """Yield records. They are received only as fast as the consumer iterates, so an endless list uses no memory."""
        inbox, parser = Inbox(), FileRecordParser()
        inbox.open(await self._guest.connection(), op, self._fields(path, *more))
        try:
            with naming(path), inbox.parsing():
                while (piece := await inbox.take()) is not None:
                    for number, record in enumerate(parser.feed(piece[1]), 1):
                        if number % _STEP == 0:
                            await asyncio.sleep(0)
                        if record.path or record.kind != ERROR:
                            _check_record(record, plain_name=op is Op.LIST)
                        yield record
                    await asyncio.sleep(0)  # many pieces may be queued already; let other tasks run
                parser.finish()
        finally:
            inbox.close()


def _check_record(record: FileRecord, *, plain_name: bool) -> None:
    components = check_relative(record.path)
    if plain_name and len(components) != 1:
        raise ProtocolError("the agent sent a path instead of a name")
