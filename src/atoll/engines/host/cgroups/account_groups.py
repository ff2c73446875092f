"""The control groups above those of sandboxes: one for the installation, and in it one for each account.

The path of a sandbox's group is `/atoll-<installation>/@<account>/<sandbox>`. The ceilings of the upper groups bound
what all sandboxes of an account, and all sandboxes of the installation, use together. When a ceiling is reached, the
kernel ends or refuses something *inside* that group, so neither another account nor the host suffers. CPU time is
shared by weight, first among accounts and then within each, so a hundred busy sandboxes of one user get no more than
the single one of another.

A group is created with its first sandbox, and removed by any later cleanup. Both may happen at once: a removal fails
while something is in the group, and a creation that finds the parent gone creates it again.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from atoll.engines.host.cgroups.balance import Balance
from atoll.engines.host.cgroups.group_limits import VIRTUAL_KERNEL_THREADS, CgroupLimits
from atoll.engines.host.cgroups.groups import Group, hide_names
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.resources import Ceilings, Resources

ACCOUNT = "@"
"""The first character of the names of accounts' groups; no sandbox's name begins with it."""
_NOBODYS = "own"
"""The account of specs that name none, as when the SDK is used without a server."""
_VIRTUAL_KERNEL_STANDS = 64
"""Threads of a virtual kernel that serves a few processes."""
PREFIXES = ("", "libpod-")
"""The prefixes of container ids in the names of Docker engines' groups. The id of a sandbox is shorter than a
container's."""
_CONTAINER = re.compile(rf"({'|'.join(PREFIXES)})[0-9a-f]{{64}}")
_TRIES = 100


