"""Commands in a sandbox: run one to its end, start one in the background, type into a shell, open a terminal."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from typing import Unpack

from atoll.engines.limit_events import LimitEvents
from atoll.errors import SandboxError, SandboxResourceError, SandboxTimeoutError
from atoll.model import Cause, ExecutionResult, manus_names
from atoll.sandbox.command import DEFAULT_OUTPUT_BYTES, AsyncCommand, new_command_id
from atoll.sandbox.execution import (
    CommandLine,
    limit_events,
    run_to_end,
    start_request,
    valid_timeout_s,
    with_cause,
)
from atoll.sandbox.sandbox_access import SandboxAccess
from atoll.sandbox.saved_state_methods import UndoHistory
from atoll.sandbox.shell import AsyncShell
from atoll.sandbox.start_up import StartState, states
from atoll.sandbox.terminal import AsyncTerminal
from atoll.tracing import span

_MAX_SHOWN = 500
"""How many characters of the output an error shows."""


class CommandMethods:
    """The methods of `AsyncSandbox` that run commands."""

    access: SandboxAccess
    timeout_s: float
    _undo: UndoHistory

    async def exec(
        self,
        command: CommandLine,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callable[[str], None] | None = None,
        on_stderr: Callable[[str], None] | None = None,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        capture_output: bool | None = None,
        **names: Unpack[manus_names.CommandNames],
    ) -> ExecutionResult:
        """Run one command and wait for it: a shell command line, or a program and its arguments as a list.

        At the timeout (default: the sandbox's) the command and everything it started are killed, and the cause of the
        result is `timeout`. If a stream exceeds `max_output_bytes`, its middle is replaced by a visible mark; with
        `capture_output=False` the result has no output. Callbacks receive text as it arrives.
        """
        captures = manus_names.captures(names, capture_output)
        seconds = self.timeout_s if timeout is None else valid_timeout_s(timeout)
        self.access.handle()
        request = start_request(command, new_command_id(), env=env, cwd=cwd, user=user, deadline_s=seconds, forget=True)
        data = stdin.encode() if isinstance(stdin, str) else stdin
        callback = _text_callback(on_stdout, on_stderr)
        await self._undo.before(self.access, command)
        limit_bytes = max_output_bytes if captures else 0
        with span("sandbox.exec", sandbox_id=self.access.sandbox_id) as current:
            done = await run_to_end(self.access, request, seconds, limit_bytes, stdin=data, on_output=callback)
            current.set(exit_code=done.exit_code, cause=done.cause)
        return done if captures else done.without_output()

    async def start(
        self,
        command: CommandLine,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        command_id: str | None = None,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> AsyncCommand:
        """Start a command in the background. Without a timeout it may run as long as the sandbox.

        If a command with this `command_id` exists, none is started; the existing one is returned, with its output from
        the beginning.
        """
        id = command_id or new_command_id()
        deadline = None if timeout is None else valid_timeout_s(timeout)
        self.access.handle()
        request = start_request(command, id, env=env, cwd=cwd, user=user, stdin=stdin, deadline_s=deadline)
        await self._undo.before(self.access, command)
        with span("sandbox.start", sandbox_id=self.access.sandbox_id, command_id=id):
            process = await self.access.guest.processes.start(request)
        return self.access.new_command(id, process, max_output_bytes)

    async def command(
        self, command_id: str, *, offsets: tuple[int, int] = (0, 0), max_output_bytes: int = DEFAULT_OUTPUT_BYTES
    ) -> AsyncCommand:
        """Attach to a background command, from these offsets of stdout and stderr. FileNotFoundError if unknown."""
        self.access.handle()
        process = await self.access.guest.processes.attach(command_id.encode(), (*offsets, 0))
        return self.access.new_command(command_id, process, max_output_bytes, offsets)

    async def commands(self) -> list[str]:
        """Return the ids of all commands that are running or whose output is kept."""
        self.access.handle()
        return [info.id.decode(errors="replace") for info in await self.access.guest.processes.list()]

    async def start_commands(self) -> list[StartState]:
        """Return the start commands of the sandbox's spec: whether they run, and how often they were restarted."""
        self.access.handle()
        return await states(self.access)

    async def run_command(self, command: str, timeout: float | None = None, *, shell: str = "default") -> str:
        """Type a command into a persistent shell and return its output, stdout and stderr in order.

        The shell's directory, variables and functions survive from one call to the next. `shell` selects one of several
        shells by name. A timeout kills the command, not the shell, and raises SandboxTimeoutError.
        """
        seconds = self.timeout_s if timeout is None else valid_timeout_s(timeout)
        running = self.shell(shell)
        await self._undo.before(self.access, command)
        before = await limit_events(self.access)
        result = await running.run(command, seconds)
        if result.cause is Cause.TIMEOUT:
            raise SandboxTimeoutError(
                f"Command execution timed out after {seconds:g} seconds",
                hint="The command was killed; the shell continues. Give a longer timeout if it needs one.",
                output=result.stdout,
            )
        if result.exit_code != 0:
            await self._refuse_silence(result, before)
        return result.stdout.rstrip("\n")

    def shell(self, name: str = "default") -> AsyncShell:
        """Return the persistent shell of this name. Its `run` also reports the exit code."""
        self.access.handle()
        if name not in self.access.shells:
            self.access.shells[name] = self.access.new_shell(name)
        return self.access.shells[name]

    async def open_terminal(
        self,
        command: CommandLine | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> AsyncTerminal:
        """Start a program (default: a shell) on a new terminal: full-screen programs, Ctrl-C and resizing work."""
        id = new_command_id()
        variables = {"TERM": "xterm-256color", **(env or {})}
        line = command if command is not None else "command -v bash >/dev/null && exec bash -i; exec sh -i"
        self.access.handle()
        request = start_request(line, id, env=variables, cwd=cwd, user=user, pty=(rows, columns))
        return self.access.new_terminal(id, await self.access.guest.processes.start(request))

    async def _refuse_silence(self, result: ExecutionResult, before: LimitEvents | None) -> None:
        """Raise if the shell was killed, or if the command failed without output because of a limit.

        `run_command` returns only text, which cannot show either.
        """
        said, killed = result.stdout.rstrip("\n"), result.cause in (Cause.SIGNAL, Cause.KILLED, Cause.LOST)
        if said and not killed:
            return
        hit = (await with_cause(self.access, result, before)).cause
        hint = (
            "The next command starts a new shell, without the directory and variables of this one." if killed else None
        )
        what = "the shell was killed before the command ended" if killed else "the command could not do its work"
        text = f" (exit code {result.exit_code}){f': {said[-_MAX_SHOWN:]}' if said else ''}"
        if hit is not result.cause:
            raise SandboxResourceError(f"{what}: a limit of the sandbox was hit: {hit}{text}", hint=hint)
        if killed:
            raise SandboxError(what + text, hint=hint)


def _text_callback(
    on_stdout: Callable[[str], None] | None, on_stderr: Callable[[str], None] | None
) -> Callable[[int, bytes], None] | None:
    if on_stdout is None and on_stderr is None:
        return None
    decoders = {channel: codecs.getincrementaldecoder("utf-8")(errors="replace") for channel in (1, 2)}
    callbacks = {1: on_stdout, 2: on_stderr}

    def deliver(channel: int, data: bytes) -> None:
        callback = callbacks.get(channel)
        if callback is not None and (text := decoders[channel].decode(data)):
            callback(text)

    return deliver
