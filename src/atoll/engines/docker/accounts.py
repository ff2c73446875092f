"""The control groups of accounts for containers, as far as they are available.

A Docker engine puts a container below any control group that it is told, if it makes them itself (its driver is
`cgroupfs`) and is on this machine. With the driver `systemd` groups are units of its own, and on another machine they
are out of reach: then only the limits of each container hold.
"""

from __future__ import annotations

import functools
import os

from atoll.engines.docker.endpoint import Endpoint
from atoll.engines.docker.facts import Facts
from atoll.engines.linux.accounts import AccountGroups
from atoll.engines.linux.cgroups import Hierarchy
from atoll.settings import Settings


class ContainerAccounts:
    def __init__(self, settings: Settings, endpoint: Endpoint) -> None:
        self._settings = settings
        self._local = endpoint.may_be_local and os.geteuid() == 0
        self._used = False

    def enforced(self, facts: Facts) -> tuple[str, ...]:
        return self._groups.enforced() if self._local and facts.cgroup_driver == "cgroupfs" else ()

    def parent(self, facts: Facts, account: str) -> str:
        """The group to make a container in; empty: the engine's own choice."""
        if not self.enforced(facts):
            return ""
        self._used = True
        return self._groups.ensure(account)

    def settle(self, account: str) -> None:
        """A container runs in it. If somebody tidied up while it was made, the engine made the group anew, without its
        ceilings."""
        if self._used:
            self._groups.ensure(account)

    def balance(self) -> None:
        if self._used:
            self._groups.balance()

    def remove_empty(self) -> None:
        """Also those that another process made containers in."""
        if self._local and (self._settings.data_dir / "installation-id").exists():
            self._groups.remove_empty()

    @functools.cached_property
    def _groups(self) -> AccountGroups:
        top = f"/atoll-{self._settings.installation_id()[:12]}"
        return AccountGroups(Hierarchy.find(), top, self._settings.resources)
