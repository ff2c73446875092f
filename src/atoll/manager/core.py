"""What the parts of a manager share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from atoll.engines.base import Engine, Leasing
from atoll.errors import ManagerClosedError, SandboxGoneError, SandboxPausedError
from atoll.manager.clock import Clock
from atoll.manager.engines import Engines
from atoll.manager.journal import Journal
from atoll.manager.ledger import Ledger
from atoll.manager.lines import Lines
from atoll.manager.members import Member, Members
from atoll.manager.metrics import Metrics
from atoll.manager.record import Act, OnIdle, PausedBy, Record
from atoll.manager.sandbox import ManagedSandbox
from atoll.manager.tasks import Tasks
from atoll.manager.usage import Usage
from atoll.model import Cause, State
from atoll.network.policy import NetworkPolicy
from atoll.sandbox import DEFAULT_TIMEOUT_S
from atoll.settings import Settings

if TYPE_CHECKING:
    from atoll.manager.ending import Ending
    from atoll.manager.forking import Forking
    from atoll.manager.health import Health
    from atoll.manager.pausing import Pausing

MARK = "atoll.manager"
"""The label by which a manager knows its own sandboxes, even when its journal is lost."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user of a manager decides. None means no limit."""

    max_sandboxes: int = 100
    idle_timeout: float = 3600.0
    cleanup_interval: float = 300.0
    at_cap: Literal["refuse", "pause", "pause-any"] = "refuse"
    max_per_owner: int | None = None
    max_paused: int | None = None
    max_lifetime: float | None = None
    max_starting: int = 64
    create_s: float = 120.0
    delete_s: float = 45.0
    inspect_s: float = 10.0
    on_idle: OnIdle = "end"
    disk_timeout: float | None = None
    paused_timeout: float = 7 * 86400.0

    def __post_init__(self) -> None:
        for name in ("max_sandboxes", "max_per_owner", "max_paused"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} is a number of sandboxes, not {value!r}")
        for name in (
            *("idle_timeout", "disk_timeout", "paused_timeout", "cleanup_interval", "max_lifetime"),
            *("create_s", "delete_s", "inspect_s"),
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {value!r}; math.inf means never")
        if self.at_cap not in ("refuse", "pause", "pause-any"):
            raise ValueError(f"at_cap is 'refuse', 'pause' or 'pause-any', not {self.at_cap!r}")
        if self.on_idle not in ("end", "pause", "disk"):
            raise ValueError(f"on_idle is 'end', 'pause' or 'disk', not {self.on_idle!r}")


@dataclass(slots=True)
class Core:
    rules: Rules
    engines: Engines
    settings: Settings
    clock: Clock
    journal: Journal
    members: Members
    ledger: Ledger
    mark: str = ""
    """The manager's name."""
    tasks: Tasks = field(default_factory=Tasks)
    metrics: Metrics = field(default_factory=Metrics)
    lines: Lines = field(default_factory=Lines)
    closing: bool = False
    noticed: Callable[[Member], None] = lambda member: None
    """Called when something about a member has changed that no event tells; set by whoever ends them in time."""
    used: Callable[[str], None] = lambda sandbox_id: None
    """Called with the id of a sandbox whenever a use of it begins."""
    ending: Ending = field(init=False)
    health: Health = field(init=False)
    pausing: Pausing = field(init=False)
    forking: Forking = field(init=False)

    @property
    def engine(self) -> Engine:
        """The one for sandboxes that ask for none in particular."""
        return self.engines.default

    def engine_of(self, member: Member) -> Engine:
        return self.engines.get(member.record.engine)

    def member(self, record: Record) -> Member:
        """A new one for this record. It is not among the members yet."""
        usage = Usage(self.clock.now)
        member = Member(record, usage)
        if record.paused_at is not None:
            member.paused_since = self.clock.now() - max(0.0, self.clock.wall() - record.paused_at)
        self.engines.used.add(record.engine)
        care = Care(self, member)
        member.sandbox = ManagedSandbox(record.id, record.spec, self.engines.get(record.engine), self.settings, care)
        member.sandbox.env = record.env
        member.sandbox.timeout_s = record.timeout_s or DEFAULT_TIMEOUT_S
        if record.act is not Act.CREATE:
            member.sandbox.adopt(record.handle())
        return member

    async def lease(self, member: Member, seconds: float) -> None:
        """It counts as used for so long from now on, or as long as it was promised before. Never beyond its life."""
        now, record = self.clock.now(), member.record
        end = max(now + seconds, record.leased_now or 0.0)
        end = min(end, record.expires_now if record.expires_now is not None else end)
        update = {"leased_now": end, "leased_until": self.clock.wall() + end - now}
        await self.ledger.correct(member, update)
        engine = self.engine_of(member)
        if isinstance(engine, Leasing):
            await self.tasks.bounded(engine.keep_alive(record.handle(), seconds), self.rules.inspect_s, "take a lease")

    def refuse_if_closing(self) -> None:
        if self.closing:
            raise ManagerClosedError("the manager is shutting down", hint="Make a new SandboxManager.")


class Care:
    """The manager, as one sandbox sees it."""

    def __init__(self, core: Core, member: Member) -> None:
        self.usage = member.usage
        self._core = core
        self._member = member

    async def ready(self, *, asleep: bool = False) -> None:
        member, looked = self._member, False
        while True:
            self._core.refuse_if_closing()
            if member.usable:
                self._core.used(member.id)
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
                await self._core.pausing.wake(member)
            elif not looked:
                looked = True
                await self._core.health.look(member)
            else:
                raise SandboxGoneError(
                    f"sandbox {member.id} cannot be used: {member.record.reason}", cause=self._cause()
                )

    def ended(self) -> SandboxGoneError | None:
        record = self._member.record
        if not self._member.doomed and record.state not in (State.MISSING, State.STOPPED):
            return None
        return SandboxGoneError(f"sandbox {record.id} has ended: {record.reason or self._cause()}", cause=self._cause())

    async def delete(self) -> None:
        await self._core.ending.delete(self._member, Cause.USER, "it was deleted")

    async def fork(
        self, count: int, checkpoint: str | None, memory: bool, drop_connections: bool
    ) -> list[ManagedSandbox]:
        made = await self._core.forking.twins(self._member, count, checkpoint, memory, drop_connections)
        return [each.sandbox for each in made]

    def suspect(self) -> None:
        if self._member.usable and not self._core.closing:
            self._core.tasks.spawn(self._core.health.look(self._member), f"look at {self._member.id}")

    def connected(self) -> None:
        for sandbox in self._core.lines.opened(self._member.sandbox):
            self._core.tasks.spawn(sandbox.rest(), f"rest {sandbox.id}")

    async def unobserved(self) -> None:
        for guest in list(self._member.observers):
            await guest.aclose()

    def disconnected(self) -> None:
        self._core.lines.closed(self._member.sandbox)

    def is_wanted(self) -> bool:
        return self.usage.active > 0 or self._member.waits_in_pool or self._member.making is not None

    def executed(self, seconds: float) -> None:
        self._core.metrics.exec_s.add(seconds)

    async def keep_alive(self, seconds: float) -> None:
        await self._core.lease(self._member, seconds)

    async def relinked(self, policy: NetworkPolicy) -> None:
        record = self._member.record
        spec = record.spec.model_copy(update={"network": policy})
        await self._core.ledger.change(self._member, act=record.act, update={"spec": spec})

    def _cause(self) -> Cause:
        return self._member.record.cause or Cause.LOST
