"""Commands: run one to its end, follow one, leave one in the background and find it again."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import PlainTextResponse, Response

from atoll.errors import SandboxTimeoutError
from atoll.manager import Event
from atoll.model import ExecutionResult
from atoll.sandbox.start_up import StartState
from atoll.server.connections import large_results
from atoll.server.connections.large_results import Encoding
from atoll.server.connections.streaming import EventStream, while_connected
from atoll.server.middleware.auth import AppServices, SandboxReadScope, SandboxUseScope
from atoll.server.routes.command_requests import (
    CommandEntry,
    CommandInfo,
    CommandPage,
    ExecRequest,
    ExecResult,
    KillRequest,
    ShellRequest,
    StartRequest,
)
from atoll.server.routes.command_streams import detached_at_end, follow_output, send_input, start_command
from atoll.server.routes.openapi_parts import CREATED, IdempotencyKey, Limit, PageId, SandboxId, event_stream, locate
from atoll.server.routes.paging import page
from atoll.tracing import span

router = APIRouter(prefix="/sandboxes/{sandbox_id}", tags=["commands"])
CommandId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="The id of the command.")]
Offset = Annotated[
    int, Query(ge=0, le=1 << 53, description="How many bytes of this output to skip: the last `offset` received.")
]
OutputEncoding = Annotated[
    Encoding, Query(description="How output is represented. With `base64` every byte is preserved.")
]


_STREAM = event_stream("Events: `started`, `stdout`, `stderr`, `exit`, `error`, and `heartbeat` in between.")


@router.post("/exec", operation_id="exec", summary="Run a command", response_model=ExecResult)
async def execute(
    caller: SandboxUseScope,
    services: AppServices,
    sandbox_id: SandboxId,
    wanted: ExecRequest,
    request: Request,
    key: IdempotencyKey = None,
) -> Response:
    """Run a command and return its result when it has ended. If the client disconnects, the command is killed, unless
    the request has an idempotency key."""
    with span("service.exec", user_id=caller.user_id) as current:
        sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
        current.set(sandbox_id=sandbox.id)
        data = wanted.input()
        if key is not None and data is None:
            kept = wanted.max_output_bytes if wanted.capture_output else 0
            command = await start_command(services, sandbox, wanted, key=key, max_output_bytes=kept)
            async with detached_at_end(command):
                done = await while_connected(request, command.wait())
                result = done if wanted.capture_output else done.without_output()
        else:
            result = await while_connected(
                request,
                sandbox.exec(
                    wanted.command,
                    timeout=wanted.timeout or services.settings.timeout,
                    env=wanted.env,
                    cwd=wanted.cwd,
                    user=wanted.user,
                    stdin=data,
                    max_output_bytes=wanted.max_output_bytes,
                    capture_output=wanted.capture_output,
                ),
            )
    return large_results.execution(result, wanted.encoding)


@router.post(
    "/exec/stream",
    operation_id="exec_stream",
    summary="Run a command and stream its output",
    response_class=EventStream,
    responses=_STREAM,
)
async def execute_streaming(
    caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, wanted: StartRequest, request: Request
) -> EventStream:
    """Run a command and send its output as it is written. If the client disconnects, the command is killed."""
    with span("service.exec", user_id=caller.user_id) as current:
        sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
        current.set(sandbox_id=sandbox.id)
        command = await start_command(services, sandbox, wanted, max_output_bytes=0)  # all of it is sent, nothing kept

    async def end() -> None:
        if not command.ended:
            await command.kill()

    return EventStream(request, follow_output(services, sandbox_id, command, wanted.encoding), on_close=end)


@router.post("/shell", operation_id="run_command", summary="Run a command in a shell", response_model=ExecResult)
async def run_command(
    caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, wanted: ShellRequest, request: Request
) -> Response:
    """Run a command line in a persistent shell, which keeps its directory, variables and functions between commands."""
    with span("service.run_command", user_id=caller.user_id) as current:
        sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
        current.set(sandbox_id=sandbox.id)
        seconds = wanted.timeout or services.settings.timeout
        result = await while_connected(request, sandbox.shell(wanted.shell).run(wanted.command, seconds))
        current.set(exit_code=result.exit_code, cause=result.cause)
    return large_results.execution(result, "utf-8")


@router.post(
    "/commands",
    operation_id="start_command",
    summary="Start a background command",
    status_code=201,
    responses=CREATED,
)
async def start(
    caller: SandboxUseScope,
    services: AppServices,
    sandbox_id: SandboxId,
    wanted: StartRequest,
    response: Response,
    key: IdempotencyKey = None,
) -> CommandInfo:
    """Start a command in the background and return its id. Without a timeout it may run as long as the sandbox."""
    with span("service.start_command", user_id=caller.user_id) as current:
        sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
        current.set(sandbox_id=sandbox.id)
        command = await start_command(services, sandbox, wanted, key=key, background=True, max_output_bytes=0)
        current.set(command_id=command.id)
    await command.detach()
    locate(response, f"/sandboxes/{sandbox_id}/commands/{command.id}")
    return CommandInfo(id=command.id, pid=command.pid)


@router.get("/commands", operation_id="list_commands", summary="List commands")
async def commands(
    caller: SandboxReadScope, services: AppServices, sandbox_id: SandboxId, page_id: PageId = None, limit: Limit = 100
) -> CommandPage:
    """Return the commands that are running or whose output is kept, sorted by id, one page at a time."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    started = {each.name: each for each in await sandbox.start_commands()}
    found, more = page({*await sandbox.commands(), *started}, lambda id: (0.0, id), page_id, limit)
    return CommandPage(items=[_entry(id, started.get(id)) for id in found], next_page_id=more)


