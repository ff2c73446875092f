"""Start commands for requests, and pass on their input and output."""

from __future__ import annotations

import base64
import codecs
import contextlib
import hashlib
from collections.abc import AsyncGenerator

from fastapi import Request

from atoll.manager import ManagedSandbox
from atoll.sandbox.command import AsyncCommand
from atoll.server.connections.large_results import Encoding
from atoll.server.connections.streaming import Happening
from atoll.server.routes.command_requests import CommandRequest, StartRequest
from atoll.server.services import Services


async def start_command(
    services: Services,
    sandbox: ManagedSandbox,
    wanted: CommandRequest,
    *,
    key: str | None = None,
    background: bool = False,
    **options: int,
) -> AsyncCommand:
    seconds = wanted.timeout or (None if background else services.settings.timeout)
    command_id = f"k{hashlib.sha256(key.encode()).hexdigest()[:40]}" if key is not None else None
    command = await sandbox.start(
        wanted.command,
        timeout=seconds,
        env=wanted.env,
        cwd=wanted.cwd,
        user=wanted.user,
        stdin=isinstance(wanted, StartRequest) and wanted.stdin,
        command_id=command_id,
        **options,
    )
    command.is_kept = key is not None
    return command


@contextlib.asynccontextmanager
async def detached_at_end(command: AsyncCommand) -> AsyncGenerator[None, None]:
    """Detach from a command at the end of the block. The command continues."""
    try:
        yield
    finally:
        await command.detach()


async def send_input(command: AsyncCommand, request: Request, end: bool) -> None:
    async for piece in request.stream():
        if piece:
            await command.send_stdin(piece)
    if end:
        await command.close_stdin()


async def follow_output(
    services: Services, sandbox_id: str, command: AsyncCommand, encoding: Encoding
) -> AsyncGenerator[Happening, None]:
    """Yield each piece of output with the offset behind it, from where to continue after a lost connection."""
    place = f"{sandbox_id}/{command.id}"
    services.followed[place] = command
    try:
        with services.metrics.stream("command"):
            async for event in _events(command, encoding):
                yield event
    finally:
        if services.followed.get(place) is command:
            del services.followed[place]


async def _events(command: AsyncCommand, encoding: Encoding) -> AsyncGenerator[Happening, None]:
    decoders = {name: codecs.getincrementaldecoder("utf-8")(errors="replace") for name in ("stdout", "stderr")}
    yield {"type": "started", "command_id": command.id, "pid": command.pid, "dropped_bytes": command.dropped_bytes}
    positions = dict(zip(("stdout", "stderr"), command.offsets, strict=True))
    async for piece in command:
        positions[piece.name] += len(piece.data)
        if encoding == "base64":
            text, held = base64.b64encode(piece.data).decode(), 0
        else:
            text = decoders[piece.name].decode(piece.data)
            held = len(decoders[piece.name].getstate()[0])
        yield {"type": piece.name, "data": text, "offset": positions[piece.name] - held}
    result = await command.wait()
    yield {
        "type": "exit",
        "exit_code": result.exit_code,
        "exitCode": result.exit_code,
        "cause": result.cause,
        "duration_s": result.duration_s,
        "success": result.success,
        "error": result.error,
    }
