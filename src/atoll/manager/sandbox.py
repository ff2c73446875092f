"""A sandbox that a manager keeps: as any other, but every use of it is counted, and the manager ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from atoll.checkpoint import Checkpoint
from atoll.command import AsyncCommand, Output
from atoll.engines.base import ByteStream, Engine
from atoll.errors import AgentUnreachableError, SandboxGoneError, SandboxPausedError, SpecError, UnsupportedError
from atoll.guest.guest import Guest
from atoll.guest.ports import PortStream
from atoll.guest.processes import Completed, Processes, ProcessStream, StartRequest
from atoll.manager.usage import MeteredSocket, Usage
from atoll.model import Capability, ExecutionResult, Handle, SandboxSpec
from atoll.network.policy import NetworkPolicy, NetworkRules
from atoll.sandbox import DEFAULT_OUTPUT_BYTES, AsyncSandbox, lease_seconds
from atoll.settings import Settings
from atoll.shell import AsyncShell
from atoll.terminal import AsyncTerminal

P = ParamSpec("P")
T = TypeVar("T")
_OWN_S = 10.0


class Keeper(Protocol):
    """The manager, as one of its sandboxes sees it."""

    usage: Usage

    async def ready(self, *, asleep: bool = False) -> None:
        """Return when the sandbox can be used, waking it if it fell asleep. Raises SandboxGoneError once it has ended,
        SandboxPausedError if its user paused it. With `asleep` one that is paused will do.

        The caller counts its use at once, without letting anything else run in between.
        """

    async def delete(self) -> None: ...

    async def keep_alive(self, seconds: float) -> None: ...

    async def fork(
        self, count: int, checkpoint: str | None, memory: bool, drop_connections: bool
    ) -> list[ManagedSandbox]: ...

    def suspect(self) -> None:
        """It seems to have died: somebody should look."""

    def ended(self) -> SandboxGoneError | None:
        """Why it can never be used again, if that is so."""

    def connected(self) -> None:
        """A connection to it was opened."""

    def disconnected(self) -> None:
        """It has none any more."""

    async def unobserved(self) -> None:
        """Close the connections of those who only look at it."""

    def is_wanted(self) -> bool:
        """Whether its connection is in use, or has to be there when somebody comes."""

    def executed(self, seconds: float) -> None:
        """A command took this long."""

    async def relinked(self, policy: NetworkPolicy) -> None:
        """It has another network policy. Returns when that is written down."""


def counted(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The same method; while it runs the sandbox is in use."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        async with self.use():
            return await method(self, *args, **options)

    return call


def counted_asleep(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """As `counted`, for what nothing inside is needed for: one that sleeps goes on sleeping."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        async with self.use(asleep=True):
            return await method(self, *args, **options)

    return call


def timed(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        started = time.perf_counter()
        result = await method(self, *args, **options)
        self.keeper.executed(time.perf_counter() - started)
        return result

    return call


def counted_stream(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], AsyncIterator[T]]:
    @functools.wraps(method)
    async def iterate(self: Any, /, *args: P.args, **options: P.kwargs) -> AsyncIterator[T]:
        async with self.use():
            pieces = method(self, *args, **options)
            assert isinstance(pieces, AsyncGenerator)
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    return iterate


