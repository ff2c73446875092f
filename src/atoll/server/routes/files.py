"""Files of a sandbox. Every path is resolved inside the sandbox, so none leads to the server's own files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from atoll.guest.files import AsyncWatch, FileInfo
from atoll.server.connections import large_results
from atoll.server.connections.streaming import Download, EventStream, Happening, while_connected
from atoll.server.middleware.auth import AppServices, SandboxReadScope, SandboxUseScope
from atoll.server.routes.openapi_parts import BINARY, BINARY_BODY, PageId, SandboxId, event_stream, moment
from atoll.server.routes.paging import page_of_sorted
from atoll.server.services import Services
from atoll.server.tree_transfers import pack, unpack
from atoll.service.models.request_model import RequestModel
from atoll.tracing import span

router = APIRouter(prefix="/sandboxes/{sandbox_id}/files", tags=["files"])
PathText = Annotated[str, Field(min_length=1, max_length=4096)]
FilePath = Annotated[
    str,
    Query(
        min_length=1,
        max_length=4096,
        description="A path inside the sandbox, absolute or relative to the work directory.",
    ),
]
Mode = Annotated[str | None, Query(pattern="^[0-7]{3,4}$", description="The permissions of the file, in octal.")]
_RANGE = re.compile(r"^bytes=(\d{0,18})-(\d{0,18})$")
TAR = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
TAR_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {**TAR, **BINARY}}}


class FileEntry(BaseModel):
    """A file, directory or link in a sandbox."""

    path: str
    """The path of the file."""
    kind: str
    """`file`, `directory`, `symlink` or another kind of file."""
    mode: str
    """The permissions, in octal."""
    size_bytes: int
    """The size in bytes."""
    uid: int
    """The user id of its owner inside."""
    gid: int
    """The group id of its owner inside."""
    modified_at: datetime
    """When the content last changed."""
    target: str | None = None
    """Where a symbolic link points."""


class FilePage(BaseModel):
    """One page of a directory."""

    items: list[FileEntry]
    """The entries of this page, sorted by name."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


class MoveRequest(RequestModel):
    """The file to move."""

    of = "a move"
    path: PathText
    """The present path."""
    target: PathText
    """The new path."""


class DirectoryRequest(RequestModel):
    """The directory to create."""

    of = "a directory"
    path: PathText
    """The path of the directory."""
    mode: Annotated[str, Field(pattern="^[0-7]{3,4}$")] = "755"
    """Its permissions, in octal."""


class ModeRequest(RequestModel):
    """The permissions to set."""

    of = "a change of permissions"
    path: PathText
    """The path of the file or directory."""
    mode: Annotated[str, Field(pattern="^[0-7]{3,4}$")]
    """The permissions, in octal."""


@router.get(
    "/content",
    operation_id="read_file",
    summary="Read a file",
    response_class=Download,
    responses={
        200: {"description": "The content.", "content": BINARY},
        206: {"description": "The requested part.", "content": BINARY},
        416: {"description": "The file is shorter than the requested part."},
    },
)
async def read(
    caller: SandboxReadScope, services: AppServices, sandbox_id: SandboxId, path: FilePath, request: Request
) -> Response:
    """Return the content of a file, or a part of it with a header such as `Range: bytes=0-99`."""
    with span("service.read_file", user_id=caller.user_id) as current:
        sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
        current.set(sandbox_id=sandbox.id)
        info = await sandbox.stat(path)
        if info.kind == "directory":
            raise IsADirectoryError(21, "Is a directory", path)
        start, stop, partial = _range(request.headers.get("range"), info.size)
        pieces = sandbox.read_stream(path, offset=start, length=stop - start if partial else None)
        # The first piece is read before the answer begins, so that a file that cannot be read is an error and not an
        # empty answer. A file may grow or shrink while it is read, so its length is sent only for a part.
        first = await anext(pieces, b"")
    headers = {"Accept-Ranges": "bytes", "ETag": f'"{info.mtime_s:.9f}-{info.size}"'}
    if partial:
        headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{info.size}", "Content-Length": str(stop - start)}
    assert isinstance(pieces, AsyncGenerator)
    content = content_of(services, first, pieces)
    return Download(content, 206 if partial else 200, headers=headers, media_type="application/octet-stream")


@router.put("/content", operation_id="write_file", summary="Write a file", openapi_extra=BINARY_BODY)
async def write(
    caller: SandboxUseScope,
    services: AppServices,
    sandbox_id: SandboxId,
    path: FilePath,
    request: Request,
    mode: Mode = None,
) -> FileEntry:
    """Write the body of the request to a file and create missing parent directories. Readers see either the old or the
    new content, and an interrupted upload changes nothing."""
    with span("service.write_file", user_id=caller.user_id) as current:
        sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
        current.set(sandbox_id=sandbox.id)
        await sandbox.write_stream(path, body_of(request), mode=int(mode, 8) if mode is not None else None)
        return _entry(await sandbox.stat(path))


