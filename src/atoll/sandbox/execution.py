"""One command from start to result: the request to the agent, the time its answer may take, and the limit of the
sandbox that a failed command has hit."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from atoll.engines.contract import LimitReporting
from atoll.engines.limit_events import LimitEvents
from atoll.errors import AgentUnreachableError, SandboxError
from atoll.guest.processes import StartRequest
from atoll.model import Cause, ExecutionResult
from atoll.sandbox.command import execution_result
from atoll.sandbox.sandbox_access import SandboxAccess

_SLACK_S = 15.0
"""How long after a command's deadline the agent may take to report its end."""
_KILLED = 137
"""The exit code that a shell reports for a program killed by SIGKILL."""
_LAST_WORDS = 64 << 10
"""How many bytes at the end of a failed command's stderr are searched for signs of the limit that it hit."""
_PROMPT_S = 0.5
"""How soon after a command's deadline the engine is asked whether the sandbox still runs."""

CommandLine = str | Sequence[str]


def valid_timeout_s(timeout: float) -> float:
    """Validate a timeout and return it as a float. Raises ValueError."""
    if not timeout > 0:
        raise ValueError(f"a timeout must be more than 0 seconds, not {timeout!r}; math.inf means none")
    return float(timeout)


def start_request(
    command: CommandLine,
    id: str,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    stdin: bool = False,
    pty: tuple[int, int] | None = None,
    deadline_s: float | None = None,
    forget: bool = False,
) -> StartRequest:
    """Build the request that starts a command: a string is a shell command line, a list a program and its arguments.

    Raises ValueError.
    """
    shell = command if isinstance(command, str) else None
    if shell is not None and not shell.strip():
        raise ValueError("the command is empty")
    return StartRequest(
        id=id.encode(),
        shell=shell,
        argv=None if isinstance(command, str) else list(command),
        env=env or {},
        cwd=cwd or None,
        user=user,
        stdin=stdin,
        pty=pty,
        deadline_s=deadline_s,
        forget=forget,
    )


async def run_to_end(
    access: SandboxAccess,
    request: StartRequest,
    timeout_s: float,
    limit_bytes: int,
    *,
    stdin: bytes | None = None,
    on_output: Callable[[int, bytes], None] | None = None,
) -> ExecutionResult:
    """Run a command whose request has a deadline. If the connection is lost, reconnect once, unless the command has
    input or an output callback."""
    before = await limit_events(access)
    await access.guest.present(timeout_s)
    for last_try in (False, True):
        try:
            async with _patience(access, timeout_s):
                done = await access.guest.processes.run(
                    request, limit_bytes=limit_bytes, on_output=on_output, stdin=stdin
                )
            result = await execution_result(done.exit, done.stdout, done.stderr)
            return await with_cause(access, result, before)
        except AgentUnreachableError:
            await access.explain()
            # The agent is alive and knows the command by its id: the same request returns its output from the start.
            if last_try or on_output is not None or stdin is not None:
                raise
        except TimeoutError as error:
            if isinstance(error, SandboxError):
                raise
            await access.explain()
            raise AgentUnreachableError("the sandbox does not answer") from error
    raise AssertionError("unreachable")


@contextlib.asynccontextmanager
async def _patience(access: SandboxAccess, timeout_s: float) -> AsyncIterator[None]:
    """Limit the wait to the command's timeout plus slack for the agent; fail sooner if the sandbox cannot answer."""
    if math.isinf(timeout_s):
        yield
        return
    loop = asyncio.get_running_loop()
    checks: list[asyncio.Task[None]] = []

    async def check() -> None:
        try:
            await access.diagnose()
        except SandboxError:
            limit.reschedule(loop.time())
            raise

    late = loop.call_later(timeout_s + _PROMPT_S, lambda: checks.append(loop.create_task(check())))
    try:
        async with asyncio.timeout(timeout_s + _SLACK_S) as limit:
            yield
    except TimeoutError as error:
        for task in checks:
            if task.done() and not task.cancelled() and (reason := task.exception()) is not None:
                raise reason from error
        raise
    finally:
        late.cancel()
        for task in checks:
            task.cancel()


async def limit_events(access: SandboxAccess, *, killed: bool = False) -> LimitEvents | None:
    """Return how often the sandbox has hit its limits; None if it has no such limits or the engine does not count."""
    limits = access.handle().limits().limits
    if limits.memory_bytes is None and limits.pids is None and limits.disk_bytes is None:
        return None
    engine = await access.engine()
    if not isinstance(engine, LimitReporting):
        return None
    return await engine.limit_events(access.handle(), killed=killed)


async def with_cause(access: SandboxAccess, result: ExecutionResult, before: LimitEvents | None) -> ExecutionResult:
    """Return the result with the limit as its cause if the command failed because it hit a limit of the sandbox."""
    if before is None or result.success or result.cause not in (Cause.EXIT, Cause.SIGNAL):
        return result
    after = await limit_events(access, killed=result.cause is Cause.SIGNAL or result.exit_code == _KILLED)
    last_words = result.stderr_bytes[-_LAST_WORDS:].decode(errors="replace")
    cause = after.cause_since(before, last_words) if after is not None else None
    return result if cause is None else result.with_cause(cause)
