"""One command from its start to its result: what is sent to the agent, how long the answer may take, and which limit of
the sandbox a failed command has hit."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from atoll.engines.contract import LimitEvents, LimitReporting
from atoll.errors import AgentUnreachableError, SandboxError
from atoll.guest.processes import StartRequest
from atoll.model import Cause, ExecutionResult
from atoll.sandbox.command import execution_result
from atoll.sandbox.sandbox_access import SandboxAccess

_SLACK_S = 15.0
"""How much longer than a command's own deadline the agent may take to report its end."""
_KILLED = 137
"""The exit code that a shell reports for a program that SIGKILL ended."""
_LAST_WORDS = 64 << 10
"""How many of the last bytes of a failed command are searched for the limit that it hit."""
_PROMPT_S = 0.5
"""How soon after a command's deadline we check whether an answer can come at all."""

CommandLine = str | Sequence[str]


def valid_timeout_s(timeout: float) -> float:
    """Raises ValueError."""
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
    """A text is a command line for a shell, a list a program and its arguments. Raises ValueError."""
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
    """Run a command that has a deadline of its own. A connection that is lost meanwhile is made again."""
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
            # The agent lives and knows the command by its id: asking again gives its output from the start.
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
    """Time for a command, and some more for the agent to end it, but none for a sandbox that cannot answer."""
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
    """How often the sandbox has hit its limits. None if no limit can be hit, or the engine does not count."""
    limits = access.handle().limits().limits
    if limits.memory_bytes is None and limits.pids is None and limits.disk_bytes is None:
        return None
    engine = await access.engine()
    if not isinstance(engine, LimitReporting):
        return None
    return await engine.limit_events(access.handle(), killed=killed)


async def with_cause(access: SandboxAccess, result: ExecutionResult, before: LimitEvents | None) -> ExecutionResult:
    """A command that failed may have hit a limit of the sandbox: then that is the cause."""
    if before is None or result.success or result.cause not in (Cause.EXIT, Cause.SIGNAL):
        return result
    after = await limit_events(access, killed=result.cause is Cause.SIGNAL or result.exit_code == _KILLED)
    last_words = result.stderr_bytes[-_LAST_WORDS:].decode(errors="replace")
    cause = after.cause_since(before, last_words) if after is not None else None
    return result if cause is None else result.with_cause(cause)