class ManagedSandbox(AsyncSandbox):
    """`cleanup` deletes it through the manager. Leaving a `with` block does too; entering one makes nothing."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, engine: Engine, settings: Settings, keeper: Keeper) -> None:
        super().__init__(spec, engine=engine, settings=settings)
        self.id = sandbox_id
        self.env: Mapping[str, str] = {}
        """Variables that every command gets unless it says otherwise."""
        self.keeper = keeper
        self._line: MeteredSocket | None = None
        """The latest connection. Of a sandbox that nobody has used it is the only one."""
        self._renew_guest()

    def adopt(self, handle: Handle) -> None:
        """From now on it is this one, which exists."""
        self._handle, self.spec = handle, handle.spec
        self._renew_guest()

    def change(self, handle: Handle) -> None:
        """The same one, with another spec."""
        self._handle, self.spec = handle, handle.spec

    async def answer(self) -> None:
        """Return when its agent has answered. Not a use."""
        if self._guest.current_channel() is None:
            await self._guest.channel()  # the first thing that it is asked is whether it is there
        else:
            await self._guest.hello()

    async def set_up(self) -> None:
        """Run its setup commands. Not a use: nobody has it yet. Raises SetupError."""
        await self._set_up()

    def is_connected(self) -> bool:
        """Whether its agent holds the other end of the connection right now. The kernel says so, without a question."""
        if self._line is None or self._guest.current_channel() is None:
            return False
        try:
            return self._line.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def give_work_dir(self, user: str) -> str | None:
        """Give its work directory to this user; None where the engine has no users. Raises SpecError."""
        if Capability.USERS not in (await self._the_engine()).capabilities:
            return None
        given = await self.exec(["chown", user, self.spec.work_dir], user="0:0", timeout=_OWN_S)
        if not given.success:
            raise SpecError(f"the work directory cannot be given to user {user}: {given.stderr[-500:]}")
        return user

    async def rest(self) -> None:
        """Close the connection if nothing is open on it. The next use connects again."""
        channel = self._guest.current_channel()
        if channel is not None and not channel._streams:
            self.keeper.disconnected()
            await self._guest.aclose()

    async def let_go_of_all(self, drop_connections: bool) -> None:
        """Before its memory is saved. UnsupportedError if it has connections that cannot be."""
        await self._let_go_of_all(drop_connections)

    async def let_go(self) -> None:
        """Close the connection; what waits on it fails. Not the end of the sandbox."""
        self._shells.clear()
        self.keeper.disconnected()
        await self.keeper.unobserved()
        await self._guest.aclose()

    async def create(self) -> Self:
        return self

    async def cleanup(self) -> None:
        await self.keeper.delete()

    async def detach(self) -> None:
        await self.let_go()

    def __del__(self) -> None:
        """The manager cleans up, not whoever held this object."""

    @asynccontextmanager
    async def use(self, *, asleep: bool = False) -> AsyncIterator[None]:
        """In use as long as the block runs."""
        await self.keeper.ready(asleep=asleep)
        with self.keeper.usage.operation():
            try:
                yield
            except (SandboxGoneError, SandboxPausedError):
                self.keeper.suspect()
                raise
            except AgentUnreachableError as error:
                self.keeper.suspect()
                ended = self.keeper.ended()
                if ended is None:
                    raise
                raise ended from error
            except asyncio.CancelledError:
                me = asyncio.current_task()
                if me is None or me.cancelling():
                    raise
                # Not we were cancelled but the connection that we waited for: somebody closed it.
                gone = AgentUnreachableError("the connection to the sandbox was closed")
                raise self.keeper.ended() or gone from None

    async def connect_agent(self) -> ByteStream:
        """A new stream to its agent, for a client elsewhere. The sandbox is in use with each byte."""
        async with self.use():
            return await self._connect()

    # --- everything that uses it ----------------------------------------------------------------------------------

    exec = counted(timed(AsyncSandbox.exec))
    commands = counted(AsyncSandbox.commands)
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
    port_link = counted_asleep(AsyncSandbox.port_link)
    open_connections = counted(AsyncSandbox.open_connections)
    network_log = counted_asleep(AsyncSandbox.network_log)
    checkpoint = counted(AsyncSandbox.checkpoint)
    checkpoints = counted_asleep(AsyncSandbox.checkpoints)
    delete_checkpoint = counted_asleep(AsyncSandbox.delete_checkpoint)
    diff = counted_asleep(AsyncSandbox.diff)
    rollback = counted(AsyncSandbox.rollback)
    restart = counted(AsyncSandbox.restart)
    undo = counted(AsyncSandbox.undo)
    snapshot = counted(AsyncSandbox.snapshot)

    async def open_terminal(self, *args: Any, **options: Any) -> AsyncTerminal:
        """As `AsyncSandbox.open_terminal`; typing wakes one that fell asleep."""
        async with self.use():
            return _WakingTerminal(self, await super().open_terminal(*args, **options))

    async def connect_port(self, port: int) -> PortStream:
        async with self.use():
            return _WakingPort(self, await super().connect_port(port))

    async def connect_socket(self, path: str) -> PortStream:
        async with self.use():
            return _WakingPort(self, await super().connect_socket(path))

    async def keep_alive(self, seconds: float) -> None:
        await self.keeper.keep_alive(lease_seconds(seconds))

    async def set_network(self, policy: str | Mapping[str, object] | NetworkRules) -> None:
        async with self.use():
            await super().set_network(policy)
            await self.keeper.relinked(self.spec.network)

    async def start(self, *args: Any, **options: Any) -> AsyncCommand:
        """As `AsyncSandbox.start`: in use while somebody follows the command, and with each byte of its output."""
        limit = options.get("max_output_bytes", DEFAULT_OUTPUT_BYTES)
        async with self.use():
            return _Followed(self, await super().start(*args, **options), limit)

    async def command(self, *args: Any, **options: Any) -> AsyncCommand:
        limit = options.get("max_output_bytes", DEFAULT_OUTPUT_BYTES)
        asked = options.get("offsets", (0, 0))
        async with self.use():
            return _Followed(self, await super().command(*args, **options), limit, asked)

    async def fork(
        self,
        count: int = 1,
        checkpoint: Checkpoint | str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> list[ManagedSandbox]:
        """As `AsyncSandbox.fork`; the manager keeps them too, and they belong to the same owner."""
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        source = checkpoint.id if isinstance(checkpoint, Checkpoint) else checkpoint
        return await self.keeper.fork(count, source, memory, drop_connections)

    async def pause(self, *, memory: str = "ram", drop_connections: bool = False) -> None:
        """Refused: the manager has to know."""
        raise UnsupportedError("a manager pauses its sandboxes itself", hint="Use `pause_sandbox` of the manager.")

    async def resume(self) -> None:
        raise UnsupportedError("a manager resumes its sandboxes itself", hint="Use `resume_sandbox` of the manager.")

    def shell(self, name: str = "default") -> AsyncShell:
        self._created()
        if name not in self._shells:
            self._shells[name] = _CountedShell(self, name)
        return self._shells[name]

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _let_go(self) -> None:
        await self.let_go()

    def _created(self) -> Handle:
        error = self.keeper.ended()
        if error is not None:
            raise error
        return super()._created()

    async def _connect(self) -> ByteStream:
        self._line = MeteredSocket.of(await super()._connect(), self.keeper.usage)
        self.keeper.connected()
        return self._line

    def _renew_guest(self) -> None:
        # Without a work directory of its own: where that really is, only the agent knows.
        self._guest = Guest(self._connect, diagnose=self._diagnose)
        self._guest.processes = _WithVariables(self._guest, self)


class _WithVariables(Processes):
    """Gives every command, shell and terminal the sandbox's own variables."""

    def __init__(self, guest: Guest, sandbox: ManagedSandbox) -> None:
        super().__init__(guest)
        self._sandbox = sandbox

    async def run(self, request: StartRequest, **options: Any) -> Completed:
        return await super().run(self._with_variables(request), **options)

    async def start(self, request: StartRequest) -> ProcessStream:
        return await super().start(self._with_variables(request))

    def _with_variables(self, request: StartRequest) -> StartRequest:
        if not self._sandbox.env:
            return request
        return dataclasses.replace(request, env={**self._sandbox.env, **request.env})