def _entry(id: str, started: StartState | None) -> CommandEntry:
    if started is None:
        return CommandEntry(id=id)
    return CommandEntry(id=id, state=started.state, restarts=started.restarts, exit_code=started.exit_code)


@router.get(
    "/commands/{command_id}",
    operation_id="follow_command",
    summary="Stream the output of a command",
    response_class=EventStream,
    responses=_STREAM,
)
async def follow(
    caller: SandboxReadScope,
    services: AppServices,
    sandbox_id: SandboxId,
    command_id: CommandId,
    request: Request,
    stdout: Offset = 0,
    stderr: Offset = 0,
    encoding: OutputEncoding = "utf-8",
) -> EventStream:
    """Send the output of a command from the given offsets until it ends. The command continues if the client
    disconnects; to continue reading, pass the `offset` values of the last events."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    command = await sandbox.command(command_id, offsets=(stdout, stderr), max_output_bytes=0)
    command.is_kept = True
    return EventStream(request, follow_output(services, sandbox_id, command, encoding), on_close=command.detach)


@router.get(
    "/commands/{command_id}/result",
    operation_id="wait_for_command",
    summary="Wait for a command",
    response_model=ExecResult,
)
async def wait(
    caller: SandboxReadScope,
    services: AppServices,
    sandbox_id: SandboxId,
    command_id: CommandId,
    request: Request,
    timeout: Annotated[float, Query(gt=0, le=3600, description="How many seconds to wait.")] = 60,
    encoding: OutputEncoding = "utf-8",
) -> Response:
    """Wait until a command has ended and return its result with all output that is kept. Answers 504 if it takes longer
    than `timeout`; the command continues."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    command = await sandbox.command(command_id)
    command.is_kept = True

    async def end() -> ExecutionResult:
        try:
            async with asyncio.timeout(timeout):
                return await command.wait()
        except TimeoutError:
            raise SandboxTimeoutError(f"command {command_id} still runs after {timeout:g} s") from None

    async with detached_at_end(command):
        return large_results.execution(await while_connected(request, end()), encoding)


@router.post(
    "/commands/{command_id}/kill", operation_id="kill_command", summary="Send a signal to a command", status_code=204
)
async def kill(
    caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, command_id: CommandId, wanted: KillRequest
) -> None:
    """Send a signal to a command. A command that has already ended is not an error."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    async with sandbox.use():
        with contextlib.suppress(ProcessLookupError):
            await sandbox.access.guest.processes.kill(command_id.encode(), wanted.signal)


@router.post(
    "/commands/{command_id}/stdin",
    operation_id="send_stdin",
    summary="Send input to a command",
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
    status_code=204,
)
async def send_stdin(
    caller: SandboxUseScope,
    services: AppServices,
    sandbox_id: SandboxId,
    command_id: CommandId,
    request: Request,
    end: Annotated[bool, Query(description="Whether this is the end of the input.")] = False,
) -> None:
    """Write the body of the request to the standard input of a command that was started with `stdin`."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    command = services.followed.get(f"{sandbox_id}/{command_id}")
    if command is not None:
        await send_input(command, request, end)
        return
    command = await sandbox.command(command_id, max_output_bytes=0)
    async with detached_at_end(command):
        await send_input(command, request, end)


@router.get(
    "/logs", operation_id="sandbox_logs", summary="Get the event log of a sandbox", response_class=PlainTextResponse
)
async def logs(
    caller: SandboxReadScope,
    services: AppServices,
    sandbox_id: SandboxId,
    limit: Annotated[int, Query(gt=0, le=1000, description="The most events to return.")] = 1000,
) -> PlainTextResponse:
    """Return what happened to the sandbox as text, one line for each event. Also works after the sandbox has ended."""
    events, _ = await services.sandboxes.events(caller, sandbox_id=sandbox_id, limit=limit)
    return PlainTextResponse("".join(f"{_line(event)}\n" for event in events))


def _line(event: Event) -> str:
    moment = datetime.fromtimestamp(event.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    change = f"{event.before} -> {event.after}" if event.before is not event.after else str(event.after)
    words = [moment, change, f"({event.act})" if event.act else "", event.cause or "", event.reason]
    return " ".join(str(word) for word in words if word)
