"""Sandboxes of one kind that are ready before they are asked for.

Each is made afresh by the engine, never copied from another, so nothing of one user can be found by the next: not its
files, its random numbers, its keys or its clock. One that was handed out never comes back.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from atoll.engines.base import LATER, NetworkPolicies, Resizable
from atoll.errors import SandboxError, SpecError
from atoll.manager.core import Core
from atoll.manager.members import Member
from atoll.manager.pool_size import PoolSize
from atoll.manager.record import fingerprint
from atoll.manager.request import Request
from atoll.model import Cause, SandboxSpec

_ANSWER_S = 2.0
_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 60.0
_log = logging.getLogger(__name__)
MakeSpare = Callable[[Request], Awaitable[Member | None]]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Keep so many sandboxes of this spec ready."""

    spec: SandboxSpec
    size: int = 2
    max_size: int | None = None
    """The size follows the demand up to this; None: it does not."""
    parallel: int = 2
    """How many are made at a time."""
    pace_s: float = 0.05
    """A pause before each one is made, unless the pool is empty: whoever claimed the last comes first."""
    max_age_s: float = 3600.0
    """Older ones are replaced."""
    window_s: float = 60.0
    """How long less must be asked for until the size shrinks."""
    engine: str | None = None
    """The name of one; None: the manager's own."""

    def __post_init__(self) -> None:
        if self.spec.labels:
            raise SpecError("the spec of a pool has no labels", hint="Each sandbox gets its own when it is claimed.")
        if any(not volume.read_only for volume in self.spec.volumes):
            raise SpecError("the spec of a pool has no writable volumes", hint="Its sandboxes would share them.")
        if self.parallel < 1 or self.size < 0 or (self.max_size is not None and self.max_size < self.size):
            raise SpecError("a pool keeps at least 0 sandboxes, at most max_size, and makes at least one at a time")

    @property
    def key(self) -> str:
        return fingerprint(*base(self.spec), self.engine or "")


def base(spec: SandboxSpec) -> tuple[str, str]:
    """What cannot be changed when a sandbox is claimed, and its variables, which can only be added to."""
    limits = spec.limits.model_copy(update={"lifetime_s": None})
    plain = spec.model_copy(update={"labels": {}, "env": {}, "limits": limits})
    return plain.model_dump_json(exclude={"account"}), repr(sorted(spec.env.items()))


class Pool:
    def __init__(self, core: Core, settings: PoolSettings, make_spare: MakeSpare) -> None:
        self.settings = settings
        self.key = settings.key
        self._base, self._env = base(settings.spec)[0], settings.spec.env
        self.hits = self.misses = self.discarded = self.refills = self.failures = 0
        self._core = core
        self._make_spare = make_spare
        self._size = PoolSize(settings.size, settings.max_size or settings.size, settings.window_s, core.clock.now())
        self._ready: deque[Member] = deque()
        self._filling = 0
        self._changed = asyncio.Event()

    def start(self) -> None:
        for number in range(self.settings.parallel):
            self._core.tasks.spawn(self._refill(), f"refill {self.key[:8]} {number}")

    def fits(self, request: Request) -> bool:
        own = self._core.engine.name
        if (request.engine or own) != (self.settings.engine or own):
            return False
        spec = request.spec
        if not self._env.items() <= spec.env.items():
            return False
        mine = self.settings.spec
        if mine.setup and (spec.env != mine.env or spec.network != mine.network):
            return False  # its setup commands ran with the variables and the network of the pool
        return spec == self.settings.spec or self._base == base(self._without_what_comes_later(spec))[0]

    def _without_what_comes_later(self, spec: SandboxSpec) -> SandboxSpec:
        """Without what can still be set when a sandbox is claimed: limits that it has not got, and the policy of one
        that has a link."""
        engine = self._core.engines.get(self.settings.engine or self._core.engine.name)
        mine, update = self.settings.spec, dict[str, object]()
        if isinstance(engine, Resizable):
            free = {name: None for name in LATER if getattr(mine.limits, name) is None}
            update["limits"] = spec.limits.model_copy(update=free)
        if isinstance(engine, NetworkPolicies) and "none" not in (mine.network, spec.network):
            update["network"] = mine.network
        return spec.model_copy(update=update)

    def target(self) -> int:
        return self._size.target(self._core.clock.now())

    async def take(self) -> Member | None:
        """One that answers and that nobody has ever used; None if there is none. It must be used or put back."""
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
        self._size.asked(self._core.clock.now(), hit=hit)
        self.wake()

    def put_back(self, member: Member) -> None:
        """It was not used after all; or it is new."""
        if member.usable and member.waits_in_pool:
            self._ready.appendleft(member)
        elif not member.doomed:
            self.discard(member, "it died in its pool")

    def discard(self, member: Member, reason: str) -> None:
        if member in self._ready:
            self._ready.remove(member)
        self._core.ending.begin(member, member.record.cause or Cause.POLICY, reason)
        self.wake()

    def tidy(self) -> None:
        """Let go of those that died, are too old or too many."""
        now = self._core.clock.now()
        for member in list(self._ready):
            if not member.usable:
                self._ready.remove(member)
                if not member.doomed:
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
            await self._core.tasks.bounded(member.sandbox.answer(), _ANSWER_S, f"hear from {member.id}")
        except (SandboxError, OSError):
            return False
        return member.usable

    async def _refill(self) -> None:
        wait = 0.0
        while True:
            self._changed.clear()
            if len(self._ready) + self._filling >= self.target():
                await self._changed.wait()
                continue
            self._filling += 1
            try:
                if self._ready:
                    await self._core.clock.sleep(self.settings.pace_s)
                member = await self._make_spare(Request(self.settings.spec, pool=self.key, engine=self.settings.engine))
            except SandboxError as error:
                if self._core.closing:
                    return
                self.failures += 1
                _log.warning("a pool could not be refilled: %s", error)
                wait = min(_LONGEST_BACK_OFF_S, wait * 2 or _FIRST_BACK_OFF_S)
                await self._core.clock.sleep(wait * random.uniform(0.75, 1.25))  # noqa: S311
                continue
            finally:
                self._filling -= 1
            if member is None:
                await self._changed.wait()  # until there is room
                continue
            wait = 0.0
            self.refills += 1
            self._ready.append(member)
