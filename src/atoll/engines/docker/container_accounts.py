"""The control groups of accounts for containers, where they are available.

A Docker engine creates a container below any given control group, if it manages the groups itself (its driver is
`cgroupfs`) and is on this machine. With the driver `systemd` groups are units of systemd, and on another machine they
are out of reach; then only the limits of each container apply.

The Docker engine removes a container's own group asynchronously: it waits at most two seconds for that, and reports the
container as removed even if processes are still dying there. So a deletion waits for the group too, and a later cleanup
removes empty groups together with those above them.
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
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy
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
        """Keep the groups above a container from being removed. If the context fails, unused groups are removed."""
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
        """Return the control group for a container, which the caller has claimed; empty to leave the choice to the
        Docker engine."""
        return self._groups.ensure(account) if self.enforced(facts) else ""

    def renew(self, parent: str) -> None:
        """Create the group of an existing container again, before the container is started. The caller has claimed
        it."""
        name = parent.rpartition("/")[2].removeprefix(ACCOUNT)
        for account in ("", name) if self._local and name else ():
            if self._groups.path(account) == parent:
                self._groups.ensure(account)
                return

    def balance(self) -> None:
        if self._local and (self._settings.data_dir / "installation-id").exists():
            self._groups.balance()

    async def clear(self, container_ids: Collection[str]) -> None:
        """Wait until the groups of removed containers are gone, then remove the empty groups above them."""
        deadline = Deadline.after(_DYING_S)
        while not await self._do(self._clear, container_ids):
            if not deadline.left():
                break  # some process does not die: the next cleanup removes its group
            await asyncio.sleep(_PAUSE_S)
        await self._do(self._remove_empty)

    async def remove_empty(self) -> None:
        """Remove all empty groups, also those left by another process or by the Docker engine."""
        await self._do(self._remove_empty, sweep=True)

    async def _do(self, work: Callable[P, bool], *args: P.args, **kwargs: P.kwargs) -> bool:
        if not self._local or not (self._settings.data_dir / "installation-id").exists():
            return True
        try:
            return await workers.run(workers.ENGINE, work, *args, **kwargs)
        except workers.NoThreadError:  # the interpreter is shutting down
            return work(*args, **kwargs)

    def _clear(self, container_ids: Collection[str]) -> bool:
        names = [f"{prefix}{container_id}" for container_id in container_ids for prefix in PREFIXES]
        found = [Group(self._hierarchy, path) for name in names if (path := self._groups.find(name))]
        return [_remove(group) for group in found].count(False) == 0

    def _remove_empty(self, *, sweep: bool = False) -> bool:
        """Remove empty groups; with `sweep` also those of containers. Looking at all of them takes too long for each
        deletion."""
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
    """Remove a group that is empty in every hierarchy (some OCI runtimes do not use all). Returns whether it is
    gone."""
    try:
        if not group.pids():
            group.remove()
    except OSError:  # its processes are not quite dead
        return False
    return not group.exists()
