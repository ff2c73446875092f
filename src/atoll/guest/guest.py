"""The host's side of one sandbox's agent, which connects when needed and reconnects when the connection was lost."""

from __future__ import annotations

import asyncio
import math
import socket
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atoll.errors import AgentUnreachableError
from atoll.guest.connection import Connect, Connection, Diagnose, answered, dial
from atoll.guest.files import Files
from atoll.guest.frames import Op, Tag
from atoll.guest.port_streams import Ports
from atoll.guest.processes import Processes
from atoll.tracing import traced

_LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class Hello:
    pid: int
    uptime_s: float
    instance: bytes


@dataclass(frozen=True, slots=True)
class AgentStats:
    rss_bytes: int
    processes: int
    streams: int
    connections: int
    output_bytes: int
    uptime_s: float


class Guest:
    """The client of one sandbox's agent.

    It may be used from one event loop after another: each gets a new connection, and the previous one is closed.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        work_dir: str | None = None,
        connect_timeout_s: float = 30.0,
        diagnose: Diagnose | None = None,
        user: Callable[[], str | None] = lambda: None,
        variables: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`diagnose` raises the reason why the sandbox cannot answer, if there is one. `user` returns the user that
        processes run as if they name none, and `variables` those that they have besides the agent's."""
        self.default_user = user
        self.variables = variables
        self.processes = Processes(self)
        self.files = Files(self, work_dir)
        self.ports = Ports(self)
        self._connect = connect
        self._connect_timeout_s = connect_timeout_s
        self._diagnose = diagnose
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None

    @property
    def instance(self) -> bytes:
        """The id of this run of the agent; empty before the first connection."""
        return self._connection.instance if self._connection is not None else b""

    def current_connection(self) -> Connection | None:
        """The open connection of the running event loop, if there is one."""
        connection = self._connection
        if connection is not None and not connection.closed and connection.loop is asyncio.get_running_loop():
            return connection
        return None

    async def connection(self) -> Connection:
        """Return the connection, opening one if necessary. Raises AgentUnreachableError or the engine's reason."""
        connection = self.current_connection()
        if connection is not None:
            try:
                await connection.alive()
                return connection
            except AgentUnreachableError as error:
                if not connection.closed:
                    connection.fail(error)
                    raise
        task = self._connecting
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = self._connecting = asyncio.create_task(self._open())
            # Retrieve the exception even if all waiting callers were cancelled, or asyncio would log it.
            task.add_done_callback(_retrieve)
        # Several callers share one attempt, so cancelling one of them must not cancel the attempt.
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if task.cancelled() and me is not None and not me.cancelling():  # `aclose` cancelled the attempt
                raise AgentUnreachableError("the connection to the sandbox was closed") from None
            raise

    async def renewed(self) -> None:
        """Return once the agent of a sandbox that was just restarted answers.

        The failure of an attempt to connect that began earlier is ignored, because it may concern the old agent.
        """
        task = self._connecting
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([task])
        await self.connection()

    async def present(self, seconds: float) -> None:
        """Return once the agent answers. Raises AgentUnreachableError after `seconds`, or the reason why it cannot.

        The wait is at least one second, because a command's timeout may be shorter than the time to connect.
        """
        seconds = max(seconds, _LEAST_S)
        try:
            async with asyncio.timeout(seconds if math.isfinite(seconds) else None):
                await self.connection()
        except TimeoutError as error:
            raise AgentUnreachableError(f"the sandbox did not answer within {seconds:g} s") from error

    def doubt(self) -> None:
        """Make the next use check that the agent answers, even if it was heard recently."""
        if (connection := self.current_connection()) is not None:
            connection.doubt()

    async def diagnose(self) -> None:
        """Raise the reason why the sandbox cannot answer, if there is one."""
        if self._diagnose is not None:
            await self._diagnose()

    @traced("agent.hello")
    async def hello(self) -> Hello:
        fields = await (await self.connection()).request(Op.HELLO)
        return Hello(
            pid=fields.int(Tag.PID), uptime_s=fields.int(Tag.UPTIME_NS) / 1e9, instance=fields.bytes(Tag.INSTANCE)
        )

    async def stats(self) -> AgentStats:
        fields = await (await self.connection()).request(Op.STATS)
        return AgentStats(
            rss_bytes=fields.int(Tag.RSS_BYTES),
            processes=fields.int(Tag.PROCESSES),
            streams=fields.int(Tag.STREAMS),
            connections=fields.int(Tag.CONNECTIONS),
            output_bytes=fields.int(Tag.OUTPUT_BYTES),
            uptime_s=fields.int(Tag.UPTIME_NS) / 1e9,
        )

    async def aclose(self) -> None:
        """Close the connection; processes inside continue. May be repeated, and a later use connects again."""
        task, self._connecting = self._connecting, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait([task])
        if self._connection is not None:
            self._connection.close()

    @traced("agent.connect")
    async def _open(self) -> Connection:
        me = asyncio.current_task()
        try:
            if self._connection is not None:
                self._connection.close()
            sock = await dial(self._connect, self._connect_timeout_s)
            try:
                self._connection = await self._greet(sock)
            except AgentUnreachableError as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise
                # It died between accepting the connection and its answer, as during a rollback that another program
                # began: whoever accepts the next connection is the agent from now on.
                self._connection = await self._greet(await dial(self._connect, self._connect_timeout_s))
            return self._connection
        finally:
            if self._connecting is me:
                self._connecting = None

    async def _greet(self, sock: socket.socket) -> Connection:
        if self._diagnose is None:
            return await Connection.open(sock)
        try:
            connection = await answered(Connection.open(sock), self._diagnose)
        except AgentUnreachableError:
            await self._diagnose()
            raise
        connection.diagnose = _asking(self)
        return connection


def _asking(guest: Guest) -> Diagnose:
    """Return a `diagnose` that refers to the guest weakly.

    The event loop keeps the connection alive; it must not keep a forgotten sandbox object alive with it.
    """
    reference = weakref.ref(guest)

    async def diagnose() -> None:
        if (found := reference()) is not None:
            await found.diagnose()

    return diagnose


def _retrieve(task: asyncio.Task[Connection]) -> None:
    if not task.cancelled():
        task.exception()
