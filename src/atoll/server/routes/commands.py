"""Commands: run one to its end, follow one, leave one in the background and find it again."""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import hashlib
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from atoll import manus
from atoll.command import AsyncCommand
from atoll.errors import SandboxTimeoutError
from atoll.manager import Event, ManagedSandbox
from atoll.model import Cause, ExecutionResult
from atoll.server import results
from atoll.server.auth import SandboxReader, SandboxUser, Services_
from atoll.server.results import Encoding
from atoll.server.routes.sandboxes import IdempotencyKey, SandboxId
from atoll.server.services import Services
from atoll.server.streaming import NDJSON, SSE, EventStream, Happening, while_connected
from atoll.service import Success
from atoll.service.models import Variables
from atoll.spelling import before

router = APIRouter(prefix="/sandboxes/{sandbox_id}", tags=["commands"])
CommandId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Argument = Annotated[str, Field(max_length=131072)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
Offset = Annotated[int, Query(ge=0, le=1 << 53)]
_MOST_OUTPUT = 64 << 20


class CommandRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    command: (
        Annotated[str, Field(min_length=1, max_length=131072)]
        | Annotated[list[Argument], Field(min_length=1, max_length=4096)]
    )
    """A command line for a shell, or a program and its arguments."""
    timeout_s: Seconds | None = None
    """When it is over the command dies with everything it started."""
    env: Variables = {}
    cwd: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    user: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    encoding: Encoding = "utf-8"
    """Of what it writes. As base64 every byte comes through as it is."""

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        return before(lambda given: manus.command(given, cls.model_fields), value)


class ExecRequest(CommandRequest):
    stdin: str | None = None
    stdin_encoding: Encoding = "utf-8"
    max_output_bytes: Annotated[int, Field(ge=0, le=_MOST_OUTPUT)] = 8 << 20
    """What goes beyond is left out in the middle, visibly."""
    capture_output: bool = True
    """Whether the answer has any output at all."""


class StartRequest(CommandRequest):
    stdin: bool = False
    """Whether input will be sent to it."""


class ExecResult(BaseModel):
    """What a command did. One that fails is a result, not an error."""

    success: bool
    stdout: str
    stderr: str
    exit_code: int
    exitCode: int  # noqa: N815
    """The same as `exit_code`."""
    error: str | None
    """What went wrong, in one line. Null if the command succeeded."""
    cause: Cause
    duration_s: float
    truncated: bool
    cpu_s: float
    max_rss_bytes: int


class CommandInfo(BaseModel):
    id: str
    pid: int


class ShellRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    command: Annotated[str, Field(min_length=1, max_length=131072)]
    timeout_s: Seconds | None = None
    shell: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "default"

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        return before(lambda given: manus.command(given, cls.model_fields), value)


class KillRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    signal: Annotated[int, Field(ge=1, le=64)] = 9
    """With 9 everything that the command started dies too."""


_STREAMS: dict[int | str, dict[str, object]] = {
    200: {
        "description": "One event after another: `started`, `stdout`, `stderr`, `exit`, `error`, `heartbeat`.",
        "content": {NDJSON: {"schema": {"type": "string"}}, SSE: {"schema": {"type": "string"}}},
    }
}


@router.post("/exec", operation_id="exec", response_model=ExecResult)
async def execute(
    caller: SandboxUser,
    services: Services_,
    sandbox_id: SandboxId,
    wanted: ExecRequest,
    request: Request,
    key: IdempotencyKey = None,
) -> Response:
    """Run a command to its end. If the client goes away it is killed, unless there is an idempotency key."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    data = _input(wanted)
    if key is not None and data is None:
        kept = wanted.max_output_bytes if wanted.capture_output else 0
        command = await _start(services, sandbox, wanted, key=key, max_output_bytes=kept)
        with contextlib.closing(_Leaving(command)):
            done = await while_connected(request, command.wait())
            return results.execution(done if wanted.capture_output else done.without_output(), wanted.encoding)
    result = await while_connected(
        request,
        sandbox.exec(
            wanted.command,
            timeout=wanted.timeout_s or services.settings.timeout,
            env=wanted.env,
            cwd=wanted.cwd,
            user=wanted.user,
            stdin=data,
            max_output_bytes=wanted.max_output_bytes,
            capture_output=wanted.capture_output,
        ),
    )
    return results.execution(result, wanted.encoding)


@router.post("/exec/stream", operation_id="exec_stream", response_class=EventStream, responses=_STREAMS)
async def execute_streaming(
    caller: SandboxUser, services: Services_, sandbox_id: SandboxId, wanted: StartRequest, request: Request
) -> EventStream:
    """Run a command and see what it writes as it comes. If the client goes away it is killed."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    command = await _start(services, sandbox, wanted, max_output_bytes=0)  # all of it is sent, nothing kept

    async def end() -> None:
        if command._exit is None:
            await command.kill()

    return EventStream(request, _follow(services, sandbox_id, command, wanted.encoding), on_close=end)


@router.post("/shell", operation_id="run_command", response_model=ExecResult)
async def run_command(
    caller: SandboxUser, services: Services_, sandbox_id: SandboxId, wanted: ShellRequest, request: Request
) -> Response:
    """Type a command into a shell that remembers directory, variables and functions."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    seconds = wanted.timeout_s or services.settings.timeout
    return results.execution(
        await while_connected(request, sandbox.shell(wanted.shell).run(wanted.command, seconds)), "utf-8"
    )


@router.post("/commands", operation_id="start_command", status_code=201)
async def start(
    caller: SandboxUser, services: Services_, sandbox_id: SandboxId, wanted: StartRequest, key: IdempotencyKey = None
) -> CommandInfo:
    """Start a command in the background. Without a timeout it runs as long as the sandbox."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    command = await _start(services, sandbox, wanted, key=key, background=True, max_output_bytes=0)
    await command.detach()
    return CommandInfo(id=command.id, pid=command.pid)


@router.get("/commands", operation_id="list_commands")
async def commands(caller: SandboxReader, services: Services_, sandbox_id: SandboxId) -> list[str]:
    """The ids of all that run or whose output is kept."""
    return await (await services.sandboxes.sandbox(caller, sandbox_id)).commands()


@router.get("/commands/{command_id}", operation_id="follow_command", response_class=EventStream, responses=_STREAMS)
async def follow(
    caller: SandboxReader,
    services: Services_,
    sandbox_id: SandboxId,
    command_id: CommandId,
    request: Request,
    stdout: Offset = 0,
    stderr: Offset = 0,
    encoding: Encoding = "utf-8",
) -> EventStream:
    """What it writes, from these offsets on, until its end. It goes on if the client goes away: come back with the
    `offset`s that the last events had."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    command = await sandbox.command(command_id, offsets=(stdout, stderr), max_output_bytes=0)
    command._keep = True
    return EventStream(request, _follow(services, sandbox_id, command, encoding), on_close=command.detach)


@router.get("/commands/{command_id}/result", operation_id="wait_for_command", response_model=ExecResult)
async def wait(
    caller: SandboxReader,
    services: Services_,
    sandbox_id: SandboxId,
    command_id: CommandId,
    request: Request,
    timeout: Annotated[float, Query(gt=0, le=3600)] = 60,
    encoding: Encoding = "utf-8",
) -> Response:
    """Wait for its end; all of the output that is kept. 504 if it takes longer: it goes on."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    command = await sandbox.command(command_id)
    command._keep = True

    async def end() -> ExecutionResult:
        try:
            async with asyncio.timeout(timeout):
                return await command.wait()
        except TimeoutError:
            raise SandboxTimeoutError(f"command {command_id} still runs after {timeout:g} s") from None

    with contextlib.closing(_Leaving(command)):
        return results.execution(await while_connected(request, end()), encoding)


@router.post("/commands/{command_id}/kill", operation_id="kill_command")
async def kill(
    caller: SandboxUser, services: Services_, sandbox_id: SandboxId, command_id: CommandId, wanted: KillRequest
) -> Success:
    """Send it a signal. One that has ended already is fine."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    async with sandbox.use():
        with contextlib.suppress(ProcessLookupError):
            await sandbox._guest.processes.kill(command_id.encode(), wanted.signal)
    return Success()


@router.post(
    "/commands/{command_id}/stdin",
    operation_id="send_stdin",
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def send_stdin(
    caller: SandboxUser,
    services: Services_,
    sandbox_id: SandboxId,
    command_id: CommandId,
    request: Request,
    end: Annotated[bool, Query(description="There is no more after this.")] = False,
) -> Success:
    """Write to its input, which it was started with."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    command = services.followed.get(f"{sandbox_id}/{command_id}")
    if command is not None:
        await _send(command, request, end)
        return Success()
    command = await sandbox.command(command_id, max_output_bytes=0)
    with contextlib.closing(_Leaving(command)):
        await _send(command, request, end)
    return Success()


@router.get("/logs", operation_id="sandbox_logs", response_class=PlainTextResponse)
async def logs(
    caller: SandboxReader,
    services: Services_,
    sandbox_id: SandboxId,
    limit: Annotated[int, Query(gt=0, le=1000)] = 1000,
) -> PlainTextResponse:
    """What happened to the sandbox, as text; also of one that has ended."""
    events, _ = await services.sandboxes.events(caller, sandbox_id=sandbox_id, limit=limit)
    return PlainTextResponse("".join(f"{_line(event)}\n" for event in events))


class _Leaving:
    """Lets go of a command at the end of a block; it goes on."""

    def __init__(self, command: AsyncCommand) -> None:
        self._command = command

    def close(self) -> None:
        self._command._stream.detach()


async def _start(
    services: Services,
    sandbox: ManagedSandbox,
    wanted: CommandRequest,
    *,
    key: str | None = None,
    background: bool = False,
    **options: int,
) -> AsyncCommand:
    seconds = wanted.timeout_s or (None if background else services.settings.timeout)
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
    command._keep = key is not None
    return command


async def _send(command: AsyncCommand, request: Request, end: bool) -> None:
    async for piece in request.stream():
        if piece:
            await command.send_stdin(piece)
    if end:
        await command.close_stdin()


async def _follow(
    services: Services, sandbox_id: str, command: AsyncCommand, encoding: Encoding
) -> AsyncGenerator[Happening, None]:
    """Each piece with the offset behind it, from where to go on after a lost connection."""
    place = f"{sandbox_id}/{command.id}"
    services.followed[place] = command
    try:
        with services.figures.stream("command"):
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


def _input(wanted: ExecRequest) -> bytes | None:
    if wanted.stdin is None:
        return None
    if wanted.stdin_encoding == "base64":
        try:
            return base64.b64decode(wanted.stdin, validate=True)
        except ValueError:
            raise ValueError("stdin is not base64") from None
    return wanted.stdin.encode(errors="replace")


def _line(event: Event) -> str:
    moment = datetime.fromtimestamp(event.at, UTC).isoformat(timespec="milliseconds")
    change = f"{event.before} -> {event.after}" if event.before is not event.after else str(event.after)
    words = [moment, change, f"({event.act})" if event.act else "", event.cause or "", event.reason]
    return " ".join(str(word) for word in words if word)
