"""A sandbox that belongs to a manager. It works like any other, but every use is counted, and the manager ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, Self

from atoll.cancellation import finish
from atoll.engines.contract import ByteStream, Engine
from atoll.errors import AgentUnreachableError, SandboxGoneError, SandboxPausedError, SpecError, UnsupportedError
from atoll.guest.guest import Guest
from atoll.guest.processes import CompletedProcess, FollowedProcess, Processes, StartRequest
from atoll.manager.usage import (
    InUseCommand,
    InUsePorts,
    InUseShell,
    InUseTerminal,
    MeteredSocket,
    Usage,
    counted,
    counted_stream,
    timed,
)
from atoll.model import Capability, Handle, SandboxDetails, SandboxSpec, StartCommand
from atoll.model.checkpoint import Checkpoint
from atoll.model.network_policy import NetworkPolicy, NetworkRules
from atoll.sandbox import prewarm, setup, start_up
from atoll.sandbox.command import DEFAULT_OUTPUT_BYTES, AsyncCommand
from atoll.sandbox.hooks import Hook, begin, run_hook
from atoll.sandbox.sandbox import DEFAULT_TIMEOUT_S, AsyncSandbox, lease_seconds
from atoll.sandbox.sandbox_access import EngineChoice, SandboxAccess
from atoll.sandbox.shell import AsyncShell
from atoll.sandbox.terminal import AsyncTerminal
from atoll.settings import Settings
from atoll.tracing import span

_OWN_S = 10.0


class Supervisor(Protocol):
    """What one sandbox needs of its manager."""

    usage: Usage

    async def ready(self, *, asleep: bool = False) -> None:
        """Return when the sandbox can be used, resuming it if the manager paused it.

        Raises SandboxGoneError once the sandbox has ended, and SandboxPausedError if its user paused it. With `asleep`,
        a paused sandbox is sufficient. The caller must count its use at once, without an await in between.
        """

    async def delete(self) -> None: ...

    async def keep_alive(self, seconds: float) -> None:
        """Count the sandbox as in use for this many seconds from now."""

    async def fork(
        self, count: int, checkpoint: str | None, memory: bool, drop_connections: bool
    ) -> list[ManagedSandbox]: ...

    def suspect(self) -> None:
        """Report that the sandbox seems to have died, so that the manager checks it."""

    def ended(self) -> SandboxGoneError | None:
        """Return the error that says why the sandbox can never be used again, or None if it can."""

    def connected(self) -> None:
        """Report that a connection to the sandbox was opened."""

    def disconnected(self) -> None:
        """Report that the sandbox has no connection any more."""

    async def unobserved(self) -> None:
        """Close the connections that only observe the sandbox."""

    def is_wanted(self) -> bool:
        """Whether the sandbox's connection is in use, or must stay open for the next use."""

    def turn(self) -> AbstractAsyncContextManager[object]:
        """Wait for this sandbox's turn to be checked, so that few are checked at a time."""

    def executed(self, seconds: float) -> None:
        """Report how long a command took."""

    async def relinked(self, policy: NetworkPolicy) -> None:
        """Record the sandbox's new network policy. Returns when that is written down."""

    async def resized(self, handle: Handle) -> None:
        """Record the sandbox's new limits, which this handle has. Returns when that is written down."""


