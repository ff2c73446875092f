"""The context of a build, as a client sends it: options as JSON and an archive, in one form.

The archive is written to a directory that exists only for the build, and then unpacked there with the same care as an
untrusted image. Nothing of an upload that breaks off is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from atoll import buffers, sparse, workers
from atoll.archive.work import Work
from atoll.cancellation import finish_or_stop
from atoll.server.connections.form_stream import parts
from atoll.server.tree_transfers import Transfer, unpack_archive
from atoll.service.models.image_build import ImageBuildRequest

OPTIONS, CONTEXT = "options", "context"
_MAX_OPTIONS = 8 << 20
_AT_ONCE = 512 << 10


async def receive(
    transfer: Transfer, content_type: str, body: AsyncIterator[bytes], *, max_bytes: int, timeout_s: float
) -> ImageBuildRequest:
    """Read the form. Its archive is unpacked into `transfer.tree`, which is empty if there is none."""
    try:
        async with asyncio.timeout(timeout_s):
            wanted, has_archive = await _read(transfer, content_type, body)
    except TimeoutError:
        raise HTTPException(408, f"the upload took more than {timeout_s:g} s", {"Connection": "close"}) from None
    if has_archive:
        work = Work()
        unpacking = workers.run(workers.TRANSFER, unpack_archive, transfer, work, max_bytes, transfer.take)
        await finish_or_stop(unpacking, work.cancel)
        await workers.run(workers.TRANSFER, transfer.archive.unlink)
    else:
        await workers.run(workers.TRANSFER, transfer.tree.mkdir)
    return wanted


async def _read(transfer: Transfer, content_type: str, body: AsyncIterator[bytes]) -> tuple[ImageBuildRequest, bool]:
    wanted: ImageBuildRequest | None = None
    has_archive = False
    async for part in parts(content_type, body):
        if part.name == OPTIONS and wanted is None:
            wanted = _options(await _collected(part.data))
        elif part.name == CONTEXT and not has_archive:
            has_archive = True
            await _written(transfer, part.data)
        else:
            raise ValueError(f"the form has one part {OPTIONS!r} and one {CONTEXT!r}, not {part.name!r}")
    return wanted or ImageBuildRequest(), has_archive


async def _collected(pieces: AsyncGenerator[bytes, None]) -> bytes:
    data = bytearray()
    async for piece in pieces:
        data += piece
        if len(data) > _MAX_OPTIONS:
            raise HTTPException(413, f"the options have more than {_MAX_OPTIONS} bytes")
        buffers.need(len(piece))
    return bytes(data)


def _options(data: bytes) -> ImageBuildRequest:
    """Parse the options. An error never shows a value, which may be a secret."""
    try:
        return ImageBuildRequest.model_validate_json(data)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_input=False, include_context=False)) from None


async def _written(transfer: Transfer, pieces: AsyncGenerator[bytes, None]) -> None:
    with transfer.archive.open("xb", buffering=0) as file:
        held = bytearray()

        async def write() -> None:
            transfer.take(await workers.run(workers.TRANSFER, sparse.write, file.fileno(), bytes(held)))
            held.clear()

        async for piece in pieces:
            held += piece
            if len(held) >= _AT_ONCE:
                await write()
        await write()
        sparse.end(file.fileno())
