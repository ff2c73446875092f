"""The persistent shell: commands typed one after another into one shell whose directory and variables survive.

How it knows that a command has ended, and how, without reading a prompt: the shell runs interactively, but on pipes,
and after each command it writes the exit code to a descriptor of its own (channel 3). The agent hands that on only
after all output that came before it. Commands get no input and cannot write to that descriptor.

On a timeout the shell gets a signal whose trap interrupts it, and then everything that it has started is killed. A trap
runs as soon as the current program is dead and before anything else of the line does, and an interrupted interactive
shell gives up its line and keeps its state. Only a shell that does not react is replaced.
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

_RECONNECTS = 5
_START_TIMEOUT_S = 10.0
_INTERRUPT_TIMEOUT_S = 1.5
_AT_PROMPT_S = 2.0
"""So long a shell that is found again has to show that it waits for a command."""
_MAX_STATUSES = 4096
_GIVE_UP = 64
"""The last of the real-time signals: nobody else uses it, and without a trap for it programs die of it."""
_TRAP = f"set +m; trap 'command kill -INT $$' {_GIVE_UP}"
"""And no job control, which gVisor offers for a terminal that is not the shell's own."""
_STATUS_CHANNEL = 3
_PRINT = 'printf "%s\\n" "$?" >&9'
_REPORT = '__atoll_report() { builtin printf \'%s\\n\' "$1" >&9; return "$1"; }'


@dataclass(frozen=True, slots=True)
class _ShellKind:
    """A shell that is tried, and how it is made to report."""

    argv: list[str]
    env: dict[str, str]
    first: str
    """What is typed first."""
    after: str
    """What is typed after each command."""


_KINDS = (
    # It reads its input line by line: a line of our own follows each command, whatever becomes of that.
    _ShellKind(
        ["bash", "--noprofile", "--norc", "--noediting", "-i"],
        {"PS1": "", "PS2": "", "HISTFILE": ""},
        f"export -n PS1 PS2 HISTFILE; {_TRAP}; {_REPORT}",
        # Leaves `$?` as it was, and the list keeps `set -e` from acting on it.
        '__atoll_report "$?" && :\n',
    ),
    # Others throw away what they have read ahead when a line fails. So expanding the prompt reports; it goes to stderr,
    # which nobody reads.
    _ShellKind(["sh", "-i"], {"PS1": f"$({_PRINT})", "PS2": "", "ENV": ""}, f"readonly PS1; {_TRAP}", ""),
)
_QUIET = {"VIRTUAL_ENV_DISABLE_PROMPT": "1", "PAGER": "cat", "GIT_PAGER": "cat", "TERM": "dumb"}


class _ShellEndedError(Exception):
    def __init__(self, exit: ProcessExit) -> None:
        super().__init__(exit.cause)
        self.exit = exit


class _Turn:
    """One caller at a time, on whatever event loop."""

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
    """A named persistent shell of a sandbox. Concurrent callers take turns; a shell that ended is started again."""

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
        """`kept`: this name stands for one shell, whichever program holds the sandbox; only one may do so at a time."""
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
        """What runs in the shell, and whether anything does, is not known."""

    async def run(self, command: str, timeout: float) -> ExecutionResult:
        """Type one command: its output, both streams in order, and exit code. A timeout is a result, as with `exec`."""
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
                # The caller is gone in the middle of a command: nobody may find its rest in the next answer.
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
        """The next line on the status channel; what is written until then goes into the capture."""
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
                if self._lost_count:  # all that it ever reported may come
                    del self._statuses[:-_MAX_STATUSES]
                if len(self._partial) > 4096 or len(self._statuses) > _MAX_STATUSES:
                    raise SandboxError("the shell of the sandbox reports nonsense")
        return self._statuses.pop(0)

    async def _interrupt(self, capture: Capture) -> None:
        """Kill what runs and bring the shell back to its prompt; replace it if it will not come."""
        try:
            async with asyncio.timeout(_INTERRUPT_TIMEOUT_S):
                await self._guest.processes.kill(self._id, _GIVE_UP)
                await self._guest.processes.kill(self._id, spare=True)
                await self._come_to_mark(capture)
                # Now it starts nothing more: what it was just starting, or what moved while we looked, is found.
                await self._guest.processes.kill(self._id, spare=True)
        except (TimeoutError, OSError, _ShellEndedError):
            await self._discard()

    async def _come_to_mark(self, capture: Capture, first: str = "") -> None:
        """Type a line that reports a word of ours, and read past it. What came before is nobody's status: prompts, or a
        greeting that the shell had not written yet when it started the report of its first one."""
        mark = secrets.token_hex(8)
        assert self._process is not None
        await self._process.send_stdin(f"{first}command printf '%s\\n' {mark} >&9\n{self._kind.after}".encode())
        while await self._status(capture) != mark:
            pass
        await self._status(capture)  # of our own line

    async def _discard(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.detach()
        try:
            await self._guest.processes.kill(self._id)
            await self._guest.processes.release(self._id)
        except (OSError, SandboxError):
            pass  # it had ended, or the sandbox has: nothing of it is left either way

    async def _ready(self) -> None:
        # Another event loop, or a connection that was lost.
        if self._process is not None and self._guest.current_connection() is not self._connection:
            await self._follow_again()
        if self._process is None and self._is_kept:
            await self._find()
        if self._process is not None and self._lost_count:
            await self._come_to_prompt()
        if self._process is None:
            await self._start()

    async def _find(self) -> None:
        """The shell of this name that was started before, by whoever held the sandbox then."""
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
        """Read past whatever it wrote. What still runs in it was somebody's who is gone, or was told that it failed."""
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
            except (_ShellEndedError, BrokenPipeError):  # there is none of this kind
                self._process = None
            except TimeoutError:
                await self._discard()
                raise AgentUnreachableError(f"the shell '{kind.argv[0]}' of the sandbox gives no prompt") from None
        raise SandboxError(
            "there is no shell in this sandbox", hint="Use exec with a list: exec(['program', 'argument'])."
        )


def _typed(command: str, kind: _ShellKind) -> bytes:
    """The line that is typed: one `eval`, so that the shell reads all of it before it runs any of it."""
    quoted = "'" + command.replace("'", "'\\''") + "'"
    return f"eval {quoted} </dev/null 2>&1 9>&-\n{kind.after}".encode(errors="surrogateescape")


def _exit_code(status: str) -> int:
    try:
        return int(status) & 0xFF
    except ValueError:
        raise SandboxError("the shell of the sandbox reports nonsense") from None
