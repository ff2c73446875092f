"""Setup commands: commands of a spec that run in a new sandbox before anybody gets it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from atoll.engines.contract import SetsUp
from atoll.errors import SandboxError, SetupError, SpecError
from atoll.model import Cause, ExecutionResult, SandboxSpec, default_user
from atoll.printable import printable
from atoll.sandbox.command import new_command_id
from atoll.sandbox.execution import run_to_end, start_request
from atoll.sandbox.sandbox_access import SandboxAccess

KEPT_BYTES = 64 << 10
"""How many bytes of each output stream of a command are kept."""
_SHOWN = 200
_MAX_OUTPUT = 16 << 10
_LEAST_S = 0.001
_USER_S = 10.0
Run = Callable[[str, float], Awaitable[ExecutionResult]]
"""Runs one command line with a timeout in seconds."""


def is_needed(spec: SandboxSpec) -> bool:
    """Return whether `set_up` has anything to do."""
    return bool(spec.setup) or default_user(spec) is not None


async def set_up(access: SandboxAccess) -> None:
    """Check the user of the spec and run its setup commands, unless the engine has done so or they ran before the
    memory was saved that the sandbox started from. Raises SetupError, and SpecError if there is no such user inside."""
    spec = access.spec
    if not is_needed(spec) or access.handle().is_prewarmed or isinstance(await access.engine(), SetsUp):
        return
    await _check_user(access)

    async def execute(command: str, timeout_s: float) -> ExecutionResult:
        """Run a setup command, which does not count as a use of the sandbox and cannot be undone."""
        request = start_request(command, new_command_id(), deadline_s=timeout_s, forget=True)
        return await run_to_end(access, request, timeout_s, KEPT_BYTES)

    await run(execute, spec.setup, spec.setup_timeout_s)


async def _check_user(access: SandboxAccess) -> None:
    user = default_user(access.spec)
    if user is None:
        return
    # A directory cannot be executed. The agent looks for the user first, so this needs no program in the image.
    request = start_request(["/"], new_command_id(), deadline_s=_USER_S, forget=True)
    try:
        await run_to_end(access, request, _USER_S, 0)
    except OSError as error:
        if isinstance(error, SandboxError):
            raise
        raise SpecError(
            f"there is no user {user!r} in the image {access.spec.image!r}",
            hint="Give another user, such as user='root', by its name or number.",
        ) from error


async def run(execute: Run, commands: Sequence[str], timeout_s: float) -> None:
    """Run the commands in order, with one timeout for all of them. Raises SetupError at the first that fails."""
    deadline = time.monotonic() + timeout_s
    for number, command in enumerate(commands, 1):
        result = await execute(command, max(_LEAST_S, deadline - time.monotonic()))
        if not result.success:
            raise _failed(f"setup command {number} of {len(commands)} ({_shown(command)!r})", result, timeout_s)


def _failed(which: str, result: ExecutionResult, timeout_s: float) -> SetupError:
    output = (result.stdout_bytes + result.stderr_bytes)[-_MAX_OUTPUT:].decode(errors="replace")
    if result.cause is Cause.TIMEOUT:
        return SetupError(
            f"{which} was killed: setup took longer than {timeout_s:g} s",
            hint="Give a longer setup_timeout_s, or an image that has what it needs.",
            output=output,
        )
    what = (result.error or "").removeprefix("the command ")
    lines = output.strip().splitlines()
    last = f": {_shown(lines[-1])}" if lines and not result.stderr_bytes.strip() else ""
    return SetupError(f"{which} {what}{last}", hint="Its output says more.", output=output)


def _shown(line: str) -> str:
    text = printable(line, instead=" ")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
