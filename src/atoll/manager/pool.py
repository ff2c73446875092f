"""Warm pools: sandboxes of one spec that are ready before they are requested.

The engine makes every spare from scratch, never as a copy of another sandbox, so no user can find anything of another:
no files, random numbers, keys or clock. If the spec says `prewarm`, spares have the memory of the first of them, as it
was before anybody used it. A sandbox that was claimed never returns to its pool.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from atoll.engines import registry
from atoll.engines.contract import NetworkPolicies, Resizable
from atoll.engines.enforcement import LATER
from atoll.errors import SandboxError, SpecError
from atoll.manager.context import ManagerContext, Operations
from atoll.manager.members import Member
from atoll.manager.record import Event, fingerprint, spec_body
from atoll.manager.request import Request
from atoll.model import Cause, SandboxSpec, State

_ANSWER_S = 2.0
_FIRST_BACK_OFF_S = 0.5
_MAX_BACK_OFF_S = 60.0
_log = logging.getLogger(__name__)
MakeSpare = Callable[[Request], Awaitable[Member | None]]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How many sandboxes of this spec to keep ready, and how."""

    spec: SandboxSpec
    size: int = 2
    max_size: int | None = None
    """The size follows the demand up to this number. None keeps it fixed."""
    parallel: int = 2
    """How many spares are created at a time."""
    pace_s: float = 0.05
    """Pause before each creation, unless the pool is empty, so that whoever claimed the last spare is served first."""
    max_age_s: float = 3600.0
    """Spares older than this are replaced."""
    window_s: float = 60.0
    """How long the demand must be lower before the size shrinks."""
    engine: str | None = None
    """Name of the engine. None means the manager's engine."""

    def __post_init__(self) -> None:
        if self.spec.labels:
            raise SpecError(
                "the spec of a pool must not have labels", hint="Each sandbox gets its own when it is claimed."
            )
        if any(not volume.read_only for volume in self.spec.volumes):
            raise SpecError("the spec of a pool must not have writable volumes", hint="Its sandboxes would share them.")
        if self.spec.named_volumes:
            raise SpecError(
                "the spec of a pool must not have named volumes", hint="They belong to a user, and a spare has none."
            )
        if self.parallel < 1 or self.size < 0 or (self.max_size is not None and self.max_size < self.size):
            raise SpecError("in a pool, size must be from 0 to max_size, and parallel at least 1")

    @property
    def key(self) -> str:
        body = spec_body(_without_what_a_claim_changes(self.spec))
        return fingerprint(body, base(self.spec)[1], self.engine or "")


def base(spec: SandboxSpec) -> tuple[str, str]:
    """Return the parts of a spec that a claim cannot change, and its variables, to which a claim can only add."""
    plain = _without_what_a_claim_changes(spec)
    return plain.model_dump_json(exclude={"account"}), repr(sorted(spec.env.items()))


def _without_what_a_claim_changes(spec: SandboxSpec) -> SandboxSpec:
    limits = spec.limits.model_copy(update={"lifetime_s": None})
    return spec.model_copy(update={"labels": {}, "env": {}, "limits": limits})


