"""Control groups of sandboxes: limits, freezing, killing, counting, on v1, hybrid and v2 hosts.

Theory of operation. A sandbox's group has one path, `/<slice>/@<account>/<sandbox id>` (see `accounts.py`), in every
hierarchy that matters. On v1
(and on hybrid hosts, where the controllers are on v1) that is a directory in each controller's mount; on v2 it is
one directory. Whoever starts the first process puts it there; all its descendants follow, and nothing inside sees a
cgroup file system to leave by.

Killing must win against a process that forks faster than we read. On v2 the kernel does it (`cgroup.kill`). On v1:
no new process is allowed (`pids.max` 0), the group is frozen, all are killed, and it is thawed so that they can die.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from atoll.engines.contract import LimitEvents
from atoll.engines.host.cgroups.group_limits import CgroupLimits
from atoll.errors import EngineError
from atoll.model import Stats
from atoll.waiting import Deadline

Mode = Literal["v1", "hybrid", "v2", "none"]
CONTROLLERS = ("memory", "pids", "cpu", "cpuacct", "freezer", "devices")
_RETRY_S = 0.002
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where the control groups of this machine are mounted."""

    mode: Mode
    controllers: dict[str, Path] = field(default_factory=dict)
    """v1: each controller's mount. v2: all the same."""
    others: tuple[Path, ...] = ()
    """Mounts in which runtimes make a directory of the same name too, although we need none."""

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
    """What of a v2 hierarchy was given to this user, as if it were the whole. None: nothing.

    `own` is /proc/self/cgroup: only what lies around our own process may be used, since nobody may move a process out
    of somebody else's part. Where controllers are handed down there are limits; elsewhere a group can still be frozen
    and killed."""
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


@dataclass(frozen=True, slots=True)
class Group:
    """One sandbox's control group. Methods on a group that is gone do nothing and see nothing."""

    hierarchy: Hierarchy
    path: str

    def directory(self, controller: str) -> Path | None:
        mount = self.hierarchy.controllers.get(controller)
        return mount / self.path.lstrip("/") if mount else None

    def directories(self) -> list[Path]:
        mounts = dict.fromkeys((*self.hierarchy.controllers.values(), *self.hierarchy.others))
        return [mount / self.path.lstrip("/") for mount in mounts]

    # --- making ----------------------------------------------------------------------------------------------------

    def create(self, limits: CgroupLimits, *, parents: bool = True) -> None:
        """Make it with its limits. Raises OSError if one cannot be set; what was made is for `remove`. Without
        `parents` FileNotFoundError says that the group above is not there."""
        for mount in dict.fromkeys(self.hierarchy.controllers.values()):
            path = Path(f"{mount}{self.path}")
            if parents:
                _make(path)
            else:
                with suppress(FileExistsError):
                    path.mkdir()
        self.limit(limits)

    def limit(self, limits: CgroupLimits) -> None:
        """From now on these hold. Raises OSError, also for a limit below what is in use."""
        if self.hierarchy.mode != "v2" and limits.memory_bytes is not None:
            self._open_swap(limits.memory_bytes)
        for controller, name, value in settings(self.hierarchy.mode, limits):
            found = self.directory(controller)
            if found is None:
                raise OSError(errno.ENOENT, "no such controller", controller)
            # Swap accounting may be turned off on v1: then there is no such file, and memory alone is the limit.
            if name == "memory.memsw.limit_in_bytes" and not (found / name).exists():
                continue
            if self.hierarchy.mode == "v2" and not (found / name).exists():
                self._hand_down()
            (found / name).write_text(value)

    def _open_swap(self, memory_bytes: int) -> None:
        """On v1 memory alone is never limited above memory with swap, so to raise both this one comes first."""
        name = "memory.memsw.limit_in_bytes"
        if (_number(self._read("memory", name)) or memory_bytes) < memory_bytes:
            self._write("memory", name, str(memory_bytes))

    def _hand_down(self) -> None:
        """On v2 a group has the controllers that each group above it hands down. One that does not is found out when a
        limit is set."""
        names = [name for name in ("cpu", "memory", "pids") if name in self.hierarchy.controllers]
        top = self.hierarchy.controllers[names[0]]
        above = Path(self.path).relative_to("/").parents
        for part in reversed(above):
            with suppress(OSError):
                (top / part / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))

    def remove(self) -> None:
        """Remove the empty group. Raises OSError while something is in it."""
        for directory in self.directories():
            for child in sorted(_below(directory), key=lambda path: -len(path.parts)):
                with suppress(FileNotFoundError):
                    child.rmdir()

    async def erase(self, deadline: Deadline) -> None:
        """Kill what is in it and remove it. Again and again: a runtime may put one more into it at the last moment."""
        while True:
            await self.kill(deadline)
            try:
                return self.remove()
            except OSError as error:
                if error.errno != errno.EBUSY or not deadline.left():
                    raise EngineError(f"the control group '{self.path}' cannot be removed: {error}") from error
            await asyncio.sleep(_RETRY_S)

    # --- seeing ----------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return any(directory.is_dir() for directory in self.directories())

    def pids(self) -> set[int]:
        found: set[int] = set()
        for directory in self.directories():
            for child in _below(directory):
                with suppress(OSError):
                    # 0 stands for a process that we cannot see, and to kill means ourselves.
                    found.update(int(line) for line in (child / "cgroup.procs").read_text().split() if line != "0")
        return found

    def holds(self, pid: int) -> bool:
        """Whether this process is in it, or below it."""
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError:
            return False
        paths = (line.split(":", 2)[-1] for line in lines)
        return any(path == self.path or path.startswith(f"{self.path}/") for path in paths)

    def stats(self) -> Stats:
        memory = "memory.current" if self.hierarchy.mode == "v2" else "memory.usage_in_bytes"
        return Stats(
            memory_bytes=_number(self._read("memory", memory)),
            cpu_s=self.cpu_s(),
            pids=_number(self._read("pids", "pids.current")),
        )

    def cpu_s(self) -> float | None:
        """Seconds of processor time that it has used since it was made."""
        if self.hierarchy.mode == "v2":
            microseconds = _table(self._read("cpu", "cpu.stat")).get("usage_usec")
            return None if microseconds is None else microseconds / 1e6
        nanoseconds = _number(self._read("cpuacct", "cpuacct.usage"))
        return None if nanoseconds is None else nanoseconds / 1e9

    def events(self) -> LimitEvents:
        name = "memory.events" if self.hierarchy.mode == "v2" else "memory.oom_control"
        return LimitEvents(
            oom_kills=_table(self._read("memory", name)).get("oom_kill", 0),
            pids_refused=_table(self._read("pids", "pids.events")).get("max", 0),
        )

    def is_frozen(self) -> bool:
        if self.hierarchy.mode == "v2":
            return self._read("freezer", "cgroup.freeze").strip() == "1"
        return self._read("freezer", "freezer.state").strip() != "THAWED" if self.directory("freezer") else False

    # --- acting ----------------------------------------------------------------------------------------------------

    async def freeze(self, deadline: Deadline) -> None:
        """Stop all its processes. Raises EngineError if that takes too long; then they go on."""
        self._set_frozen(True)
        while not self._all_stopped():
            if not deadline.left():
                self._set_frozen(False)
                raise EngineError("the sandbox's processes could not be stopped in time")
            await asyncio.sleep(_RETRY_S)

    def thaw(self) -> None:
        with suppress(FileNotFoundError):
            self._set_frozen(False)

    async def kill(self, deadline: Deadline) -> None:
        """Kill all that is in it. When it returns, nothing is. Raises EngineError when time is up."""
        while self.pids():
            self._kill_once()
            if not self.pids():
                return
            if not deadline.left():
                raise EngineError(f"processes of the control group '{self.path}' do not end")
            await asyncio.sleep(_RETRY_S)

    def _kill_once(self) -> None:
        if self.hierarchy.mode == "v2":
            with suppress(FileNotFoundError):
                self._write("freezer", "cgroup.kill", "1")
                return
        with suppress(OSError):
            self._write("pids", "pids.max", "0")
        with suppress(OSError):
            self._set_frozen(True)
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.thaw()

    def _set_frozen(self, frozen: bool) -> None:
        if self.hierarchy.mode == "v2":
            self._write("freezer", "cgroup.freeze", "1" if frozen else "0")
        else:
            self._write("freezer", "freezer.state", "FROZEN" if frozen else "THAWED")

    def _all_stopped(self) -> bool:
        if self.hierarchy.mode == "v2":
            return _table(self._read("freezer", "cgroup.events")).get("frozen") == 1
        return self._read("freezer", "freezer.state").strip() == "FROZEN"

    def _read(self, controller: str, name: str) -> str:
        directory = self.directory(controller)
        if directory is None:
            return ""
        try:
            return (directory / name).read_text()
        except OSError:
            return ""

    def _write(self, controller: str, name: str, value: str) -> None:
        directory = self.directory(controller)
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, "no such controller", controller)
        fd = os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)


