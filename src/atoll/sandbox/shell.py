"""The persistent shell: commands typed one after another into one shell whose directory and variables survive.

The end of a command is detected without parsing prompts. The shell runs interactively, but on pipes, and after each
command it writes the exit code to a separate file descriptor (channel 3). The agent delivers the exit code only after
all output that came before it. Commands get no input and cannot write to that descriptor.

On a timeout the shell gets a signal whose trap interrupts it, and then everything that it has started is killed. The
trap runs as soon as the current program is dead, before the rest of the line, and an interrupted interactive shell
abandons its line and keeps its state. Only a shell that does not react is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from atoll.cancellation import finish
from atoll.errors import AgentUnreachableError, SandboxError, SandboxPausedError
from atoll.guest.connection import Connection
from atoll.guest.guest import Guest
from atoll.guest.processes import Capture, FollowedProcess, ProcessExit, StartRequest
from atoll.model import Cause, ExecutionResult
from atoll.sandbox.command import new_command_id, shell_exit_code
from atoll.tracing import traced

_RECONNECTS = 5
_START_TIMEOUT_S = 10.0
_INTERRUPT_TIMEOUT_S = 1.5
_AT_PROMPT_S = 2.0
"""How long a shell that was found again may take to show that it is ready for a command."""
_MAX_STATUSES = 4096
_GIVE_UP = 64
"""The last real-time signal. Other programs do not use it, and its default action ends a program without a trap."""
_TRAP = f"set +m; trap 'command kill -INT $$' {_GIVE_UP}"
"""`set +m` turns off job control, which gVisor offers even on a terminal that is not the shell's own."""
_STATUS_CHANNEL = 3
_PRINT = 'printf "%s\\n" "$?" >&9'
_REPORT = '__atoll_report() { builtin printf \'%s\\n\' "$1" >&9; return "$1"; }'


@dataclass(frozen=True, slots=True)
class _ShellKind:
    """A kind of shell to try, and how to make it report exit codes."""

    argv: list[str]
    env: dict[str, str]
    first: str
    """The line typed when the shell starts."""
    after: str
    """The line typed after each command."""


_KINDS = (
    # bash reads its input line by line, so a reporting line can follow each command, even one that fails.
    _ShellKind(
        ["bash", "--noprofile", "--norc", "--noediting", "-i"],
        {"PS1": "", "PS2": "", "HISTFILE": ""},
        f"export -n PS1 PS2 HISTFILE; {_TRAP}; {_REPORT}",
        # This preserves `$?`, and the `&&` list keeps `set -e` from acting on it.
        '__atoll_report "$?" && :\n',
    ),
    # Other shells discard the input they have read ahead when a line fails. So the report is made by expanding the
    # prompt; the prompt itself goes to stderr, which is not read.
    _ShellKind(["sh", "-i"], {"PS1": f"$({_PRINT})", "PS2": "", "ENV": ""}, f"readonly PS1; {_TRAP}", ""),
)
_QUIET = {"VIRTUAL_ENV_DISABLE_PROMPT": "1", "PAGER": "cat", "GIT_PAGER": "cat", "TERM": "dumb"}


class _ShellEndedError(Exception):
    def __init__(self, exit: ProcessExit) -> None:
        super().__init__(exit.cause)
        self.exit = exit


