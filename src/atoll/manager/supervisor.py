"""The supervisor through which each sandbox reaches its manager, and the factory that creates it."""

from __future__ import annotations

import resource
from contextlib import AbstractAsyncContextManager

from atoll.engines.contract import Leasing
from atoll.errors import SandboxGoneError, SandboxPausedError
from atoll.manager.context import ManagerContext, Operations
from atoll.manager.health import Health
from atoll.manager.managed_sandbox import ManagedSandbox
from atoll.manager.members import Member
from atoll.manager.record import Operation, PausedBy, Record
from atoll.manager.usage import Usage
from atoll.model import Cause, Handle, State
from atoll.model.network_policy import NetworkPolicy

_MAX_CONNECTIONS = 1024
_TRIES = 8


class MemberFactory:
    """Makes a member for a record: the sandbox that users hold, and its supervisor."""

    def __init__(self, context: ManagerContext, health: Health, operations: Operations) -> None:
        self.connections = ConnectionCap()
        self._context = context
        self._health = health
        self._operations = operations

    def new(self, record: Record) -> Member:
        """Return a new member, which is not among the manager's members yet."""
        context = self._context
        member = Member(record, Usage(context.clock.now))
        if record.paused_at is not None:
            member.paused_since = context.clock.now() - max(0.0, context.clock.wall() - record.paused_at)
        context.engines.used.add(record.engine)
        supervisor = MemberSupervisor(context, member, self._health, self._operations, self.connections)
        engine = context.engines.get(record.engine)
        member.sandbox = ManagedSandbox(record.id, record.spec, engine, context.settings, supervisor)
        member.sandbox.configure(record.env, record.timeout_s)
        if record.act is not Operation.CREATE:
            member.sandbox.adopt(record.handle())
        return member


class MemberSupervisor:
    """Implements `Supervisor` for one sandbox."""

    def __init__(
        self,
        context: ManagerContext,
        member: Member,
        health: Health,
        operations: Operations,
        connections: ConnectionCap,
    ) -> None:
        self.usage = member.usage
        self._context = context
        self._member = member
        self._health = health
        self._operations = operations
        self._connections = connections

    async def ready(self, *, asleep: bool = False) -> None:
        member, looked = self._member, False
        while True:
            self._context.refuse_if_closing()
            if member.usable:
                self._context.on_use(member.id)
                return
            if asleep and member.free and member.record.state is State.PAUSED:
                return
            error = self.ended()
            if error is not None:
                raise error
            if not member.free:
                await member.changed()
            elif member.record.state is State.PAUSED:
                if member.record.paused_by not in (PausedBy.IDLE, PausedBy.ROOM):
                    raise SandboxPausedError.of(member.id)
                await self._operations.resume(member)
            elif not looked:
                looked = True
                await self._health.look(member)
            else:
                raise SandboxGoneError(
                    f"sandbox {member.id} cannot be used: {member.record.reason}", cause=self._cause()
                )

    def ended(self) -> SandboxGoneError | None:
        record = self._member.record
        if not self._member.is_being_deleted and record.state not in (State.MISSING, State.STOPPED):
            return None
        return SandboxGoneError(f"sandbox {record.id} has ended: {record.reason or self._cause()}", cause=self._cause())

    async def delete(self) -> None:
        await self._operations.delete(self._member, Cause.USER, "it was deleted")

    async def fork(
        self, count: int, checkpoint: str | None, memory: bool, drop_connections: bool
    ) -> list[ManagedSandbox]:
        made = await self._operations.fork_unnamed(self._member, count, checkpoint, memory, drop_connections)
        return [each.sandbox for each in made]

    def suspect(self) -> None:
        if self._member.usable and not self._context.closing:
            self._context.tasks.spawn(self._health.look(self._member), f"look at {self._member.id}")

    def connected(self) -> None:
        for sandbox in self._connections.opened(self._member.sandbox):
            self._context.tasks.spawn(sandbox.rest(), f"rest {sandbox.id}")

    def disconnected(self) -> None:
        self._connections.closed(self._member.sandbox)

    async def unobserved(self) -> None:
        for guest in list(self._member.observers):
            await guest.aclose()

    def is_wanted(self) -> bool:
        return self.usage.active > 0 or self._member.waits_in_pool or self._member.creation is not None

    def turn(self) -> AbstractAsyncContextManager[object]:
        return self._context.checks.slot(self._member.record.owner or "")

    def executed(self, seconds: float) -> None:
        self._context.metrics.exec_s.add(seconds)

    async def keep_alive(self, seconds: float) -> None:
        """Extend the lease. Its end is never before that of an earlier lease, and never after the end of the sandbox's
        lifetime."""
        context, member, record = self._context, self._member, self._member.record
        now = context.clock.now()
        end = max(now + seconds, record.leased_now or 0.0)
        end = min(end, record.expires_now if record.expires_now is not None else end)
        update = {"leased_now": end, "leased_until": context.clock.wall() + end - now}
        await context.transitions.correct(member, update)
        engine = context.engine_of(member)
        if isinstance(engine, Leasing):
            work = engine.keep_alive(record.handle(), seconds)
            await context.tasks.bounded(work, context.rules.inspect_s, "take a lease")

    async def relinked(self, policy: NetworkPolicy) -> None:
        record = self._member.record
        spec = record.spec.model_copy(update={"network": policy})
        await self._context.transitions.change(self._member, act=record.act, update={"spec": spec})

    async def resized(self, handle: Handle) -> None:
        record = self._member.record
        spec = record.spec.model_copy(update={"limits": handle.spec.limits})
        update = {"spec": spec, "details": handle.details}
        await self._context.transitions.change(self._member, act=record.act, update=update)

    def _cause(self) -> Cause:
        return self._member.record.cause or Cause.LOST


class ConnectionCap:
    """The open connections to agents, in the order in which they were opened.

    Beyond the limit the first idle ones are closed, so that a thousand idle sandboxes do not need a thousand
    descriptors.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = _affordable_connections() if limit is None else limit
        self._open: dict[str, ManagedSandbox] = {}

    def opened(self, sandbox: ManagedSandbox) -> list[ManagedSandbox]:
        """Remember the sandbox's connection. Returns the sandboxes whose connections to close now; a later use connects
        again."""
        self._open.pop(sandbox.id, None)
        self._open[sandbox.id] = sandbox
        chosen: list[ManagedSandbox] = []
        for _ in range(_TRIES):
            if len(self._open) <= self.limit:
                break
            id, first = next(iter(self._open.items()))
            del self._open[id]
            if first is sandbox or first.supervisor.is_wanted():
                self._open[id] = first
            else:
                chosen.append(first)
        return chosen

    def closed(self, sandbox: ManagedSandbox) -> None:
        """Forget the sandbox's connection. May be repeated."""
        self._open.pop(sandbox.id, None)


def _affordable_connections() -> int:
    """Return a quarter of the descriptors that this process may have. The rest is for engines, transfers and the
    program."""
    return max(16, min(_MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