class AccountGroups:
    def __init__(self, hierarchy: Hierarchy, top: str, resources: Resources) -> None:
        self._hierarchy = hierarchy
        self._top = top
        self._resources = resources
        self._balance = Balance(hierarchy, resources.account.cpu_weight)
        self._made: set[str] = set()
        self._counted: dict[str, int] = {}
        """The number of sandboxes for which an account's ceiling of processes was last computed."""

    def path(self, account: str) -> str:
        return f"{self._top}/{ACCOUNT}{account or _NOBODYS}"

    def make(self, account: str, sandbox_id: str, limits: CgroupLimits, *, virtual: bool = False) -> Group:
        """Create a sandbox's own group and those above it. A `virtual` kernel has many threads. Raises OSError if a
        limit of the sandbox cannot be set."""
        parent = self.path(account)
        group = Group(self._hierarchy, f"{parent}/{sandbox_id}")
        for tries_left in range(_TRIES, -1, -1):
            if parent not in self._made:
                self._make_above(account)
            try:
                group.create(limits, parents=False)
                break
            except FileNotFoundError:  # a cleanup has removed the parent since
                self._made.discard(parent)
                if not tries_left:
                    raise
        self._raise_ceilings(account, virtual=int(virtual))
        return group

    def ensure(self, account: str) -> str:
        """Create an account's group if it is missing, for sandboxes that another program creates. Returns its path."""
        self._make_above(account)
        self._raise_ceilings(account)
        return self.path(account)

    def _make_above(self, account: str) -> None:
        for path, ceilings in ((self._top, self._resources.installation), (self.path(account), self._own(account))):
            group = Group(self._hierarchy, path)
            with suppress(FileNotFoundError):  # already removed again, which the caller notices
                group.create(CgroupLimits(), parents=False)
                for directory in group.directories():
                    hide_names(directory)
                for limits in self._each(ceilings):
                    # A ceiling cannot be lowered below the current use: then the previous one stays in force.
                    with suppress(OSError):
                        group.limit(limits)
        self._made.add(self.path(account))
        self._counted.pop(self.path(account), None)
        self._balance.forget(self.path(account))

    def _own(self, account: str) -> Ceilings:
        """Return the ceilings of an account. Sandboxes without an account may use all that the installation has."""
        return self._resources.account if account else Ceilings(cpu_weight=self._resources.account.cpu_weight)

    def _raise_ceilings(self, account: str, *, virtual: int = 0) -> None:
        """Raise the ceilings of processes by those that idle sandboxes have, which ceilings are not meant to limit."""
        path = self.path(account)
        count = _count(Group(self._hierarchy, path))
        if "pids" not in self._hierarchy.controllers or (count <= self._counted.get(path, 0) and not virtual):
            return
        self._counted[path] = count + max(count // 4, 16)  # with a reserve, so that not every creation has to do this
        top = Group(self._hierarchy, self._top).directory("pids")
        accounts = [f"{self._top}/{name}" for name in _names(top)] if top is not None else []
        for each, ceilings, below in (
            (self._top, self._resources.installation, accounts),
            (path, self._own(account), [path]),
        ):
            if ceilings.pids is not None and ceilings.pids_for_each:
                standing = sum(self._standing(account, ceilings.pids_for_each) for account in below)
                standing += _VIRTUAL_KERNEL_STANDS * virtual  # its OCI runtime has not set its limit yet
                with suppress(OSError):  # already removed again
                    Group(self._hierarchy, each).limit(CgroupLimits(pids=ceilings.pids + standing))

    def _standing(self, path: str, for_each: int) -> int:
        """Return how many processes the sandboxes of an account have even when idle."""
        group = Group(self._hierarchy, path)
        directory = group.directory("pids")
        virtual = sum(_is_virtual(directory / name) for name in _names(directory)) if directory is not None else 0
        return for_each * max(_count(group), self._counted.get(path, 0)) + _VIRTUAL_KERNEL_STANDS * virtual

    def _each(self, ceilings: Ceilings) -> list[CgroupLimits]:
        there = self._hierarchy.controllers
        found = [
            CgroupLimits(memory_bytes=ceilings.memory_bytes) if "memory" in there else None,
            CgroupLimits(pids=ceilings.pids) if "pids" in there else None,
            CgroupLimits(cpu_weight=ceilings.cpu_weight) if "cpu" in there else None,
        ]
        return [limits for limits in found if limits is not None]

    def balance(self) -> None:
        """Set the accounts' weights by what they have used lately. To be called from one thread at a time."""
        directory = Group(self._hierarchy, self._top).directory("cpu")
        names = [name for name in _names(directory) if name.startswith(ACCOUNT)] if directory is not None else []
        self._balance.look([f"{self._top}/{name}" for name in names])

    def find(self, sandbox_id: str) -> str | None:
        """Return the path of a sandbox's group when only its id is known; None if there is none."""
        for directory in Group(self._hierarchy, self._top).directories():
            for name in _names(directory):
                if name.startswith(ACCOUNT) and (directory / name / sandbox_id).is_dir():
                    return f"{self._top}/{name}/{sandbox_id}"
        return None

    def names(self) -> set[str]:
        """Return the names of all sandboxes' groups except containers', also of those directly in the installation's
        group."""
        found: set[str] = set()
        for directory in Group(self._hierarchy, self._top).directories():
            for name in _names(directory):
                found |= set(_names(directory / name)) if name.startswith(ACCOUNT) else {name}
        return {name for name in found if not _CONTAINER.fullmatch(name)}

    def containers(self) -> list[Group]:
        """Return the groups of all containers, including empty ones."""
        paths: set[str] = set()
        for directory in Group(self._hierarchy, self._top).directories():
            for account in _names(directory):
                if account.startswith(ACCOUNT):
                    inside = filter(_CONTAINER.fullmatch, _names(directory / account))
                    paths |= {f"{self._top}/{account}/{name}" for name in inside}
        return [Group(self._hierarchy, path) for path in sorted(paths)]

    def remove_empty(self) -> None:
        """Remove the groups of accounts without sandboxes, and the installation's own group if it is then empty."""
        for directory in Group(self._hierarchy, self._top).directories():
            for name in _names(directory):
                if name.startswith(ACCOUNT):
                    with suppress(OSError):
                        (directory / name).rmdir()
            with suppress(OSError):
                directory.rmdir()

    def enforced(self) -> tuple[str, ...]:
        """Return what the ceilings of accounts and of the installation can limit here."""
        if not self._hierarchy.writable():
            return ()
        return tuple(name for name in ("memory", "pids", "cpu") if name in self._hierarchy.controllers)


def _count(group: Group) -> int:
    """Return the number of groups in this one. Each adds a link to the directory."""
    directory = group.directory("pids")
    try:
        return max(0, os.stat(directory).st_nlink - 2) if directory is not None else 0
    except OSError:
        return 0


def _is_virtual(directory: Path) -> bool:
    """Return whether this is the group of a sandbox with a kernel of its own, which has many threads."""
    try:
        return (directory / "pids.max").read_text().strip() == str(VIRTUAL_KERNEL_THREADS)
    except OSError:
        return False


def _names(directory: os.PathLike[str]) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except OSError:
        return []
