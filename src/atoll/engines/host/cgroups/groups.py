"""Control groups of sandboxes: limits, freezing, killing and counting, on v1, hybrid and v2 hosts.

A sandbox's group has one path, `/<slice>/@<account>/<sandbox id>` (see `account_groups.py`), in every hierarchy that
matters. On v1 (and on hybrid hosts, where the controllers are on v1) that is a directory in each controller's mount; on
v2 it is one directory. The launcher puts the first process into it. All descendants inherit it, and nothing inside sees
a cgroup file system to leave it by.

Killing must win against a process that forks faster than its children can be listed. On v2 the kernel does it
(`cgroup.kill`). On v1 no new process is allowed (`pids.max` 0), the group is frozen, all processes are killed, and it
is thawed so that they can die.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.host.cgroups.group_limits import MEMORY_AND_SWAP, CgroupLimits, changes, settings
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.engines.limit_events import LimitEvents
from atoll.errors import EngineError
from atoll.model import Stats
from atoll.waiting import Deadline

_RETRY_S = 0.002
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one sandbox. Methods on a group that is gone do nothing and see nothing."""

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
        """Create the group with its limits. Raises OSError if one cannot be set; `remove` then removes what was
        created.

        Without `parents`, FileNotFoundError means that the group above does not exist.
        """
        for mount in dict.fromkeys(self.hierarchy.controllers.values()):
            path = Path(f"{mount}{self.path}")
            if parents:
                _make(path)
            else:
                with suppress(FileExistsError):
                    path.mkdir()
        self.limit(limits)

    def limit(self, limits: CgroupLimits) -> None:
        """Set limits. Raises OSError, also for a limit below the current use."""
        if self.hierarchy.mode != "v2" and limits.memory_bytes is not None:
            self._open_swap(limits.memory_bytes)
        self._put(settings(self.hierarchy.mode, limits))

    def change(self, before: CgroupLimits, after: CgroupLimits) -> None:
        """Replace the limits `before`. Raises OSError, on v1 also for memory below the current use; some may have been
        replaced then, and the opposite change undoes that."""
        self._put(changes(self.hierarchy.mode, before, after))

    def _put(self, values: Sequence[tuple[str, str, str]]) -> None:
        for controller, name, value in values:
            found = self.directory(controller)
            if found is None:
                raise OSError(errno.ENOENT, "no such controller", controller)
            # Swap accounting may be disabled on v1. Then this file does not exist, and the memory limit applies alone.
            if name == MEMORY_AND_SWAP and not (found / name).exists():
                continue
            if self.hierarchy.mode == "v2" and not (found / name).exists():
                self._hand_down()
            (found / name).write_text(value)

    def _open_swap(self, memory_bytes: int) -> None:
        """Raise the limit of memory and swap first: on v1 it can never be lower than that of memory."""
        if (_number(self._read("memory", MEMORY_AND_SWAP)) or memory_bytes) < memory_bytes:
            self._write("memory", MEMORY_AND_SWAP, str(memory_bytes))

    def _hand_down(self) -> None:
        """Enable the controllers in each group above, as v2 requires. The need for it is discovered when a limit is
        set."""
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
        """Kill what is in the group and remove it. Repeats, as an OCI runtime may add another process at the last
        moment."""
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
                    # 0 stands for a process that is not visible here, and kill(0) would hit this process.
                    found.update(int(line) for line in (child / "cgroup.procs").read_text().split() if line != "0")
        return found

    def holds(self, pid: int) -> bool:
        """Return whether this process is in the group or below it."""
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

    def memory_in_use(self) -> int | None:
        """Return the memory that the kernel cannot take back: what is in use without copies of files."""
        used = self.stats().memory_bytes
        if used is None:
            return None
        table = _table(self._read("memory", "memory.stat"))
        if self.hierarchy.mode == "v2":
            copies = table.get("file", 0) - table.get("shmem", 0) + table.get("slab_reclaimable", 0)
        else:
            copies = table.get("total_cache", 0) - table.get("total_shmem", 0)
        return max(0, used - max(0, copies))

    def cpu_s(self) -> float | None:
        """Return the CPU time in seconds that the group has used since it was created."""
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
        """Freeze all processes. Raises EngineError if that takes too long; then they continue."""
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
        """Kill all processes in the group and wait until it is empty. Raises EngineError at the deadline."""
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
    """Create a directory and all groups above it. A cleanup may remove an empty group before the next one is in it."""
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
    """Make a group's directory unreadable: it lists sandboxes and accounts, which other users must not see."""
    with suppress(OSError):
        directory.chmod(0o711)


def _below(directory: Path) -> list[Path]:
    """Return the directory and all groups below it."""
    if not directory.is_dir():
        return []
    return [Path(current) for current, _, _ in os.walk(directory)]


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _table(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
