"""Files of a sandbox. Every path is resolved inside it; the server's own files are never touched by one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from atoll.guest.files import FileInfo, Watch
from atoll.server import results
from atoll.server.auth import SandboxReader, SandboxUser, Services_
from atoll.server.routes.sandboxes import SandboxId
from atoll.server.services import Services
from atoll.server.streaming import NDJSON, SSE, Download, EventStream, Happening, while_connected
from atoll.server.trees import pack, unpack
from atoll.service import Success

router = APIRouter(prefix="/sandboxes/{sandbox_id}/files", tags=["files"])
PathText = Annotated[str, Field(min_length=1, max_length=4096)]
FilePath = Annotated[str, Query(min_length=1, max_length=4096, description="Relative to the work directory.")]
Mode = Annotated[str | None, Query(pattern="^[0-7]{3,4}$", description="Permissions, in octal.")]
_RANGE = re.compile(r"^bytes=(\d{0,18})-(\d{0,18})$")
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_TAR = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_ANY_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": _BINARY}}
_TAR_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {**_TAR, **_BINARY}}}


class FileEntry(BaseModel):
    path: str
    kind: str
    mode: str
    """Permissions, in octal."""
    size: int
    uid: int
    gid: int
    mtime_s: float
    target: str | None = None
    """Where a link leads."""


class Move(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: PathText
    target: PathText


class MakeDirectory(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: PathText
    mode: Annotated[str, Field(pattern="^[0-7]{3,4}$")] = "755"


class ChangeMode(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: PathText
    mode: Annotated[str, Field(pattern="^[0-7]{3,4}$")]


@router.get(
    "/content",
    operation_id="read_file",
    response_class=Download,
    responses={
        200: {"description": "The content.", "content": _BINARY},
        206: {"description": "The part asked for.", "content": _BINARY},
        416: {"description": "The file is shorter."},
    },
)
async def read(
    caller: SandboxReader, services: Services_, sandbox_id: SandboxId, path: FilePath, request: Request
) -> Response:
    """The content of a file, or a part of it: `Range: bytes=0-99`."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    info = await sandbox.stat(path)
    if info.kind == "directory":
        raise IsADirectoryError(21, "Is a directory", path)
    start, stop, partial = _range(request.headers.get("range"), info.size)
    pieces = sandbox.read_stream(path, offset=start, length=stop - start if partial else None)
    headers = {"Accept-Ranges": "bytes", "ETag": f'"{info.mtime_s:.9f}-{info.size}"'}
    if partial:
        headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{info.size}", "Content-Length": str(stop - start)}
    # The first piece is read before the answer begins, so that a file that cannot be read is an error and not an
    # empty answer. A file may grow or shrink while it is read: its length is told only for a part.
    first = await anext(pieces, b"")
    assert isinstance(pieces, AsyncGenerator)
    content = _content(services, first, pieces)
    return Download(content, 206 if partial else 200, headers=headers, media_type="application/octet-stream")


@router.put("/content", operation_id="write_file", openapi_extra=_ANY_BODY)
async def write(
    caller: SandboxUser,
    services: Services_,
    sandbox_id: SandboxId,
    path: FilePath,
    request: Request,
    mode: Mode = None,
) -> FileEntry:
    """Write a file; parents are made. Readers see the old content or the new; a broken upload changes nothing."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await sandbox.write_stream(path, _body(request), mode=int(mode, 8) if mode is not None else None)
    return _entry(await sandbox.stat(path))


@router.post("/append", operation_id="append_file", openapi_extra=_ANY_BODY)
async def append(
    caller: SandboxUser, services: Services_, sandbox_id: SandboxId, path: FilePath, request: Request
) -> FileEntry:
    """Add to the end of a file, which is made if missing."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await sandbox.write_stream(path, _body(request), append=True)
    return _entry(await sandbox.stat(path))


@router.get(
    "/tree",
    operation_id="download_tree",
    response_class=Download,
    responses={200: {"description": "An archive.", "content": _TAR}},
)
async def download(
    caller: SandboxReader, services: Services_, sandbox_id: SandboxId, request: Request, path: FilePath = "."
) -> Download:
    """A directory and everything in it, as a tar archive. Links stay links."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    archive = await while_connected(
        request, pack(services.transfers, sandbox, path, services.settings.max_upload_bytes)
    )
    return Download(_content(services, b"", archive), media_type="application/x-tar")


@router.put("/tree", operation_id="upload_tree", openapi_extra=_TAR_BODY)
async def upload(
    caller: SandboxUser, services: Services_, sandbox_id: SandboxId, request: Request, path: FilePath = "."
) -> Success:
    """Unpack a tar archive into a directory, which is made if missing."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await unpack(services.transfers, sandbox, path, _body(request), services.settings.max_upload_bytes)
    return Success()


