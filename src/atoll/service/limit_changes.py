"""Change the limits of sandboxes, within what the server and the user's quotas allow."""

from __future__ import annotations

import contextlib

from atoll.manager import Record, SandboxManager
from atoll.model import Limits, effective_limits
from atoll.model.manus_names import LIMIT_OPTIONS
from atoll.service.caller import Caller
from atoll.service.models.sandbox_limits import SandboxLimits
from atoll.service.quotas import LimitCeilings, Reservations
from atoll.service.sandbox_lookup import SandboxLookup


class LimitChanges:
    def __init__(
        self, manager: SandboxManager, lookup: SandboxLookup, ceilings: LimitCeilings, reservations: Reservations
    ) -> None:
        self._manager = manager
        self._lookup = lookup
        self._ceilings = ceilings
        self._reservations = reservations

    async def get(self, caller: Caller, sandbox_id: str) -> SandboxLimits:
        """Return the limits of one of the caller's sandboxes."""
        return await self._shown(await self._lookup.existing(caller, sandbox_id))

    async def change(self, caller: Caller, sandbox_id: str, limits: Limits) -> SandboxLimits:
        """Change the limits that are named: all or none.

        Raises ForbiddenError above the server's maximum, and LimitReachedError above a quota of the user.
        """
        record = await self._lookup.existing(caller, sandbox_id)
        self._ceilings.check(caller, limits)
        sandbox = await self._lookup.sandbox(caller, record.id)
        with contextlib.ExitStack() as reserved:
            if record.owner == caller.user_id:  # an administrator is not bound by the quotas of others
                mine = await self._manager.list_sandboxes(owner=record.owner)
                reserved.enter_context(self._reservations.raised(caller, record, limits, mine))
            await sandbox.set_limits(
                memory=limits.memory_bytes, cpus=limits.cpus, pids=limits.pids, disk=limits.disk_bytes
            )
        return await self._shown(await self._lookup.existing(caller, record.id))

    async def _shown(self, record: Record) -> SandboxLimits:
        held = effective_limits(record.spec, record.details)
        changeable = await self._manager.changeable_limits(record.engine)
        return SandboxLimits(
            limits=record.spec.limits,
            effective_limits=held.limits,
            limits_left_out=list(held.left_out),
            changeable=[option for option, name in LIMIT_OPTIONS.items() if name in changeable],
        )
