"""One sandbox, as users hold it: create it, run commands in it, move files in and out, clean it up."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import functools
import math
import os
import posixpath
import secrets
import shlex
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from atoll import manus, setup
from atoll.checkpoint import Change, Checkpoint, Snapshot, Undo
from atoll.command import AsyncCommand, execution_result, new_command_id
from atoll.engines import registry, shared
from atoll.engines.base import (
    ByteStream,
    Checkpointing,
    Engine,
    Finding,
    Leasing,
    LimitEvents,
    LimitReporting,
    NetworkPolicies,
    Pausable,
    PortExposing,
    SetsUp,
)
from atoll.errors import (
    AgentUnreachableError,
    CheckpointNotFoundError,
    EngineError,
    SandboxError,
    SandboxGoneError,
    SandboxNotFoundError,
    SandboxPausedError,
    SandboxResourceError,
    SandboxTimeoutError,
    SpecError,
    UnsupportedError,
)
from atoll.export import Export
from atoll.forwarding import AsyncForward
from atoll.guest import connections, trees
from atoll.guest.channel import Channel
from atoll.guest.files import FileInfo, Files, Watch
from atoll.guest.guest import Guest
from atoll.guest.listening import ListeningPort, listening_ports
from atoll.guest.ports import PortStream
from atoll.guest.processes import StartRequest
from atoll.model import (
    Capability,
    Cause,
    ExecutionResult,
    Handle,
    Observation,
    SandboxDetails,
    SandboxSpec,
    State,
    Stats,
    Volume,
)
from atoll.network.policy import NetworkRules
from atoll.network.refusals import Refusal
from atoll.settings import Settings
from atoll.shell import AsyncShell
from atoll.terminal import AsyncTerminal

DEFAULT_TIMEOUT_S = 300.0
DEFAULT_OUTPUT_BYTES = 8 << 20
MOST_LEASE_S = 86400.0
"""A forgotten lease ends within a day; whoever needs more takes another one."""
_SLACK_S = 15.0
"""How much longer than a command's own deadline we wait for the agent to say that it is over."""
_KILLED = 137
"""What a shell says of a program that SIGKILL ended."""
_LAST_WORDS = 64 << 10
"""How many of the last bytes of a failed command are searched for the limit that it hit."""
_PROMPT_S = 0.5
"""How soon after a command's deadline we check whether an answer can come at all."""
_INSPECT_S = 5.0
_SAID = 500
"""How many characters of the output an error shows."""

_UNDO = "before: "
"""What `made_by` of the checkpoints begins with that `undo` goes back to."""
_DYING_S = (0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)

CommandLine = str | Sequence[str]


def new_sandbox_id() -> str:
    return secrets.token_hex(12)