@router.post("/append", operation_id="append_file", summary="Append to a file", openapi_extra=BINARY_BODY)
async def append(
    caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, path: FilePath, request: Request
) -> FileEntry:
    """Append the body of the request to a file. The file is created if it does not exist."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await sandbox.write_stream(path, body_of(request), append=True)
    return _entry(await sandbox.stat(path))


@router.get(
    "/tree",
    operation_id="download_tree",
    summary="Download a directory",
    response_class=Download,
    responses={200: {"description": "An archive.", "content": TAR}},
)
async def download(
    caller: SandboxReadScope, services: AppServices, sandbox_id: SandboxId, request: Request, path: FilePath = "."
) -> Download:
    """Return a directory and everything in it as a tar archive. Symbolic links stay links."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    archive = await while_connected(
        request, pack(services.transfers, sandbox, path, services.settings.max_upload_bytes)
    )
    return Download(content_of(services, b"", archive), media_type="application/x-tar")


@router.put("/tree", operation_id="upload_tree", summary="Upload a directory", openapi_extra=TAR_BODY, status_code=204)
async def upload(
    caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, request: Request, path: FilePath = "."
) -> None:
    """Unpack a tar archive into a directory. The directory is created if it does not exist."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await unpack(services.transfers, sandbox, path, body_of(request), services.settings.max_upload_bytes)


@router.get("", operation_id="list_files", summary="List a directory", response_model=FilePage)
async def listing(
    caller: SandboxReadScope,
    services: AppServices,
    sandbox_id: SandboxId,
    request: Request,
    path: FilePath = ".",
    page_id: PageId = None,
    limit: Annotated[int, Query(gt=0, le=10_000, description="The most entries to return.")] = 1000,
) -> Response:
    """Return the entries of a directory, sorted by name, one page at a time."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    listed = await while_connected(request, sandbox.list_files(path))
    found, more = page_of_sorted(listed, lambda each: (0.0, each.path), page_id, limit)
    return large_results.page(found, _entry, more)


@router.get("/stat", operation_id="stat_file", summary="Get information about a file")
async def stat(
    caller: SandboxReadScope,
    services: AppServices,
    sandbox_id: SandboxId,
    path: FilePath,
    follow: Annotated[bool, Query(description="Whether to follow a symbolic link.")] = True,
) -> FileEntry:
    """Return the kind, size, permissions and times of a file or directory."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    return _entry(await sandbox.stat(path, follow=follow))


@router.delete("", operation_id="remove_file", summary="Remove a file or directory", status_code=204)
async def remove(
    caller: SandboxUseScope,
    services: AppServices,
    sandbox_id: SandboxId,
    path: FilePath,
    recursive: Annotated[bool, Query(description="Whether to remove a directory that is not empty.")] = True,
    missing_ok: Annotated[bool, Query(description="Whether a missing file is not an error.")] = False,
) -> None:
    """Remove a file, or a directory and everything in it. Symbolic links are removed, not followed."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await sandbox.remove(path, recursive=recursive, missing_ok=missing_ok)


@router.post("/move", operation_id="move_file", summary="Move a file", status_code=204)
async def move(caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, wanted: MoveRequest) -> None:
    """Rename or move a file or directory. An existing file at the target is replaced."""
    await (await services.sandboxes.sandbox(caller, sandbox_id)).move(wanted.path, wanted.target)


@router.post("/mkdir", operation_id="make_dir", summary="Create a directory", status_code=204)
async def make_dir(
    caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, wanted: DirectoryRequest
) -> None:
    """Create a directory and its missing parents. A directory that already exists is not an error."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await sandbox.make_dir(wanted.path, mode=int(wanted.mode, 8))


@router.post("/chmod", operation_id="chmod_file", summary="Change permissions", status_code=204)
async def chmod(caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, wanted: ModeRequest) -> None:
    """Change the permissions of a file or directory."""
    await (await services.sandboxes.sandbox(caller, sandbox_id)).chmod(wanted.path, int(wanted.mode, 8))


@router.get(
    "/watch",
    operation_id="watch_files",
    summary="Watch a directory",
    response_class=EventStream,
    responses=event_stream("Events: `ready` first, then changes, and `heartbeat` while nothing changes."),
)
async def watch(
    caller: SandboxReadScope,
    services: AppServices,
    sandbox_id: SandboxId,
    request: Request,
    path: FilePath = ".",
    recursive: Annotated[bool, Query(description="Whether to watch all directories below, too.")] = True,
) -> EventStream:
    """Send the changes of files below a directory as they happen."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    async with sandbox.use():
        watching = await sandbox.watch(path, recursive=recursive).__aenter__()

    async def changes() -> AsyncGenerator[Happening, None]:
        with services.metrics.stream("watch"):
            yield {"type": "ready"}
            async for event in watching:
                yield {"type": str(event.kind), "path": _shown(event.path), "is_dir": event.is_dir}

    return EventStream(request, changes(), on_close=lambda: _end(watching))


async def _end(watching: AsyncWatch) -> None:
    await watching.aclose()


async def content_of(
    services: Services, first: bytes, pieces: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(pieces):
        with services.metrics.stream("download"):
            yield first
            async for piece in pieces:
                yield piece


async def body_of(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece


def _range(text: str | None, size: int) -> tuple[int, int, bool]:
    """Return start, stop, and whether only a part was requested. A header that is no range of bytes is ignored, as HTTP
    requires."""
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
        size_bytes=info.size,
        uid=info.uid,
        gid=info.gid,
        modified_at=moment(info.mtime_s),
        target=_shown(info.target) if info.target is not None else None,
    )


def _shown(path: str) -> str:
    """Return a path as JSON can contain it. JSON must be UTF-8, but file names need not be."""
    return path.encode(errors="surrogateescape").decode(errors="replace")