def _make(directory: Path) -> None:
    """With all groups above it. One of these may be removed by somebody who sees it empty before we are in it."""
    for tries_left in range(_TRIES - 1, -1, -1):
        try:
            os.mkdir(directory)
        except FileExistsError:
            return
        except FileNotFoundError:
            if not tries_left:
                raise
            with suppress(FileNotFoundError):
                directory.parent.mkdir(parents=True, exist_ok=True)
                hide_names(directory.parent)
        else:
            return


def hide_names(directory: Path) -> None:
    """The names in it are those of sandboxes and accounts, which others must not see."""
    with suppress(OSError):
        directory.chmod(0o711)


def settings(mode: Mode, limits: CgroupLimits) -> list[tuple[str, str, str]]:
    """Controller, file, value: in the order they must be written (on v1 memory before memory with swap)."""
    found: list[tuple[str, str, str]] = []
    if mode == "v2":
        if limits.memory_bytes is not None:
            found += [("memory", "memory.max", str(limits.memory_bytes)), ("memory", "memory.swap.max", "0")]
        if limits.cpu_quota_us is not None:
            found.append(("cpu", "cpu.max", f"{limits.cpu_quota_us} {limits.cpu_period_us}"))
        if limits.cpu_weight is not None:
            found.append(("cpu", "cpu.weight", str(limits.cpu_weight)))
    else:
        if limits.memory_bytes is not None:
            found += [
                ("memory", "memory.limit_in_bytes", str(limits.memory_bytes)),
                ("memory", "memory.memsw.limit_in_bytes", str(limits.memory_bytes)),
            ]
        if limits.cpu_quota_us is not None:
            found += [
                ("cpu", "cpu.cfs_period_us", str(limits.cpu_period_us)),
                ("cpu", "cpu.cfs_quota_us", str(limits.cpu_quota_us)),
            ]
        if limits.cpu_weight is not None:
            found.append(("cpu", "cpu.shares", str(max(2, limits.cpu_weight * 1024 // 100))))
    if limits.pids is not None:
        found.append(("pids", "pids.max", str(limits.pids)))
    return found


def _below(directory: Path) -> list[Path]:
    """The directory and all groups below it."""
    if not directory.is_dir():
        return []
    return [Path(current) for current, _, _ in os.walk(directory)]


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _table(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