@router.get("", operation_id="list_files", response_model=list[FileEntry])
async def listing(
    caller: SandboxReader, services: Services_, sandbox_id: SandboxId, request: Request, path: FilePath = "."
) -> Response:
    """What is in a directory, by name."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    return results.listing(await while_connected(request, sandbox.list_files(path)), _entry)


@router.get("/stat", operation_id="stat_file")
async def stat(
    caller: SandboxReader, services: Services_, sandbox_id: SandboxId, path: FilePath, follow: bool = True
) -> FileEntry:
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    return _entry(await sandbox.stat(path, follow=follow))


@router.delete("", operation_id="remove_file")
async def remove(
    caller: SandboxUser,
    services: Services_,
    sandbox_id: SandboxId,
    path: FilePath,
    recursive: bool = True,
    missing_ok: bool = False,
) -> Success:
    """Remove a file, or a directory and everything in it. Links are removed, not followed."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await sandbox.remove(path, recursive=recursive, missing_ok=missing_ok)
    return Success()


@router.post("/move", operation_id="move_file")
async def move(caller: SandboxUser, services: Services_, sandbox_id: SandboxId, wanted: Move) -> Success:
    """Rename, also over an existing file."""
    await (await services.sandboxes.sandbox(caller, sandbox_id)).move(wanted.path, wanted.target)
    return Success()


@router.post("/mkdir", operation_id="make_dir")
async def make_dir(caller: SandboxUser, services: Services_, sandbox_id: SandboxId, wanted: MakeDirectory) -> Success:
    """Make a directory and its parents; an existing one is fine."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await sandbox.make_dir(wanted.path, mode=int(wanted.mode, 8))
    return Success()


@router.post("/chmod", operation_id="chmod_file")
async def chmod(caller: SandboxUser, services: Services_, sandbox_id: SandboxId, wanted: ChangeMode) -> Success:
    await (await services.sandboxes.sandbox(caller, sandbox_id)).chmod(wanted.path, int(wanted.mode, 8))
    return Success()


@router.get(
    "/watch",
    operation_id="watch_files",
    response_class=EventStream,
    responses={
        200: {
            "description": "One event after another: `ready`, then what changed, `heartbeat`.",
            "content": {NDJSON: {"schema": {"type": "string"}}, SSE: {"schema": {"type": "string"}}},
        }
    },
)
async def watch(
    caller: SandboxReader,
    services: Services_,
    sandbox_id: SandboxId,
    request: Request,
    path: FilePath = ".",
    recursive: bool = True,
) -> EventStream:
    """Changes below a directory as they happen."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    async with sandbox.use():
        watching = await sandbox.watch(path, recursive=recursive).__aenter__()

    async def changes() -> AsyncGenerator[Happening, None]:
        with services.figures.stream("watch"):
            yield {"type": "ready"}
            async for event in watching:
                yield {"type": str(event.kind), "path": _shown(event.path), "is_dir": event.is_dir}

    return EventStream(request, changes(), on_close=lambda: _end(watching))


async def _end(watching: Watch) -> None:
    await watching.aclose()


async def _content(
    services: Services, first: bytes, pieces: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(pieces):
        with services.figures.stream("download"):
            yield first
            async for piece in pieces:
                yield piece


async def _body(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece


def _range(text: str | None, size: int) -> tuple[int, int, bool]:
    """Start, stop, and whether only a part was asked for. What is no range of bytes is ignored, as HTTP says."""
    match = _RANGE.match(text) if text else None
    if match is None or not (match[1] or match[2]):
        return 0, size, False
    if match[1]:
        start = int(match[1])
        stop = min(size, int(match[2]) + 1) if match[2] else size
    else:
        start, stop = max(0, size - int(match[2])), size
    if start >= size or stop <= start:
        raise HTTPException(416, f"the file has {size} bytes", {"Content-Range": f"bytes */{size}"})
    return start, stop, True


def _entry(info: FileInfo) -> FileEntry:
    return FileEntry(
        path=_shown(info.path),
        kind=info.kind,
        mode=f"{info.mode:04o}",
        size=info.size,
        uid=info.uid,
        gid=info.gid,
        mtime_s=info.mtime_s,
        target=_shown(info.target) if info.target is not None else None,
    )


def _shown(path: str) -> str:
    """A name need not be UTF-8, JSON must be."""
    return path.encode(errors="surrogateescape").decode(errors="replace")
