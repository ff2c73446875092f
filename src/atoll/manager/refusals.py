"""What the network policies of members refused becomes events, so that whoever follows those learns of it.

A sandbox decides how often it is refused, and events are everybody's: each has so many, and what is beyond is told in
its network log alone.
"""

from __future__ import annotations

import asyncio
import logging

from atoll.engines.base import NetworkPolicies
from atoll.errors import SandboxError
from atoll.manager.core import Core
from atoll.manager.members import Member
from atoll.model import Cause, State

_EVERY_S = 1.0
_BURST, _RATE = 20.0, 0.1
_log = logging.getLogger(__name__)


class Refusals:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._told: dict[str, tuple[float, float, float]] = {}
        """By sandbox: until when it is told, how many more may be, and when that was counted."""

    async def run(self) -> None:
        """Never returns."""
        began = self._core.clock.wall()
        while True:
            await asyncio.sleep(_EVERY_S)  # files are looked at, whose times are the machine's
            members = [member for member in self._core.members if self._is_watched(member)]
            known = {member.id for member in members}
            self._told = {name: told for name, told in self._told.items() if name in known}
            for member in members:
                try:
                    await self._look(member, began)
                except (SandboxError, OSError) as error:
                    _log.debug("what was refused to %s cannot be read: %s", member.id, error)

    def _is_watched(self, member: Member) -> bool:
        engine = self._core.engine_of(member)
        return (
            member.record.state is State.RUNNING
            and member.sandbox.spec.network != "none"
            and engine.name != "remote"  # the server that it is on tells its own events
            and isinstance(engine, NetworkPolicies)
        )

    async def _look(self, member: Member, began: float) -> None:
        engine = self._core.engine_of(member)
        assert isinstance(engine, NetworkPolicies)
        until, left, counted_at = self._told.get(member.id, (began, _BURST, began))
        found = [each for each in await engine.refusals(member.record.handle()) if each.time > until]
        if not found or member.record.state is not State.RUNNING:
            return
        now = self._core.clock.wall()
        left = min(_BURST, left + max(0.0, now - counted_at) * _RATE)
        for refusal in found[: int(left)]:
            self._core.ledger.note(member, Cause.POLICY, f"network: {refusal}")
        if len(found) > int(left) >= 1:
            more = len(found) - int(left)
            self._core.ledger.note(member, Cause.POLICY, f"network: {more} more were refused; its log tells which")
        self._told[member.id] = (found[-1].time, max(0.0, left - len(found)), now)