class AsyncSandbox:
    """An isolated Linux environment. Use it as an async context manager, or call `create` and `cleanup`.

    `exec` runs one process and returns its result; `run_command` types into a shell that remembers. A command that
    fails is a result; an exception means that the sandbox itself failed. Relative paths start at the work directory.

    With `server` (or ATOLL_URL) the sandbox is one of that server, everything else stays the same. Each of the named
    `ports` is a variable inside, `NAME=PORT`, and exposed by the server.
    """

    def __init__(
        self,
        spec: SandboxSpec | Mapping[str, object] | None = None,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        image: str | None = None,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        disk: str | int | None = None,
        env: Mapping[str, str] | None = None,
        volumes: Mapping[str, str] | Sequence[str] | None = None,
        work_dir: str | None = None,
        network: str | Mapping[str, object] | NetworkRules | None = None,
        isolation: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        lifetime: float | None = None,
        setup: Sequence[str] | None = None,
        setup_timeout: float | None = None,
        task_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        ports: Mapping[str, int] | None = None,
        undo: bool | Undo = False,
        settings: Settings | None = None,
        **names: Unpack[manus.SandboxNames],
    ) -> None:
        """`spec` may be an object as in a request to a server, or as the Manus example has it: there `timeout` is how
        long the sandbox may live. As a keyword `timeout` is how long a command may take, and `lifetime` how long the
        sandbox may live. `setup` are command lines that run before `create` returns."""
        wanted: dict[str, object] = {
            "image": image,
            "env": {**{name: str(port) for name, port in (ports or {}).items()}, **(env or {})} or None,
            "volumes": _volumes(volumes),
            "work_dir": work_dir,
            "network": dict(network) if isinstance(network, Mapping) else network,
            "isolation": isolation,
            "labels": dict(labels) if labels else None,
            "setup": setup,
            "setup_timeout_s": setup_timeout,
            "task_id": task_id,
            "memory": memory,
            "cpus": cpus,
            "pids": pids,
            "disk": disk,
            "lifetime": lifetime,
        }
        given = {name: value for name, value in wanted.items() if value is not None}
        given |= {name: value for name, value in names.items() if value is not None}
        if spec is not None and given:
            raise SpecError(f"give either a spec or {', '.join(given)}, not both")
        self.id = new_sandbox_id()
        described = given if spec is None else spec
        self.spec = described if isinstance(described, SandboxSpec) else SandboxSpec.described(described)
        self.timeout_s = _seconds(timeout)
        self._undo = undo if isinstance(undo, Undo) else Undo() if undo else _undo_of(self.spec)
        self._kept: list[str] | None = None
        """The checkpoints that `undo` can go back to, oldest first, once they were looked up."""
        self._settings = settings or Settings.load()
        self._held: shared.Held | None = None
        if server is None and api_key is None and engine == "auto":
            server = os.environ.get("ATOLL_URL") or None
        if server is not None or api_key is not None:
            if engine not in ("auto", "remote"):
                raise SpecError(f"give either a server or the engine {engine!r}, not both")
            engine = "remote"
        self._server, self._api_key = server, api_key
        self._engine: Engine | None = engine if not isinstance(engine, str) else None
        self._engine_name = engine if isinstance(engine, str) else engine.name
        self._handle: Handle | None = None
        self._named_ports = dict(ports or {})
        self._deleted = False
        self._shells: dict[str, AsyncShell] = {}
        self._guest = Guest(self._connect, diagnose=self._diagnose)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def create(self) -> Self:
        """Make the sandbox and wait until it answers. If that fails nothing is left behind."""
        if self._handle is not None:
            raise SandboxError("this sandbox was already created")
        try:
            self._handle = await (await self._the_engine()).create(self.id, self.spec)
            self.spec = self.spec.model_copy(update={"image": self._handle.spec.image})
            await self._guest.channel()
            await self._expose_named()
            await self._set_up()
        except BaseException:
            await asyncio.shield(self.cleanup())
            raise
        return self

    async def _set_up(self) -> None:
        """Run the setup commands of the spec, unless the engine has done so. Raises SetupError."""
        if self.spec.setup and not isinstance(await self._the_engine(), SetsUp):
            await setup.run(self._run_plainly, self.spec.setup, self.spec.setup_timeout_s)

    async def _run_plainly(self, command: str, seconds: float) -> ExecutionResult:
        """Neither an operation of a user nor a step that can be undone."""
        request = self._request(
            command, new_command_id(), env=None, cwd=None, user=None, deadline_s=seconds, forget=True
        )
        return await self._run_to_end(request, seconds, None, None, setup.KEPT_BYTES)

    @classmethod
    async def attach(
        cls,
        sandbox_id: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        settings: Settings | None = None,
    ) -> Self:
        """A sandbox that exists, also one that another process made. SandboxNotFoundError if there is none."""
        sandbox = cls(engine=engine, server=server, api_key=api_key, timeout=timeout, settings=settings)
        for name in registry.auto_names() if sandbox._engine_name == "auto" else [sandbox._engine_name]:
            sandbox._engine_name = name
            handle = await sandbox._find(sandbox_id)
            if handle is not None:
                sandbox.id, sandbox.spec, sandbox._handle = handle.sandbox_id, handle.spec, handle
                sandbox._undo = _undo_of(handle.spec)
                return sandbox
            sandbox._let_go_of_engine()
            sandbox._engine = None
        raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found")

    async def _find(self, sandbox_id: str) -> Handle | None:
        engine = await self._the_engine()
        found = [await engine.find(sandbox_id)] if isinstance(engine, Finding) else await engine.list()
        return next((handle for handle in found if handle is not None and handle.sandbox_id == sandbox_id), None)

    async def cleanup(self) -> None:
        """Delete the sandbox and everything in it. May be called again."""
        self._shells.clear()
        await self._guest.aclose()
        if self._handle is not None and not self._deleted:
            await self._destroy()
        self._let_go_of_engine()

    async def delete(self, *, export: Export | str | Path | None = None) -> None:
        """As `cleanup`. With `export` what is in `/output` is copied to that directory of the host first; if that
        fails, the sandbox stays. `Export` says what else may be copied, and how much."""
        if export is not None:
            await Export.of(export).run(self)
        await self.cleanup()

    async def detach(self) -> None:
        """Let go of the connection and leave the sandbox running: `attach` finds it again."""
        self._shells.clear()
        await self._guest.aclose()
        self._deleted = True
        self._let_go_of_engine()

    async def inspect(self) -> Observation:
        """What the engine sees of it right now, and why it ended if it has."""
        return await (await self._the_engine()).inspect(self._created())

    async def info(self) -> SandboxDetails:
        """The sandbox's engine, image and isolation, and the limits that hold, asked for or default."""
        handle = self._created()
        held = handle.limits()
        return SandboxDetails(
            id=handle.sandbox_id,
            engine=handle.engine,
            image=handle.spec.image,
            isolation=handle.details.get("isolation", handle.spec.isolation),
            limits=held.limits,
            limits_left_out=held.left_out,
        )

    async def stats(self) -> Stats:
        """Resources in use."""
        return await (await self._the_engine()).stats(self._created())

    async def keep_alive(self, seconds: float) -> None:
        """Count the sandbox as in use for this many seconds from now, at most a day. Its lifetime still ends it.

        This matters for sandboxes of a manager or a server, which end or pause idle ones. No other sandbox ends by
        being idle.
        """
        wanted, handle, engine = lease_seconds(seconds), self._created(), await self._the_engine()
        if isinstance(engine, Leasing):
            await engine.keep_alive(handle, wanted)

    async def set_network(self, policy: str | Mapping[str, object] | NetworkRules) -> None:
        """What it may reach from now on: `none`, `all`, or rules as for `network`. Ends what the policy forbids."""
        wanted = SandboxSpec.of(network=dict(policy) if isinstance(policy, Mapping) else policy).network
        await (await self._network_policies()).set_network(self._created(), wanted)
        self.spec = self.spec.model_copy(update={"network": wanted})
        self._handle = dataclasses.replace(self._created(), spec=self.spec)

    async def network_log(self) -> list[Refusal]:
        """What was refused, oldest first: when, where to, under which name, and by which rule."""
        return list(await (await self._network_policies()).refusals(self._created()))

    async def _network_policies(self) -> NetworkPolicies:
        engine = await self._the_engine()
        if isinstance(engine, NetworkPolicies) and Capability.NETWORK in engine.capabilities:
            return engine
        raise UnsupportedError(f"engine '{engine.name}' cannot enforce network policies here")

    @property
    def engine_name(self) -> str:
        """The engine it runs on."""
        if self._engine is None:
            name = self._wanted_engine()
            return registry.auto(self._settings)[0].name if name == "auto" else name
        return self._engine.name

    async def __aenter__(self) -> Self:
        """One that exists already, from `attach` or `fork`, is used as it is."""
        return self if self._handle is not None else await self.create()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self.cleanup())

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and not self._deleted:
            warnings.warn(f"sandbox {self.id} was not cleaned up", ResourceWarning, stacklevel=2)

    # --- commands -----------------------------------------------------------------------------------------------------

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
        **names: Unpack[manus.CommandNames],
    ) -> ExecutionResult:
        """Run one command to its end: a shell command line, or a program and its arguments as a list.

        At the timeout (default: the sandbox's) the command dies with everything it started, and the result says so.
        Output beyond `max_output_bytes` for each stream is left out in the middle, visibly; with
        `capture_output=False` the result has none at all. Callbacks get text as it comes.
        """
        captures = manus.captures(names, capture_output)
        seconds = self.timeout_s if timeout is None else _seconds(timeout)
        request = self._request(command, new_command_id(), env=env, cwd=cwd, user=user, deadline_s=seconds, forget=True)
        data = stdin.encode() if isinstance(stdin, str) else stdin
        callback = _text_callback(on_stdout, on_stderr)
        await self._before(command)
        done = await self._run_to_end(request, seconds, data, callback, max_output_bytes if captures else 0)
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
        """Start a command in the background. Without a timeout it runs as long as the sandbox.

        With a `command_id` that was used before nothing is started: it is that command again, from its first output.
        """
        id = command_id or new_command_id()
        deadline = None if timeout is None else _seconds(timeout)
        request = self._request(command, id, env=env, cwd=cwd, user=user, stdin=stdin, deadline_s=deadline)
        await self._before(command)
        stream = await self._guest.processes.start(request)
        return AsyncCommand(self._guest, id, stream, max_output_bytes, self._explain)

    async def command(
        self, command_id: str, *, offsets: tuple[int, int] = (0, 0), max_output_bytes: int = DEFAULT_OUTPUT_BYTES
    ) -> AsyncCommand:
        """A background command by its id, from these offsets of stdout and stderr on. FileNotFoundError if unknown."""
        self._created()
        stream = await self._guest.processes.attach(command_id.encode(), (*offsets, 0))
        return AsyncCommand(self._guest, command_id, stream, max_output_bytes, self._explain, offsets)

    async def commands(self) -> list[str]:
        """The ids of all commands that run or whose output is kept."""
        self._created()
        return [info.id.decode(errors="replace") for info in await self._guest.processes.list()]

    async def run_command(self, command: str, timeout: float | None = None, *, shell: str = "default") -> str:
        """Type a command into the sandbox's persistent shell; returns what a person would see.

        Directory, variables and functions survive from one call to the next. `shell` names one of several. A timeout
        kills the command, not the shell, and raises SandboxTimeoutError.
        """
        seconds = self.timeout_s if timeout is None else _seconds(timeout)
        running = self.shell(shell)
        await self._before(command)
        before = await self._limit_events()
        result = await running.run(command, seconds)
        if result.cause is Cause.TIMEOUT:
            raise SandboxTimeoutError(
                f"Command execution timed out after {seconds:g} seconds",
                hint="The command was killed; the shell goes on. Give a longer timeout if it needs one.",
                output=result.stdout,
            )
        if result.exit_code != 0:
            await self._refuse_silence(result, before)
        return result.stdout.rstrip("\n")

    async def _refuse_silence(self, result: ExecutionResult, before: LimitEvents | None) -> None:
        """Raise if the shell was killed or a limit kept the command from running: a text cannot show that."""
        said, killed = result.stdout.rstrip("\n"), result.cause in (Cause.SIGNAL, Cause.KILLED, Cause.LOST)
        if said and not killed:
            return
        hit = (await self._with_cause(result, before)).cause
        hint = (
            "The next command starts a new shell, without the directory and variables of this one." if killed else None
        )
        what = "the shell was killed before the command ended" if killed else "the command could not do its work"
        text = f" (exit code {result.exit_code}){f': {said[-_SAID:]}' if said else ''}"
        if hit is not result.cause:
            raise SandboxResourceError(f"{what}: a limit of the sandbox was hit: {hit}{text}", hint=hint)
        if killed:
            raise SandboxError(what + text, hint=hint)

    def shell(self, name: str = "default") -> AsyncShell:
        """The persistent shell of that name; `run` on it gives the exit code too."""
        self._created()
        if name not in self._shells:
            self._shells[name] = AsyncShell(self._guest, name, None, DEFAULT_OUTPUT_BYTES, self._explain)
        return self._shells[name]

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
        """A program (default: a shell) on a terminal of its own: full-screen programs, Ctrl-C and resizing work."""
        id = new_command_id()
        variables = {"TERM": "xterm-256color", **(env or {})}
        line = command if command is not None else "command -v bash >/dev/null && exec bash -i; exec sh -i"
        request = self._request(line, id, env=variables, cwd=cwd, user=user, pty=(rows, columns))
        return AsyncTerminal(self._guest, id, await self._guest.processes.start(request))

    # --- going back, and branching off --------------------------------------------------------------------------------

    async def checkpoint(
        self, name: str = "", *, memory: bool = False, drop_connections: bool = False, made_by: str = "user"
    ) -> Checkpoint:
        """Keep the state of all files, at one moment, while the sandbox runs. Milliseconds, whatever the size.

        With `memory` also of all processes, which then go on from there after a rollback or in a fork; it needs
        isolation="gvisor". Persistent shells and followed commands are connected again by their next use. Connections
        to the outside (`open_connections`) cannot be saved: if there are any it is refused, unless they may be dropped.
        """
        if memory:
            await self._let_go_of_all(drop_connections)
        return await (await self._checkpointing()).checkpoint(
            self._created(), name=name, made_by=made_by, memory=memory
        )

    async def open_connections(self) -> list[str]:
        """The far ends, as ADDRESS:PORT, of the TCP connections that it has to the outside. No saved memory keeps
        them."""
        if self.spec.network == "none":
            return []
        found: list[str] = []
        for path in connections.TABLES:
            with contextlib.suppress(OSError):
                table = await self.read_bytes(path, length=connections.LONGEST)
                found += connections.established(table.decode(errors="replace"))
        return found

    async def pause(self, *, memory: str = "ram", drop_connections: bool = False) -> None:
        """Stop all processes until `resume`. With memory="disk" they take no memory meanwhile (isolation="gvisor"); for
        connections that is as for a `checkpoint` with memory."""
        if memory not in ("ram", "disk"):
            raise ValueError(f"memory is 'ram' or 'disk', not {memory!r}")
        engine = await self._the_engine()
        if memory == "disk":
            await self._let_go_of_all(drop_connections)
            await (await self._checkpointing()).hibernate(self._created())
        elif isinstance(engine, Pausable) and Capability.PAUSE in engine.capabilities:
            await engine.pause(self._created())
            self._guest.doubt()
        else:
            raise UnsupportedError(f"engine '{engine.name}' cannot pause a sandbox here")

    async def resume(self) -> None:
        """Let it go on. May be repeated."""
        engine = await self._the_engine()
        if not isinstance(engine, Pausable) or Capability.PAUSE not in engine.capabilities:
            raise UnsupportedError(f"engine '{engine.name}' cannot pause a sandbox here")
        await engine.resume(self._created())

    async def checkpoints(self) -> list[Checkpoint]:
        """All of this sandbox, oldest first; `parent` makes them a tree."""
        return list(await (await self._checkpointing()).checkpoints(self._created()))

    async def delete_checkpoint(self, checkpoint: Checkpoint | str) -> None:
        """Others are not affected. May be repeated."""
        self._kept = None
        await (await self._checkpointing()).delete_checkpoint(self._created(), _id_of(checkpoint))

    async def diff(
        self, old: Checkpoint | str, new: Checkpoint | str | None = None, *, text: bool = False
    ) -> list[Change]:
        """What was added, changed and removed from one checkpoint to another, or to now. `text` adds unified diffs."""
        later = None if new is None else _id_of(new)
        return list(await (await self._checkpointing()).diff(self._created(), _id_of(old), later, text=text))

    async def rollback(self, checkpoint: Checkpoint | str) -> None:
        """Go back: processes end, files are as they were, the sandbox goes on under the same id."""
        await self._go_back(_id_of(checkpoint))

    async def restart(self) -> None:
        """Go back to the state right after it was created. Its setup commands run again."""
        await self._go_back(None)
        await self._set_up()

    async def undo(self, steps: int = 1) -> Checkpoint:
        """Take back the last commands: go to the checkpoint that was made before them (`undo=True` makes those)."""
        if steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        before = [each for each in await self.checkpoints() if each.made_by.startswith(_UNDO)]
        if len(before) < steps:
            raise CheckpointNotFoundError(
                f"only {len(before)} commands can be taken back",
                hint="Make the sandbox with undo=True; it keeps the states before the last commands.",
            )
        target = before[-steps]
        await self.rollback(target)
        for undone in before[-steps:]:
            await self.delete_checkpoint(undone)
        return target

    async def fork(
        self,
        count: int = 1,
        checkpoint: Checkpoint | str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> list[Self]:
        """New sandboxes that begin with the files of this one, as they are now or were at a checkpoint.

        With `memory` (or from a checkpoint that has it) its processes go on in each of them; for connections that is as
        for a `checkpoint` with memory.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        engine = self._engine_name if self._held is not None else await self._the_engine()
        twins = [
            type(self)(
                self.spec,
                engine=engine,
                server=self._server,
                api_key=self._api_key,
                timeout=self.timeout_s,
                undo=self._undo or False,
                settings=self._settings,
            )
            for _ in range(count)
        ]
        source = None if checkpoint is None else _id_of(checkpoint)
        if memory:
            await self._let_go_of_all(drop_connections)
        ids = [twin.id for twin in twins]
        handles = await (await self._checkpointing()).fork(self._created(), ids, source, memory=memory)
        for twin, handle in zip(twins, handles, strict=True):
            twin._handle = handle
        return twins

    async def snapshot(
        self,
        name: str,
        checkpoint: Checkpoint | str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> Snapshot:
        """Keep a state under a name of its own, also after the sandbox is gone: `Sandbox(image="snapshot:NAME")`.

        With `memory` (of now, or of a checkpoint that has it) also what runs, with all that is in the memory of
        programs, secrets included; it goes on in sandboxes with the same isolation and network, here or elsewhere.
        """
        source = None if checkpoint is None else _id_of(checkpoint)
        if memory and source is None:
            await self._let_go_of_all(drop_connections)
        return await (await self._checkpointing()).snapshot(self._created(), name, source, memory=memory)

    # --- files --------------------------------------------------------------------------------------------------------

    async def read_file(self, path: str) -> str:
        """The text of a file. FileNotFoundError if there is none; UnicodeDecodeError if it is not UTF-8."""
        return (await self.read_bytes(path)).decode()

    async def read_bytes(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """The content of a file, or a part of it."""
        return await self._files().read(self._path(path), offset=offset, length=length)

    async def read_stream(self, path: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The content of a file piece by piece, whatever its size."""
        async for piece in self._files().read_stream(self._path(path), offset=offset, length=length):
            yield piece

    async def write_file(self, path: str, content: str | bytes, *, mode: int | None = None) -> None:
        """Write a file; parents are made. Readers see the old content or the new, never a part."""
        data = content.encode() if isinstance(content, str) else content
        await self._files().write(self._path(path), data, mode=mode)

    async def write_stream(
        self,
        path: str,
        pieces: AsyncIterable[bytes] | Iterable[bytes],
        *,
        mode: int | None = None,
        append: bool = False,
    ) -> None:
        """As `write_file`, from pieces; with `append`, as `append_file`."""
        await self._files().write_stream(self._path(path), pieces, mode=mode, append=append)

    async def append_file(self, path: str, content: str | bytes) -> None:
        """Add to the end of a file, which is made if missing."""
        data = content.encode() if isinstance(content, str) else content
        await self._files().write(self._path(path), data, append=True)

    async def list_files(self, path: str = ".") -> list[FileInfo]:
        """What is in a directory, by name."""
        return await self._files().list(self._path(path))

    async def walk(self, path: str = ".", *, limit: int = 100_000) -> AsyncIterator[FileInfo]:
        """Everything below a directory, parents first. Links are never followed."""
        async for info in self._files().walk(self._path(path), limit=limit):
            yield info

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What kind of file it is, its size, mode, owner and time."""
        return await self._files().stat(self._path(path), follow=follow)

    async def exists(self, path: str) -> bool:
        """Whether there is anything of that name."""
        try:
            await self.stat(path, follow=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def make_dir(self, path: str, *, mode: int = 0o755) -> None:
        """Make a directory and its parents; an existing one is fine."""
        await self._files().make_dir(self._path(path), mode=mode, parents=True)

    async def move(self, path: str, target: str) -> None:
        """Rename, also over an existing file."""
        await self._files().rename(self._path(path), self._path(target), parents=True)

    async def remove(self, path: str, *, recursive: bool = True, missing_ok: bool = False) -> None:
        """Remove a file, or a directory and everything in it. Links are removed, not followed."""
        await self._files().remove(self._path(path), recursive=recursive, missing_ok=missing_ok)

    async def chmod(self, path: str, mode: int) -> None:
        """Change the permissions of a file."""
        await self._files().chmod(self._path(path), mode)

    def watch(self, path: str = ".", *, recursive: bool = True) -> Watch:
        """Changes below a directory as they happen: `async with sandbox.watch() as events`, then iterate."""
        return self._files().watch(self._path(path), recursive=recursive)

    async def copy_to(self, source: str | Path, target: str) -> None:
        """Copy a file or a tree from the host into the sandbox: modes, empty directories and odd names are kept.

        A file goes to `target`, or into it if `target` ends with `/` or is a directory. The content of a directory
        goes into the directory `target`. Links are copied as links.
        """
        self._created()
        if not Path(source).exists():
            raise FileNotFoundError(f"Source file not found: {source}")
        async with self._transfer():
            await trees.copy_to(self._connect, source, self._path(target))

    async def copy_from(
        self, source: str, target: str | Path, *, max_bytes: int | None = None, max_items: int | None = None
    ) -> None:
        """Copy a file or a tree from the sandbox to the host. Nothing outside `target` is ever touched.

        Works as `copy_to` in the other direction; set-uid bits and owners are not kept. SandboxResourceError beyond
        `max_bytes` or `max_items`.
        """
        self._created()
        async with self._transfer():
            await trees.copy_from(self._connect, self._path(source), target, max_bytes=max_bytes, max_items=max_items)

    # --- ports --------------------------------------------------------------------------------------------------------

    async def ports(self) -> list[ListeningPort]:
        """The TCP ports that something in the sandbox listens on, with its process, sorted by port."""
        self._created()
        return await listening_ports(self._guest)

    async def port_link(self, port: int, *, lifetime: float = 3600) -> str:
        """A URL that leads to a port inside for so many seconds, for whoever has it. Only with a server: without one
        `expose` gives a port of this machine."""
        engine, handle = await self._the_engine(), self._created()
        if not isinstance(engine, PortExposing):
            raise UnsupportedError("links to ports need a server", hint="`expose` gives a port of this machine.")
        return await engine.port_link(handle, port, lifetime)

    async def expose(self, port: int, local_port: int = 0, *, host: str = "127.0.0.1") -> AsyncForward:
        """Let a port of this machine (0: any free one) lead to a port inside, also with the network off."""
        self._created()
        forward = AsyncForward(functools.partial(self.connect_port, port), port)
        return await forward._open(local_port, host)

    async def connect_port(self, port: int) -> PortStream:
        """A stream to a TCP port that something in the sandbox listens on; works with the network off."""
        self._created()
        return await self._guest.ports.connect(port=port)

    async def connect_socket(self, path: str) -> PortStream:
        """A stream to a unix socket in the sandbox."""
        self._created()
        return await self._guest.ports.connect(path=self._path(path))

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _expose_named(self) -> None:
        engine = await self._the_engine()
        if isinstance(engine, PortExposing):
            for name, port in self._named_ports.items():
                await engine.expose_port(self._created(), name, port)

    async def _the_engine(self) -> Engine:
        if self._engine is None:
            self._held = await shared.acquire(self._wanted_engine(), self._settings, self._server, self._api_key)
            self._engine = self._held.engine
        return self._engine

    def _wanted_engine(self) -> str:
        return registry.auto_for(self.spec.isolation) if self._engine_name == "auto" else self._engine_name

    def _let_go_of_engine(self) -> None:
        """One that was handed to us belongs to whoever made it. Ours is shared with other sandboxes."""
        if self._held is not None:
            shared.release(self._held)
            self._held = None

    def _created(self) -> Handle:
        if self._handle is None:
            raise SandboxError("Sandbox not initialized", hint="Use it in a `with` block, or call create() first.")
        if self._deleted:
            raise SandboxGoneError(f"sandbox {self.id} was cleaned up", cause=Cause.USER)
        return self._handle

    async def _connect(self) -> ByteStream:
        try:
            return await (await self._the_engine()).connect(self._created())
        except AgentUnreachableError:
            await self._explain()
            raise

    async def _destroy(self) -> None:
        assert self._handle is not None
        await (await self._the_engine()).delete(self._handle)
        self._deleted = True

    async def _explain(self) -> None:
        """After a lost connection: raise SandboxGoneError with the cause if the sandbox has ended, or is ending, and
        SandboxPausedError if it is paused.

        The connection breaks a moment before the engine can see the end, so a sandbox that does not answer gets that
        moment.
        """
        for pause_s in _DYING_S:
            await asyncio.sleep(pause_s)
            self._refuse(await (await self._the_engine()).inspect(self._created()))
            if await self._answers():
                return

    async def _diagnose(self) -> None:
        """When an answer is late: raise SandboxPausedError or SandboxGoneError if none can come."""
        try:
            async with asyncio.timeout(_INSPECT_S):
                seen = await (await self._the_engine()).inspect(self._created())
        except (TimeoutError, EngineError):
            return  # nothing is known, so wait on
        self._refuse(seen)

    def _refuse(self, seen: Observation) -> None:
        if seen.state in (State.STOPPED, State.ERROR, State.MISSING):
            cause = seen.cause or Cause.LOST
            raise SandboxGoneError(f"sandbox {self.id} has ended: {seen.reason or cause}", cause=cause)
        if seen.state is State.PAUSED and not seen.wakes:
            raise SandboxPausedError.of(self.id)

    @contextlib.asynccontextmanager
    async def _transfer(self) -> AsyncIterator[None]:
        """Around a copy on a connection of its own: if that fails, the main connection explains why."""
        await self._guest.channel()
        try:
            yield
        except AgentUnreachableError:
            await self._explain()
            raise

    async def _answers(self) -> bool:
        try:
            channel = await Channel.open(await (await self._the_engine()).connect(self._created()), timeout_s=1.0)
        except (AgentUnreachableError, SandboxGoneError):
            return False
        await channel.aclose()
        return True

    async def _run_to_end(
        self,
        request: StartRequest,
        seconds: float,
        stdin: bytes | None,
        callback: Callable[[int, bytes], None] | None,
        limit_bytes: int,
    ) -> ExecutionResult:
        before = await self._limit_events()
        await self._guest.present(seconds)
        for last_try in (False, True):
            try:
                async with self._patience(seconds):
                    done = await self._guest.processes.run(
                        request, limit_bytes=limit_bytes, on_output=callback, stdin=stdin
                    )
                return await self._with_cause(execution_result(done.exit, done.stdout, done.stderr), before)
            except AgentUnreachableError:
                await self._explain()
                # The agent lives and knows the command by its id: asking again gives its output from the start.
                if last_try or callback is not None or stdin is not None:
                    raise
            except TimeoutError as error:
                if isinstance(error, SandboxError):
                    raise
                await self._explain()
                raise AgentUnreachableError("the sandbox does not answer") from error
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def _patience(self, seconds: float) -> AsyncIterator[None]:
        """Time for a command, and some more for the agent to end it, but none for a sandbox that cannot answer."""
        if math.isinf(seconds):
            yield
            return
        loop = asyncio.get_running_loop()
        checks: list[asyncio.Task[None]] = []

        async def check() -> None:
            try:
                await self._diagnose()
            except SandboxError:
                limit.reschedule(loop.time())
                raise

        late = loop.call_later(seconds + _PROMPT_S, lambda: checks.append(loop.create_task(check())))
        try:
            async with asyncio.timeout(seconds + _SLACK_S) as limit:
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

    async def _with_cause(self, result: ExecutionResult, before: LimitEvents | None) -> ExecutionResult:
        """A command that failed may have hit a limit of the sandbox: then that is the cause."""
        if before is None or result.success or result.cause not in (Cause.EXIT, Cause.SIGNAL):
            return result
        after = await self._limit_events(killed=result.cause is Cause.SIGNAL or result.exit_code == _KILLED)
        last_words = result.stderr_bytes[-_LAST_WORDS:].decode(errors="replace")
        cause = after.cause_since(before, last_words) if after is not None else None
        return result if cause is None else result.with_cause(cause)

    async def _limit_events(self, *, killed: bool = False) -> LimitEvents | None:
        """None if there is no limit that could be hit, or nobody to ask."""
        limits = self._created().limits().limits
        if limits.memory_bytes is None and limits.pids is None and limits.disk_bytes is None:
            return None
        engine = await self._the_engine()
        if not isinstance(engine, LimitReporting):
            return None
        return await engine.limit_events(self._created(), killed=killed)

    def _request(
        self,
        command: CommandLine,
        id: str,
        *,
        env: Mapping[str, str] | None,
        cwd: str | None,
        user: str | None,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        deadline_s: float | None = None,
        forget: bool = False,
    ) -> StartRequest:
        self._created()
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

    async def _checkpointing(self) -> Checkpointing:
        engine = await self._the_engine()
        if Capability.CHECKPOINTS not in engine.capabilities or not isinstance(engine, Checkpointing):
            raise UnsupportedError(
                f"engine '{engine.name}' cannot keep states of a sandbox here",
                hint="Engines 'native' and 'oci' can, as root and with btrfs-progs installed.",
            )
        return engine

    async def _let_go(self) -> None:
        self._shells.clear()
        await self._guest.aclose()

    async def _let_go_of_all(self, drop_connections: bool) -> None:
        """Before memory is saved: what cannot be is told now."""
        if not drop_connections and (found := await self.open_connections()):
            raise UnsupportedError(
                f"the sandbox has open connections, which cannot be saved: {', '.join(found[:10])}",
                hint="Let it close them, or give drop_connections=True: then they are cut off.",
            )
        await self._let_go()

    async def _go_back(self, checkpoint_id: str | None) -> None:
        engine, handle = await self._checkpointing(), self._created()
        self._kept = None
        await self._let_go()
        await engine.rollback(handle, checkpoint_id)
        await self._guest.renewed()

    async def _before(self, command: CommandLine) -> None:
        """With `undo`: keep the state before a command, and only the last of these."""
        if self._undo is None:
            return
        line = command if isinstance(command, str) else shlex.join(command)
        if not self._undo.covers(line):
            return
        engine, handle = await self._checkpointing(), self._created()
        made = await engine.checkpoint(handle, made_by=f"{_UNDO}{line[:200]}")
        if self._kept is None:
            found = await engine.checkpoints(handle)
            self._kept = [each.id for each in found if each.made_by.startswith(_UNDO)]
        else:
            self._kept.append(made.id)
        while len(self._kept) > self._undo.keep:
            await engine.delete_checkpoint(handle, self._kept.pop(0))

    def _files(self) -> Files:
        self._created()
        return self._guest.files

    def _path(self, path: str) -> str:
        """Checked: not empty, no zero byte, and `..` only where it stays below the work directory."""
        if not path or "\0" in path:
            raise ValueError(f"{path!r} is not a path")
        if ".." in path.split("/"):
            full = posixpath.normpath(posixpath.join(self.spec.work_dir, path))
            if full != self.spec.work_dir and not full.startswith(self.spec.work_dir + "/"):
                raise ValueError(f"Path contains potentially unsafe patterns: {path!r} leaves the work directory")
            # Where the work directory really is, only the agent knows: what was relative stays so.
            return full if path.startswith("/") else posixpath.normpath(path)
        return path


def _undo_of(spec: SandboxSpec) -> Undo | None:
    return Undo.of(spec.undo) if spec.undo is not None else None


def _id_of(checkpoint: Checkpoint | str) -> str:
    return checkpoint if isinstance(checkpoint, str) else checkpoint.id


def _seconds(timeout: float) -> float:
    if not timeout > 0:
        raise ValueError(f"a timeout must be more than 0 seconds, not {timeout!r}; math.inf means none")
    return float(timeout)


def lease_seconds(seconds: float) -> float:
    """Validate the length of a lease. Raises ValueError."""
    if not 0 < seconds <= MOST_LEASE_S:
        raise ValueError(f"a lease is for more than 0 and at most {MOST_LEASE_S:g} seconds, not {seconds!r}")
    return float(seconds)


def _volumes(volumes: Mapping[str, str] | Sequence[str] | None) -> tuple[Volume, ...] | None:
    """`{"/host": "/inside"}` or `{"/host": "/inside:ro"}`, or `["/host:/inside:ro"]`."""
    if not volumes:
        return None
    texts = [f"{host}:{path}" for host, path in volumes.items()] if isinstance(volumes, Mapping) else volumes
    return tuple(Volume.parse(text) for text in texts)


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
