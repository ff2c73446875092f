"""Start commands, which run from the creation of a sandbox on, and the check that it is ready.

The agent inside starts such a command again when it ends, so no program of the host has to watch. When all processes of
a sandbox have ended, as by a rollback, whoever ended them starts the commands again from here. Starting may be
repeated: a command that exists is not started a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal

from atoll.engines.contract import SetsUp
from atoll.errors import AgentUnreachableError, StartError
from atoll.guest.frames import RestartPolicy
from atoll.guest.processes import RestartState
from atoll.guest.readiness import why_not_ready
from atoll.model import Cause, ReadyCheck, StartCommand
from atoll.printable import printable
from atoll.sandbox import sudo
from atoll.sandbox.command import new_command_id, shell_exit_code
from atoll.sandbox.execution import run_to_end, start_request
from atoll.sandbox.sandbox_access import SandboxAccess

_POLICIES = {
    "always": RestartPolicy.ALWAYS,
    "on-failure": RestartPolicy.ON_FAILURE,
    "never": RestartPolicy.NEVER,
}
_STATES = {RestartState.ENDED: "ended", RestartState.RUNS: "running", RestartState.WAITS: "restarting"}
_FIRST_PAUSE_S, _PAUSE_S = 0.02, 1.0
_COMMAND_S = 10.0
"""How long one run of the command of a ready check may take."""
_NOT_STARTED = (126, 127)
_MAX_OUTPUT = 16 << 10
_OUTPUT_S, _QUIET_S = 2.0, 0.2
_MAX_READ = 4 << 20
_KEPT_BYTES = 4 << 10
_SHOWN = 200
_BY_AGENT = "atoll: the command "
"""The beginning of what the agent adds to the output of a command that it starts again."""
Slot = Callable[[], AbstractAsyncContextManager[object]]
"""Opens a turn to make one short check, so that few are made at a time."""


@dataclass(frozen=True, slots=True)
class StartState:
    """A start command of a sandbox, and how it is."""

    name: str
    """The id of the command."""
    state: Literal["running", "restarting", "ended", "missing"]
    """`restarting`: it has ended, and the agent starts it again soon. `missing`: it was never started, or forgotten."""
    restarts: int = 0
    """How often it was started again."""
    exit_code: int | None = None
    """How it ended last, as a shell reports it. None: it has not ended."""


@contextlib.asynccontextmanager
async def _no_turns() -> AsyncIterator[None]:
    yield


async def start_up(access: SandboxAccess, slot: Slot = _no_turns) -> None:
    """Start the start commands of the spec, or of the image, and wait until the sandbox is ready, unless the engine
    does so. Raises StartError, which has the end of their output."""
    plan = access.start_plan()
    if not plan.is_needed or isinstance(await access.engine(), SetsUp):
        return
    for command in plan.start:
        await start(access, command)
    await _refuse_failed(access)
    if plan.ready is not None:
        await _until_ready(access, plan.ready, slot)


async def start_missing(access: SandboxAccess) -> None:
    """Start the start commands if none of them is known inside: the program that rolled the sandbox back may have died
    before it did. Does not wait until the sandbox is ready."""
    plan = access.start_plan()
    if not (plan.start or plan.sudo) or isinstance(await access.engine(), SetsUp):
        return
    await sudo.allow(access)
    if all(each.state == "missing" for each in await states(access)):
        for command in plan.start:
            await start(access, command)


async def start(access: SandboxAccess, command: StartCommand) -> None:
    """Start one command, unless there is one with its name."""
    request = start_request(command.line, command.name, env=command.env, cwd=command.work_dir, user=command.user)
    request = dataclasses.replace(request, restart=_POLICIES[command.restart])
    try:
        process = await access.guest.processes.start(request)
    except OSError as error:
        what = f"the start command {command.name!r} could not be started: {error.strerror or error}"
        raise StartError(what, hint="Check its user and its work directory.") from error
    process.detach()


async def states(access: SandboxAccess) -> list[StartState]:
    """Return how the start commands are, in its order."""
    names = [command.name for command in access.start_plan().start]
    if not names:
        return []
    running = {info.id.decode(errors="replace"): info.running for info in await access.guest.processes.list()}
    restarted = {id.decode(errors="replace"): info for id, info in (await access.guest.processes.restarts()).items()}
    found: list[StartState] = []
    for name in names:
        if (info := restarted.get(name)) is not None:
            found.append(StartState(name, _STATES[info.state], info.restarts, info.exit_code))  # type: ignore[arg-type]
        elif name in running:
            found.append(StartState(name, "running" if running[name] else "ended"))
        else:
            found.append(StartState(name, "missing"))
    return found


async def _refuse_failed(access: SandboxAccess) -> None:
    """Raise StartError if a start command has failed for good."""
    by_name = {command.name: command for command in access.start_plan().start}
    for each in await states(access):
        if each.state != "ended":
            continue
        code, output = each.exit_code, b""
        if by_name[each.name].restart == "never":
            code, output = await _result(access, each.name)
        if code == 0:
            continue
        what = "could not be started" if code in _NOT_STARTED else f"ended with exit code {code}"
        output = output or await _output(access, each.name)
        raise _error(f"the start command {each.name!r} {what}", output, "Its output says more.")


async def _until_ready(access: SandboxAccess, ready: ReadyCheck, slot: Slot) -> None:
    deadline, pause_s, why = time.monotonic() + ready.timeout_s, _FIRST_PAUSE_S, "it was not checked"
    while (left_s := deadline - time.monotonic()) > 0:
        failure = await _check(access, ready, slot, left_s)
        if failure is None:
            return
        why = failure or why
        await _refuse_failed(access)
        await asyncio.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
        pause_s = min(2 * pause_s, _PAUSE_S)
    output = b"".join([await _output(access, command.name) for command in access.start_plan().start])
    hint = "Give 'ready' a longer timeout, or see what the start commands wrote."
    raise _error(f"the sandbox was not ready within {ready.timeout_s:g} s: {ready}: {why}", output, hint)


async def _check(access: SandboxAccess, ready: ReadyCheck, slot: Slot, left_s: float) -> str | None:
    """Return None if the check succeeds, otherwise why it does not, or an empty text if that is unknown."""
    try:
        if ready.port is None:
            return await _command_fails(access, ready, min(_COMMAND_S, left_s))
        async with slot():
            return await why_not_ready(access.guest, ready.port, ready.path)
    except AgentUnreachableError:
        await access.explain()  # raises the reason if the sandbox has ended
        return "the sandbox does not answer"


async def _command_fails(access: SandboxAccess, ready: ReadyCheck, seconds: float) -> str | None:
    """Run the command of the check. It needs no turn: only the sandbox works."""
    request = start_request(ready.line, new_command_id(), deadline_s=seconds, forget=True)
    result = await run_to_end(access, request, seconds, _KEPT_BYTES)
    if result.success:
        return None
    said = (result.stderr or result.stdout).strip().splitlines()
    last = f": {_shown(said[-1])}" if said else ""
    how = f"ran longer than {seconds:g} s" if result.cause is Cause.TIMEOUT else f"failed ({result.exit_code})"
    return f"{how}{last}"


async def _result(access: SandboxAccess, name: str) -> tuple[int, bytes]:
    """Return the exit code and the end of the output of a command that has ended."""
    process = await access.guest.processes.attach(name.encode())
    output = b""
    async for piece in process:
        output = (output + piece.data)[-_MAX_OUTPUT:]
    return shell_exit_code(await process.wait()), output


async def _output(access: SandboxAccess, name: str) -> bytes:
    """Return the end of what a command has written so far. It may still run, so this stops when nothing more comes."""
    output, read_bytes = b"", 0
    with contextlib.suppress(OSError, AgentUnreachableError, TimeoutError):
        process = await access.guest.processes.attach(name.encode())
        try:
            async with asyncio.timeout(_OUTPUT_S) as quiet:  # no output at all, or none for a moment
                async for piece in process:
                    output, read_bytes = (output + piece.data)[-_MAX_OUTPUT:], read_bytes + len(piece.data)
                    if read_bytes > _MAX_READ:
                        break
                    quiet.reschedule(asyncio.get_running_loop().time() + _QUIET_S)
        finally:
            process.detach()
    return output


def _error(reason: str, output: bytes, hint: str) -> StartError:
    text = output[-_MAX_OUTPUT:].decode(errors="replace")
    lines = text.strip().splitlines()
    own = [line for line in lines if not line.startswith(_BY_AGENT)] or lines
    last = f": {_shown(own[-1])}" if own else ""
    return StartError(f"{reason}{last}", hint=hint, output=text)


def _shown(line: str) -> str:
    text = printable(line, instead=" ")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
