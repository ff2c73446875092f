"""Where control groups are mounted: v1, hybrid, v2, and the part of v2 that is delegated to an ordinary user."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Mode = Literal["v1", "hybrid", "v2", "none"]
CONTROLLERS = ("memory", "pids", "cpu", "cpuacct", "freezer", "devices")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where the control groups of this machine are mounted."""

    mode: Mode
    controllers: dict[str, Path] = field(default_factory=dict)
    """On v1 the mount of each controller, on v2 the same mount for all."""
    others: tuple[Path, ...] = ()
    """Mounts that Atoll does not need, but where OCI runtimes create a directory of the same name."""

    @classmethod
    def find(cls, mountinfo: Path = Path("/proc/self/mountinfo")) -> Hierarchy:
        return parse_hierarchy(mountinfo.read_text(errors="replace"))

    def writable(self) -> bool:
        return bool(self.controllers) and all(os.access(path, os.W_OK) for path in set(self.controllers.values()))


def parse_hierarchy(mountinfo: str) -> Hierarchy:
    v1: dict[str, Path] = {}
    others: list[Path] = []
    unified: Path | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        if len(words) < 5 or len(kind) < 3 or words[3] != "/":
            continue
        path = Path(words[4].encode().decode("unicode_escape"))
        if kind[0] == "cgroup2":
            unified = path
        elif kind[0] == "cgroup":
            found = [name for name in kind[2].split(",") if name in CONTROLLERS]
            v1.update(dict.fromkeys(found, path))
            if not found:
                others.append(path)
    if v1:
        return Hierarchy("hybrid" if unified else "v1", v1, (*others, *([unified] if unified else [])))
    if unified is None:
        return Hierarchy("none")
    try:
        names = (unified / "cgroup.controllers").read_text().split()
    except OSError:
        names = []
    # On v2 freezing and device rules are not controllers; they are always there.
    return Hierarchy("v2", {name: unified for name in (*names, "freezer", "devices", "cpuacct") if name in CONTROLLERS})


def delegated(mountinfo: str, own: str) -> Hierarchy | None:
    """Return the part of a v2 hierarchy that is delegated to this user, as if it were the whole; None if there is none.

    `own` is the content of /proc/self/cgroup. Only groups around this process can be used, since a process cannot be
    moved out of another user's part. Limits are available where controllers are delegated; elsewhere a group can still
    be frozen and killed.
    """
    tops = [line.split()[4] for line in mountinfo.splitlines() if " - cgroup2 " in line and line.split()[3] == "/"]
    paths = [line.removeprefix("0::/") for line in own.splitlines() if line.startswith("0::/")]
    if not tops or not paths:
        return None
    here = Path(tops[0]) / paths[0]
    ours = [each for each in (here, *here.parents) if each.is_relative_to(tops[0]) and _may_use(each)]
    for directory in ours:
        names = [name for name in (directory / "cgroup.subtree_control").read_text().split() if name in CONTROLLERS]
        if "memory" in names or "pids" in names:
            return Hierarchy("v2", dict.fromkeys((*names, "freezer", "cpuacct"), directory))
    return Hierarchy("v2", dict.fromkeys(("freezer", "cpuacct"), ours[0])) if ours else None


def _may_use(directory: Path) -> bool:
    files = (directory, directory / "cgroup.procs", directory / "cgroup.subtree_control")
    return all(os.access(path, os.W_OK) for path in files)