class _Turn:
    """A lock that admits one caller at a time and may be used on one event loop after another."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # an asyncio.Lock belongs to the loop that first waited for it
            self._loop, self._lock = loop, asyncio.Lock()
        async with self._lock:
            yield


class AsyncShell:
    """A named persistent shell of a sandbox. Concurrent callers take turns; a shell that has ended is restarted."""

    def __init__(
        self,
        guest: Guest,
        name: str,
        work_dir: str | None,
        limit_bytes: int,
        explain: Callable[[], Awaitable[None]],
        *,
        kept: bool = False,
    ) -> None:
        """Describe a shell; it starts with the first command.

        With `kept`, the next program that attaches to the sandbox finds the same shell under this name. Only one
        program may use it at a time.
        """
        self.name = name
        self._is_kept = kept
        self._guest = guest
        self._work_dir = work_dir
        self._limit_bytes = limit_bytes
        self._explain = explain
        self._turn = _Turn()
        self._id = b""
        self._kind = _KINDS[0]
        self._process: FollowedProcess | None = None
        self._connection: Connection | None = None
        self._statuses: list[str] = []
        self._partial = b""
        self._lost_count = False
        """Whether it is unknown what, if anything, runs in the shell."""

    @traced("sandbox.run_command")
    async def run(self, command: str, timeout: float) -> ExecutionResult:
        """Type one command and return its exit code and output, with stdout and stderr in order.

        A timeout is a result, as with `exec`.
        """
        if "\0" in command:
            raise ValueError("a command cannot contain a zero byte")
        if not timeout > 0:
            raise ValueError(f"a timeout must be more than 0 seconds, not {timeout!r}; math.inf means none")
        async with self._turn.take():
            await self._guest.present(timeout)
            try:
                return await self._run(command, timeout)
            except AgentUnreachableError:
                await self._explain()
                await self._discard()
                raise
            except SandboxPausedError:
                self._lost_count = True
                raise
            except asyncio.CancelledError:
                # The command was cancelled halfway; its remaining output must not appear in the next result.
                await finish(self._discard())
                raise

    async def close(self) -> None:
        """End the shell and what it started. The next command starts a new one."""
        async with self._turn.take():
            await self._discard()

    async def _run(self, command: str, timeout: float) -> ExecutionResult:
        capture = Capture(self._limit_bytes)
        await self._ready()
        assert self._process is not None
        clock = asyncio.get_running_loop().time
        started = clock()
        cause, code = Cause.EXIT, 0
        try:
            async with asyncio.timeout(timeout):
                await self._process.send_stdin(_typed(command, self._kind))
                code = _exit_code(await self._status(capture))
        except TimeoutError:
            await self._guest.diagnose()
            cause, code = Cause.TIMEOUT, 124
            await self._interrupt(capture)
        except _ShellEndedError as ended:
            code = shell_exit_code(ended.exit)
            cause = ended.exit.cause
            self._process = None
        return ExecutionResult.captured(
            capture.value(),
            b"",
            exit_code=code,
            duration_s=clock() - started,
            cause=cause,
            truncated=capture.truncated,
        )

    async def _status(self, capture: Capture) -> str:
        """Return the next line of the status channel. Output that arrives before it goes into the capture."""
        reconnects = 0
        while not self._statuses:
            assert self._process is not None
            try:
                piece = await self._process.__anext__()
            except StopAsyncIteration:
                raise _ShellEndedError(await self._process.wait()) from None
            except AgentUnreachableError:
                reconnects += 1
                await self._explain()
                await self._follow_again()
                if reconnects > _RECONNECTS or self._process is None:
                    raise
                continue
            if piece.channel == 1:
                capture.add(memoryview(piece.data))
            elif piece.channel == _STATUS_CHANNEL:
                *lines, self._partial = (self._partial + piece.data).split(b"\n")
                self._statuses += [line.decode(errors="replace") for line in lines]
                if self._lost_count:  # every report since the shell's start may arrive again
                    del self._statuses[:-_MAX_STATUSES]
                if len(self._partial) > 4096 or len(self._statuses) > _MAX_STATUSES:
                    raise SandboxError("the shell of the sandbox sent an invalid report")
        return self._statuses.pop(0)

    async def _interrupt(self, capture: Capture) -> None:
        """Kill the running command and bring the shell back to its prompt; discard a shell that does not react."""
        try:
            async with asyncio.timeout(_INTERRUPT_TIMEOUT_S):
                await self._guest.processes.kill(self._id, _GIVE_UP)
                await self._guest.processes.kill(self._id, spare=True)
                await self._come_to_mark(capture)
                # The shell now starts nothing more, so this finds processes that the first pass missed: those it was
                # just starting, and those that changed their parent during the search.
                await self._guest.processes.kill(self._id, spare=True)
        except (TimeoutError, OSError, _ShellEndedError):
            await self._discard()

    async def _come_to_mark(self, capture: Capture, first: str = "") -> None:
        """Type a line that reports a random mark, and read past it. All reports before the mark are discarded: they
        come from prompts or from a greeting."""
        mark = secrets.token_hex(8)
        assert self._process is not None
        await self._process.send_stdin(f"{first}command printf '%s\\n' {mark} >&9\n{self._kind.after}".encode())
        while await self._status(capture) != mark:
            pass
        await self._status(capture)  # the exit code of the line with the mark

    async def _discard(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.detach()
        try:
            await self._guest.processes.kill(self._id)
            await self._guest.processes.release(self._id)
        except (OSError, SandboxError):
            pass  # the shell or the sandbox has already ended

    async def _ready(self) -> None:
        # Reattach if the connection was lost or belongs to another event loop.
        if self._process is not None and self._guest.current_connection() is not self._connection:
            await self._follow_again()
        if self._process is None and self._is_kept:
            await self._find()
        if self._process is not None and self._lost_count:
            await self._come_to_prompt()
        if self._process is None:
            await self._start()

    async def _find(self) -> None:
        """Attach to a running shell of this name that another program started earlier."""
        mine = re.compile(rb"kept-(\d)-%s-[0-9a-f]+" % self._digest())
        found = [(info.age_s, info.id) for info in await self._guest.processes.list() if info.running]
        for _, id in sorted(found):
            match = mine.fullmatch(id)
            if match is None or int(match[1]) >= len(_KINDS):
                continue
            with contextlib.suppress(FileNotFoundError):
                self._process = await self._guest.processes.attach(id)
                self._id, self._kind, self._connection = id, _KINDS[int(match[1])], self._guest.current_connection()
                self._statuses, self._partial, self._lost_count = [], b"", True
                return

    async def _come_to_prompt(self) -> None:
        """Read past all earlier output and interrupt a command that still runs in the shell: its caller is gone or has
        already received an error."""
        capture = Capture(4096)
        try:
            async with asyncio.timeout(_AT_PROMPT_S):
                await self._come_to_mark(capture)
        except TimeoutError:
            await self._interrupt(capture)
        except (_ShellEndedError, BrokenPipeError):
            self._process = None
        self._lost_count = False

    def _digest(self) -> bytes:
        return hashlib.sha256(self.name.encode()).hexdigest()[:16].encode()

    def _new_id(self, kind: _ShellKind) -> bytes:
        if self._is_kept:
            return b"kept-%d-%s-%s" % (_KINDS.index(kind), self._digest(), new_command_id().encode())
        return f"shell-{self.name[:32]}-{new_command_id()}".encode()[:64]

    async def _follow_again(self) -> None:
        assert self._process is not None
        first, second, third = self._process.offsets
        for tries_left in range(_RECONNECTS, -1, -1):
            try:
                self._process = await self._guest.processes.attach(self._id, (first, second, third))
                self._connection = self._guest.current_connection()
                return
            except FileNotFoundError:
                self._process = None
                return
            except AgentUnreachableError:  # lost again meanwhile
                if not tries_left:
                    raise
                await self._explain()

    async def _start(self) -> None:
        for kind in _KINDS:
            self._kind = kind
            self._id = self._new_id(kind)
            self._statuses, self._partial, self._lost_count = [], b"", False
            self._process = await self._guest.processes.start(
                StartRequest(
                    id=self._id, argv=kind.argv, env={**_QUIET, **kind.env}, cwd=self._work_dir, stdin=True, status=True
                )
            )
            self._connection = self._guest.current_connection()
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await self._come_to_mark(Capture(4096), f"{kind.first}; ")
                return
            except (_ShellEndedError, BrokenPipeError):  # the sandbox has no shell of this kind
                self._process = None
            except TimeoutError:
                await self._discard()
                raise AgentUnreachableError(f"the shell '{kind.argv[0]}' of the sandbox shows no prompt") from None
        raise SandboxError(
            "there is no shell in this sandbox", hint="Use exec with a list: exec(['program', 'argument'])."
        )


def _typed(command: str, kind: _ShellKind) -> bytes:
    """Return the line to type: one `eval`, so that the shell reads the whole command before it runs any of it."""
    quoted = "'" + command.replace("'", "'\\''") + "'"
    return f"eval {quoted} </dev/null 2>&1 9>&-\n{kind.after}".encode(errors="surrogateescape")


def _exit_code(status: str) -> int:
    try:
        return int(status) & 0xFF
    except ValueError:
        raise SandboxError("the shell of the sandbox sent an invalid report") from None
