"""The control groups of accounts for containers, as far as they are available.

A Docker engine puts a container below any control group that it is told, if it makes them itself (its driver is
`cgroupfs`) and is on this machine. With the driver `systemd` groups are units of its own, and on another machine they
are out of reach: then only the limits of each container hold.

The engine removes a container's own group in its own time: it waits two seconds for that at most, and reports the
container as removed even if processes are still dying there. So whoever deletes a container waits for its group too,
and whatever is found empty later goes with the groups above it.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import ParamSpec

from atoll import workers
from atoll.engines.docker.api.endpoint import Endpoint
from atoll.engines.docker.api.facts import Facts
from atoll.engines.host.cgroups.account_groups import ACCOUNT, PREFIXES, AccountGroups
from atoll.engines.host.cgroups.group_lock import GroupLock
from atoll.engines.host.cgroups.groups import Group, Hierarchy
from atoll.settings import Settings
from atoll.waiting import Deadline

P = ParamSpec("P")
_CLAIM_S = 10.0
_DYING_S = 5.0
_PAUSE_S = 0.01


class ContainerAccounts:
    def __init__(self, settings: Settings, endpoint: Endpoint) -> None:
        self._settings = settings
        self._local = endpoint.may_be_local and os.geteuid() == 0
        self._lock = GroupLock.of(settings)

    def enforced(self, facts: Facts) -> tuple[str, ...]:
        return self._groups.enforced() if self._local and facts.cgroup_driver == "cgroupfs" else ()

    @asynccontextmanager
    async def claimed(self) -> AsyncIterator[None]:
        """Nobody removes the groups above a container meanwhile. What is not needed in the end is removed."""
        if not self._local:
            yield
            return
        try:
            async with self._lock.claimed(Deadline.after(_CLAIM_S)):
                yield
        except BaseException:
            await self.remove_empty()
            raise

    def parent(self, facts: Facts, account: str) -> str:
        """The group to make a container in, which the caller has claimed; empty: the engine's own choice."""
        return self._groups.ensure(account) if self.enforced(facts) else ""

    def renew(self, parent: str) -> None:
        """Make the group again in which a container was made, before it is started. The caller has claimed it."""
        name = parent.rpartition("/")[2].removeprefix(ACCOUNT)
        for account in ("", name) if self._local and name else ():
            if self._groups.path(account) == parent:
                self._groups.ensure(account)
                return

    def balance(self) -> None:
        if self._local and (self._settings.data_dir / "installation-id").exists():
            self._groups.balance()

    async def clear(self, container_ids: Collection[str]) -> None:
        """These containers are gone: wait until their groups are too, and remove those above them that are empty."""
        deadline = Deadline.after(_DYING_S)
        while not await self._do(self._clear, container_ids):
            if not deadline.left():
                break  # something does not die: whoever tidies up next removes it
            await asyncio.sleep(_PAUSE_S)
        await self._do(self._remove_empty)

    async def remove_empty(self) -> None:
        """All that nothing is in, also what another process or the engine left."""
        await self._do(self._remove_empty, sweep=True)

    async def _do(self, work: Callable[P, bool], *args: P.args, **kwargs: P.kwargs) -> bool:
        if not self._local or not (self._settings.data_dir / "installation-id").exists():
            return True
        try:
            return await workers.run(workers.ENGINE, work, *args, **kwargs)
        except RuntimeError:  # the program is ending, and starts no threads any more
            return work(*args, **kwargs)

    def _clear(self, container_ids: Collection[str]) -> bool:
        names = [f"{prefix}{container_id}" for container_id in container_ids for prefix in PREFIXES]
        found = [Group(self._hierarchy, path) for name in names if (path := self._groups.find(name))]
        return [_remove(group) for group in found].count(False) == 0

    def _remove_empty(self, *, sweep: bool = False) -> bool:
        """With `sweep` also the groups of containers. To look at all of them takes too long for each deletion."""
        with self._lock.unclaimed() as nobody:
            if nobody:
                for group in self._groups.containers() if sweep else ():
                    _remove(group)
                self._groups.remove_empty()
        return nobody

    @functools.cached_property
    def _hierarchy(self) -> Hierarchy:
        return Hierarchy.find()

    @functools.cached_property
    def _groups(self) -> AccountGroups:
        top = f"/atoll-{self._settings.installation_id()[:12]}"
        return AccountGroups(self._hierarchy, top, self._settings.resources)


def _remove(group: Group) -> bool:
    """Whether it is gone. Not while anything is in it in any hierarchy: some runtimes do not use all of them."""
    try:
        if not group.pids():
            group.remove()
    except OSError:  # what was in it is not quite dead
        return False
    return not group.exists()