class ManagedSandbox(AsyncSandbox):
    """A sandbox of a manager. `cleanup` deletes it through the manager, and so does leaving a `with` block; entering a
    `with` block creates nothing."""

    access: ManagedAccess

    def __init__(
        self, sandbox_id: str, spec: SandboxSpec, engine: Engine, settings: Settings, supervisor: Supervisor
    ) -> None:
        super().__init__(spec, engine=engine, settings=settings)
        self.env: Mapping[str, str] = {}
        """Environment variables of every command that does not override them."""
        self.supervisor = supervisor
        self.access = ManagedAccess(self, sandbox_id, spec, self.access.choice)

    def configure(self, env: Mapping[str, str], timeout_s: float | None) -> None:
        """Set the variables and the default timeout of commands that start from now on."""
        self.env = env
        self.timeout_s = timeout_s or DEFAULT_TIMEOUT_S

    def adopt(self, handle: Handle) -> None:
        """From now on, use the existing sandbox of this handle."""
        self.access.adopt(handle)
        self.access.guest = self.access.new_guest()

    def change(self, handle: Handle) -> None:
        """Replace the handle by one of the same sandbox with another spec."""
        self.access.adopt(handle)

    async def answer(self) -> None:
        """Return when the sandbox's agent has answered. This is not a use."""
        guest = self.access.guest
        if guest.current_connection() is None:
            await guest.connection()  # every new connection starts with a hello
        else:
            await guest.hello()

    async def set_up(self) -> None:
        """Run the sandbox's setup commands. This is not a use, because no user has the sandbox yet. Raises
        SetupError."""
        await setup.set_up(self.access)

    async def begin(self, hook: Hook) -> None:
        """Prepare the sandbox, whose processes begin anew. This is not a use. Raises StartError."""
        await begin(self.access, hook)

    async def run_hook(self, hook: Hook) -> None:
        """Run a hook of the image. This is not a use. Raises StartError."""
        await run_hook(self.access, hook)

    async def start_up(self) -> None:
        """Start the sandbox's start commands and wait until it is ready. This is not a use. Raises StartError."""
        await self._start_up()

    async def keep_ready(self) -> None:
        """Keep the memory of the sandbox, which has just become ready, if its spec says so. This is not a use."""
        await prewarm.keep(self.access)
        await self.answer()  # it has no connection any more

    async def distrust_ready(self, error: BaseException) -> None:
        """Keep the memory that the sandbox started from no longer if it did not become ready because of this error."""
        await prewarm.distrust(self.access, error)

    async def complete_start(self) -> None:
        """Start the start commands of a running sandbox if the manager that ended them died before it did. This is not
        a use."""
        await start_up.start_missing(self.access)

    async def start_for_spec(self, command: StartCommand) -> None:
        """Start one more command in the way of start commands, unless there is one with its name."""
        async with self.use():
            await start_up.start(self.access, command)

    def is_connected(self) -> bool:
        """Whether the agent holds the other end of the connection right now. The kernel knows, so nothing is sent to
        the agent."""
        line = self.access.line
        if line is None or self.access.guest.current_connection() is None:
            return False
        try:
            return line.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def _start_up(self) -> None:
        await start_up.start_up(self.access, self.supervisor.turn)

    async def give_work_dir(self, user: str) -> str | None:
        """Make this user the owner of the work directory. Returns None where the engine has no users. Raises
        SpecError."""
        if Capability.USERS not in (await (await self.access.engine()).describe()).capabilities:
            return None
        given = await self.exec(["chown", user, self.spec.directory], user="0:0", timeout=_OWN_S)
        if not given.success:
            raise SpecError(f"the work directory cannot be given to user {user}: {given.stderr[-500:]}")
        return user

    async def rest(self) -> None:
        """Close the connection if nothing is open on it. The next use connects again."""
        connection = self.access.guest.current_connection()
        if connection is not None and connection.is_idle:
            self.supervisor.disconnected()
            await self.access.guest.aclose()

    async def let_go_of_all(self, drop_connections: bool) -> None:
        """Close the connections before the memory is saved. Raises UnsupportedError if there are connections from the
        sandbox to the outside, unless `drop_connections` allows dropping them."""
        await self.access.let_go_of_all(drop_connections)

    async def let_go(self) -> None:
        """Close the connection without ending the sandbox. Operations that wait on the connection fail."""
        await self.access.let_go()

    async def create(self) -> Self:
        return self

    async def cleanup(self) -> None:
        await self.supervisor.delete()

    async def detach(self) -> None:
        await self.let_go()

    def __del__(self) -> None:
        """Do nothing: the manager deletes the sandbox, not the garbage collector."""

    @asynccontextmanager
    async def use(self, *, asleep: bool = False) -> AsyncIterator[None]:
        """Count the sandbox as in use while the block runs."""
        await self.supervisor.ready(asleep=asleep)
        with self.supervisor.usage.operation():
            try:
                yield
            except (SandboxGoneError, SandboxPausedError):
                self.supervisor.suspect()
                raise
            except AgentUnreachableError as error:
                self.supervisor.suspect()
                ended = self.supervisor.ended()
                if ended is None:
                    raise
                raise ended from error
            except asyncio.CancelledError:
                me = asyncio.current_task()
                if me is None or me.cancelling():
                    raise
                # This task was not cancelled; the connection that it waited for was closed.
                gone = AgentUnreachableError("the connection to the sandbox was closed")
                raise self.supervisor.ended() or gone from None

    async def connect_agent(self) -> ByteStream:
        """Open a new stream to the agent, for a client on another machine. Every byte on it counts as a use."""
        with span("manager.connect_agent", sandbox_id=self.id):
            async with self.use():
                return await self.access.connect()

    # --- everything that uses it ----------------------------------------------------------------------------------

    start = counted(AsyncSandbox.start)
    command = counted(AsyncSandbox.command)
    open_terminal = counted(AsyncSandbox.open_terminal)
    connect_port = counted(AsyncSandbox.connect_port)
    connect_socket = counted(AsyncSandbox.connect_socket)
    exec = counted(timed(AsyncSandbox.exec))
    commands = counted(AsyncSandbox.commands)
    start_commands = counted(AsyncSandbox.start_commands)
    read_file = counted(AsyncSandbox.read_file)
    read_bytes = counted(AsyncSandbox.read_bytes)
    read_stream = counted_stream(AsyncSandbox.read_stream)
    write_file = counted(AsyncSandbox.write_file)
    write_stream = counted(AsyncSandbox.write_stream)
    append_file = counted(AsyncSandbox.append_file)
    list_files = counted(AsyncSandbox.list_files)
    walk = counted_stream(AsyncSandbox.walk)
    stat = counted(AsyncSandbox.stat)
    exists = counted(AsyncSandbox.exists)
    make_dir = counted(AsyncSandbox.make_dir)
    move = counted(AsyncSandbox.move)
    remove = counted(AsyncSandbox.remove)
    chmod = counted(AsyncSandbox.chmod)
    copy_to = counted(AsyncSandbox.copy_to)
    copy_from = counted(AsyncSandbox.copy_from)
    expose = counted(AsyncSandbox.expose)
    ports = counted(AsyncSandbox.ports)
    port_link = counted(AsyncSandbox.port_link, asleep=True)
    open_connections = counted(AsyncSandbox.open_connections)
    network_log = counted(AsyncSandbox.network_log, asleep=True)
    checkpoint = counted(AsyncSandbox.checkpoint)
    checkpoints = counted(AsyncSandbox.checkpoints, asleep=True)
    delete_checkpoint = counted(AsyncSandbox.delete_checkpoint, asleep=True)
    diff = counted(AsyncSandbox.diff, asleep=True)
    rollback = counted(AsyncSandbox.rollback)
    restart = counted(AsyncSandbox.restart)
    undo = counted(AsyncSandbox.undo)
    snapshot = counted(AsyncSandbox.snapshot)

    async def keep_alive(self, seconds: float) -> None:
        await self.supervisor.keep_alive(lease_seconds(seconds))

    async def set_network(self, policy: str | Mapping[str, object] | NetworkRules) -> None:
        async with self.use():
            # Completed even if the caller is cancelled, so that the record always agrees with the engine.
            await finish(self._set_network(policy))

    async def _set_network(self, policy: str | Mapping[str, object] | NetworkRules) -> None:
        await super().set_network(policy)
        await self.supervisor.relinked(self.spec.network)

    async def set_limits(
        self,
        *,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        disk: str | int | None = None,
    ) -> SandboxDetails:
        async with self.use():
            # Completed even if the caller is cancelled, so that the record always agrees with the engine.
            return await finish(self._set_limits(memory, cpus, pids, disk))

    async def _set_limits(
        self, memory: str | int | None, cpus: float | None, pids: int | None, disk: str | int | None
    ) -> SandboxDetails:
        details = await super().set_limits(memory=memory, cpus=cpus, pids=pids, disk=disk)
        await self.supervisor.resized(self.access.handle())
        return details

    async def fork(
        self,
        count: int = 1,
        checkpoint: Checkpoint | str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> list[ManagedSandbox]:
        """As `AsyncSandbox.fork`. The new sandboxes belong to the same manager and the same owner."""
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        source = checkpoint.id if isinstance(checkpoint, Checkpoint) else checkpoint
        return await self.supervisor.fork(count, source, memory, drop_connections)

    async def pause(self, *, memory: str = "ram", drop_connections: bool = False) -> None:
        """Raise UnsupportedError, because only the manager pauses its sandboxes."""
        raise UnsupportedError("a manager pauses its sandboxes itself", hint="Use `pause_sandbox` of the manager.")

    async def resume(self) -> None:
        raise UnsupportedError("a manager resumes its sandboxes itself", hint="Use `resume_sandbox` of the manager.")


class ManagedAccess(SandboxAccess):
    """Counts connections and their traffic, and learns from the manager when the sandbox has ended."""

    def __init__(self, sandbox: ManagedSandbox, sandbox_id: str, spec: SandboxSpec, choice: EngineChoice) -> None:
        self._sandbox = sandbox
        self.line: MeteredSocket | None = None
        """The latest connection. While no user has used the sandbox, there is no other."""
        super().__init__(sandbox_id, spec, choice)

    def handle(self) -> Handle:
        error = self._sandbox.supervisor.ended()
        if error is not None:
            raise error
        return super().handle()

    def new_guest(self) -> Guest:
        guest = super().new_guest()
        guest.processes = _WithVariables(guest, self._sandbox)
        guest.ports = InUsePorts(self._sandbox.use, guest)
        return guest

    async def connect(self) -> ByteStream:
        self.line = MeteredSocket.of(await super().connect(), self._sandbox.supervisor.usage)
        self._sandbox.supervisor.connected()
        return self.line

    async def let_go(self) -> None:
        self.shells.clear()
        self._sandbox.supervisor.disconnected()
        await self._sandbox.supervisor.unobserved()
        await self.guest.aclose()

    async def open_connections(self) -> list[str]:
        async with self._sandbox.use():
            return await super().open_connections()

    def new_command(
        self, id: str, process: FollowedProcess, limit_bytes: int, asked: tuple[int, int] | None = None
    ) -> AsyncCommand:
        return InUseCommand(self._sandbox.use, self.guest, id, process, limit_bytes, self.explain, asked)

    def new_shell(self, name: str) -> AsyncShell:
        return InUseShell(self._sandbox.use, self.guest, name, None, DEFAULT_OUTPUT_BYTES, self.explain, kept=True)

    def new_terminal(self, id: str, process: FollowedProcess) -> AsyncTerminal:
        return InUseTerminal(self._sandbox.use, self.guest, id, process)


class _WithVariables(Processes):
    """Adds the sandbox's own variables to every command, shell and terminal."""

    def __init__(self, guest: Guest, sandbox: ManagedSandbox) -> None:
        super().__init__(guest)
        self._sandbox = sandbox

    async def run(self, request: StartRequest, **options: Any) -> CompletedProcess:
        return await super().run(self._with_variables(request), **options)

    async def start(self, request: StartRequest) -> FollowedProcess:
        return await super().start(self._with_variables(request))

    def _with_variables(self, request: StartRequest) -> StartRequest:
        if not self._sandbox.env:
            return request
        return dataclasses.replace(request, env={**self._sandbox.env, **request.env})