class PoolSize:
    """Computes how many sandboxes a pool should keep ready.

    The number doubles when a request found no spare, and halves after a window in which at most half of it was
    requested.
    """

    def __init__(self, least: int, most: int, window_s: float, now: float) -> None:
        if not 0 <= least <= most:
            raise ValueError(f"a pool cannot keep at least {least} and at most {most} sandboxes")
        self._least = least
        self._most = most
        self._window_s = window_s
        self._target = least
        self._since = now
        self._demand = 0

    def asked(self, now: float, *, hit: bool) -> None:
        self.target(now)
        self._demand += 1
        if not hit:
            self._target = min(self._most, max(1, self._target * 2))

    def target(self, now: float) -> int:
        while now - self._since >= self._window_s:
            if self._demand <= self._target // 2:
                self._target = max(self._least, self._target // 2)
            self._demand = 0
            self._since += self._window_s
            if self._target == self._least:
                self._since = max(self._since, now - (now - self._since) % self._window_s)
        return self._target


class Pool:
    def __init__(self, context: ManagerContext, operations: Operations, settings: PoolSettings) -> None:
        self.settings = settings
        self.key = settings.key
        self._base, self._env = base(settings.spec)[0], settings.spec.env
        self.hits = self.misses = self.discarded = self.refills = self.failures = 0
        self._context = context
        self._operations = operations
        self._size = PoolSize(settings.size, settings.max_size or settings.size, settings.window_s, context.clock.now())
        self._ready: deque[Member] = deque()
        self._filling = 0
        self._changed = asyncio.Event()

    def start(self, make_spare: MakeSpare) -> None:
        for number in range(self.settings.parallel):
            self._context.tasks.spawn(self._refill(make_spare), f"refill {self.key[:8]} {number}")

    def fits(self, request: Request) -> bool:
        own = self._context.engine.name
        if (request.engine or own) != registry.canonical(self.settings.engine or own):
            return False
        spec = request.spec
        if not self._env.items() <= spec.env.items():
            return False
        mine = self.settings.spec
        if (mine.setup or mine.start or mine.ready) and (spec.env != mine.env or spec.network != mine.network):
            return False  # its setup and start commands ran with the variables and the network of the pool
        return spec == self.settings.spec or self._base == base(self._without_what_comes_later(spec))[0]

    def _without_what_comes_later(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec without what can still be set on a claim: limits that the pool's spec leaves open, and the
        policy of a sandbox that has a network link."""
        name = self.settings.engine or self._context.engine.name
        engine, changeable = self._context.engines.get(name), self._context.engines.changeable_limits(name)
        mine, update = self.settings.spec, dict[str, object]()
        if isinstance(engine, Resizable):
            free = {name: None for name in LATER if name in changeable and getattr(mine.limits, name) is None}
            update["limits"] = spec.limits.model_copy(update=free)
        if isinstance(engine, NetworkPolicies) and "none" not in (mine.network, spec.network):
            update["network"] = mine.network
        return spec.model_copy(update=update)

    def target(self) -> int:
        return self._size.target(self._context.clock.now())

    async def take(self) -> Member | None:
        """Return a spare that answers and that nobody has ever used, or None. The caller must use it or put it back."""
        while self._ready:
            member = self._ready.popleft()
            try:
                if member.usable and (member.sandbox.is_connected() or await self._answers(member)):
                    return member
            except BaseException:
                self.put_back(member)
                raise
            self.discarded += 1
            self.discard(member, "it was found dead in its pool")
        return None

    def count(self, *, hit: bool) -> None:
        self.hits, self.misses = self.hits + hit, self.misses + (not hit)
        self._size.asked(self._context.clock.now(), hit=hit)
        self.wake()

    def put_back(self, member: Member) -> None:
        """Add a spare that was not used after all, or that is new."""
        if member.usable and member.waits_in_pool:
            self._ready.appendleft(member)
        elif not member.is_being_deleted:
            self.discard(member, "it died in its pool")

    def discard(self, member: Member, reason: str) -> None:
        if member in self._ready:
            self._ready.remove(member)
        self._operations.begin_delete(member, member.record.cause or Cause.POLICY, reason)
        self.wake()

    def tidy(self) -> None:
        """Discard spares that died, are too old or are too many."""
        now = self._context.clock.now()
        for member in list(self._ready):
            if not member.usable:
                self._ready.remove(member)
                if not member.is_being_deleted:
                    self.discarded += 1
                    self.discard(member, "it died in its pool")
            elif now - member.since > self.settings.max_age_s:
                self.discard(member, "it has waited too long in its pool")
            elif len(self._ready) > self.target():
                self.discard(member, "its pool became smaller")
        self.wake()

    def wake(self) -> None:
        self._changed.set()

    def figures(self) -> dict[str, int | float]:
        return {
            "ready": len(self._ready),
            "target": self.target(),
            "hits": self.hits,
            "misses": self.misses,
            "discarded": self.discarded,
            "refills": self.refills,
            "failures": self.failures,
        }

    async def _answers(self, member: Member) -> bool:
        try:
            await self._context.tasks.bounded(member.sandbox.answer(), _ANSWER_S, f"hear from {member.id}")
        except (SandboxError, OSError):
            return False
        return member.usable

    async def _refill(self, make_spare: MakeSpare) -> None:
        wait = 0.0
        while True:
            self._changed.clear()
            if len(self._ready) + self._filling >= self.target():
                await self._changed.wait()
                continue
            self._filling += 1
            try:
                if self._ready:
                    await self._context.clock.sleep(self.settings.pace_s)
                member = await make_spare(Request(self.settings.spec, pool=self.key, engine=self.settings.engine))
            except SandboxError as error:
                if self._context.closing:
                    return
                self.failures += 1
                _log.warning("a pool could not be refilled: %s", error)
                wait = min(_MAX_BACK_OFF_S, wait * 2 or _FIRST_BACK_OFF_S)
                await self._context.clock.sleep(wait * random.uniform(0.75, 1.25))  # noqa: S311
                continue
            finally:
                self._filling -= 1
            if member is None:
                await self._changed.wait()  # until there is room
                continue
            wait = 0.0
            self.refills += 1
            self._ready.append(member)


class Pools:
    """All pools of a manager."""

    def __init__(self, context: ManagerContext, operations: Operations, settings: Iterable[PoolSettings]) -> None:
        self._context = context
        self._operations = operations
        self._pools: dict[str, Pool] = {}
        for pool in settings:
            if pool.key in self._pools:
                raise SpecError("there is already a pool of this spec")
            self._pools[pool.key] = Pool(context, operations, pool)

    def start(self, make_spare: MakeSpare) -> None:
        """Start to fill all pools."""
        for pool in self._pools.values():
            pool.start(make_spare)

    async def take(self, request: Request) -> Member | None:
        """Return a spare for this request, or None if there is none or no pool fits. The caller must use it or put it
        back."""
        fitting = [pool for pool in self._pools.values() if pool.fits(request)]
        for pool in fitting:
            member = await pool.take()
            if member is not None:
                pool.count(hit=True)
                return member
        for pool in fitting[:1]:
            pool.count(hit=False)
        return None

    def put_back(self, member: Member) -> None:
        """Return a spare to its pool, also after a restart of the manager. A spare whose pool no longer exists is
        deleted."""
        pool = self._pools.get(member.record.pool or "")
        if pool is not None:
            pool.put_back(member)
        elif member.waits_in_pool and not member.is_being_deleted:
            self._operations.begin_delete(member, Cause.POLICY, "its pool is gone")

    def wake(self) -> None:
        """Let the pools check whether there is room for spares now."""
        for pool in self._pools.values():
            pool.wake()

    def tidy(self) -> None:
        for pool in self._pools.values():
            pool.tidy()

    def figures(self) -> dict[str, dict[str, int | float]]:
        return {key: pool.figures() for key, pool in list(self._pools.items())}

    def on_event(self, event: Event) -> None:
        if event.after is State.MISSING:
            self.wake()