class _Followed(AsyncCommand):
    """A background command: the sandbox is in use while somebody waits for it or reads what it writes."""

    def __init__(
        self,
        sandbox: ManagedSandbox,
        command: AsyncCommand,
        limit_bytes: int,
        asked: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(command._guest, command.id, command._stream, limit_bytes, command._explain, asked)
        self._sandbox = sandbox

    async def __aiter__(self) -> AsyncIterator[Output]:
        async with self._sandbox.use():
            async for piece in super().__aiter__():
                yield piece


class _WakingTerminal(AsyncTerminal):
    def __init__(self, sandbox: ManagedSandbox, terminal: AsyncTerminal) -> None:
        super().__init__(terminal._guest, terminal.id, terminal._stream)
        self._sandbox = sandbox

    async def write(self, data: str | bytes) -> None:
        async with self._sandbox.use():
            await super().write(data)

    async def resize(self, rows: int, columns: int) -> None:
        async with self._sandbox.use():
            await super().resize(rows, columns)


class _WakingPort(PortStream):
    def __init__(self, sandbox: ManagedSandbox, stream: PortStream) -> None:
        super().__init__(stream._inbox)
        self._sandbox = sandbox

    async def write(self, data: bytes) -> None:
        async with self._sandbox.use():
            await super().write(data)


class _CountedShell(AsyncShell):
    def __init__(self, sandbox: ManagedSandbox, name: str) -> None:
        super().__init__(sandbox._guest, name, None, DEFAULT_OUTPUT_BYTES, sandbox._explain, kept=True)
        self._sandbox = sandbox

    async def run(self, command: str, timeout: float) -> ExecutionResult:
        async with self._sandbox.use():
            return await super().run(command, timeout)
