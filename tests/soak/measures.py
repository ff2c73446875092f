"""What a server and its sandboxes hold of the machine, as numbers that must not grow."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.settings import Settings
from server.running import RunningServer

MIB = 1 << 20
SETTLE_S = 180.0

ALLOWED = {
    "server memory, MiB": 64,
    "server descriptors": 8,
    "server threads": 8,
    "journal and database, MiB": 64,
    "other files, MiB": 16,
    "pool, MiB": 32,
}
"""How much more there may be in the end than before. Of what is not named here: nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    before: int
    after: int

    @property
    def allowed(self) -> int:
        return ALLOWED.get(self.name, 0)

    @property
    def is_kept(self) -> bool:
        return self.after <= self.before + self.allowed


def take(server: RunningServer, tmp: Path) -> dict[str, int]:
    settings = Settings(server.folder / "data", server.folder / "run")
    process = Path(f"/proc/{server.process.pid}")
    pages = int((process / "statm").read_text().split()[1])
    return {
        "server memory, MiB": pages * resource.getpagesize() // MIB,
        "server descriptors": len(os.listdir(process / "fd")),
        "server threads": len(os.listdir(process / "task")),
        "processes": _processes(settings),
        "mounts": sum(str(server.folder) in line for line in Path("/proc/self/mounts").read_text().splitlines()),
        "control groups": _groups(settings),
        "ids": _entries(settings.data_dir / "oci/ids"),
        "sandboxes": _entries(settings.data_dir / "oci/sandboxes"),
        "layers and states": _entries(*settings.data_dir.glob("pool/*"), settings.data_dir / "layers"),
        "network links": len(os.listdir("/sys/class/net")),
        "loop devices": _loops(server.folder),
        "run directory": _entries(*settings.run_dir.glob("*")),
        "transfers": _entries(server.folder / "state/transfers"),
        "temporary files": _entries(tmp),
        "pool, MiB": _used(settings.data_dir / "pool") // MIB,
        "journal and database, MiB": _size(server.folder / "state") // MIB,
        "other files, MiB": _size(settings.data_dir) // MIB,
    }


def settle(look: Callable[[], dict[str, int]], before: dict[str, int] | None = None) -> dict[str, int]:
    """Look until it is as before, or stays the same for a while if there is no before. Gives up after `SETTLE_S`."""
    deadline, same, last = time.monotonic() + SETTLE_S, 0, look()
    while time.monotonic() < deadline:
        if before is not None and all(row.is_kept for row in compare(before, last)):
            break
        time.sleep(1)
        now = look()
        same = same + 1 if now == last else 0
        last = now
        if before is None and same >= 5:
            break
    return last


def compare(before: dict[str, int], after: dict[str, int]) -> list[Row]:
    return [Row(name, before[name], after[name]) for name in before]


def table(rows: list[Row]) -> str:
    lines = [f"{'':28}{'before':>10}{'after':>10}{'allowed':>10}"]
    for row in rows:
        verdict = "" if row.is_kept else "   GREW"
        lines.append(f"{row.name:28}{row.before:>10}{row.after:>10}{'+' + str(row.allowed):>10}{verdict}")
    return "\n".join(lines)


def _entries(*directories: Path) -> int:
    """Names that are no lock, draft or file of ours alone."""
    found = 0
    for directory in directories:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += sum(not name.startswith(".") for name in os.listdir(directory))
    return found


def _processes(settings: Settings) -> int:
    """In groups of sandboxes, or with our directories in their arguments: the server, its gateway, sandboxes."""
    group, marker, found = f"/atoll-{settings.installation_id()[:12]}", os.fsencode(settings.data_dir.parent), 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            inside = group in Path(f"/proc/{pid}/cgroup").read_text()
            found += inside or marker in Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


def _loops(folder: Path) -> int:
    found = 0
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found += str(folder) in path.read_text()
    return found


def _groups(settings: Settings) -> int:
    around = Group(Hierarchy.find(), f"/atoll-{settings.installation_id()[:12]}")
    return sum(1 for directory in around.directories() for path in directory.glob("**/") if path.is_dir())


def _used(mount: Path) -> int:
    if not os.path.ismount(mount):
        return 0
    found = os.statvfs(mount)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _size(top: Path) -> int:
    """Of all files, but for those of the pool, which are mounted or in its image."""
    total = 0
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not os.path.ismount(f"{folder}/{name}")]
        for name in files:
            with contextlib.suppress(OSError):
                if not name.startswith("pool."):
                    total += os.lstat(f"{folder}/{name}").st_blocks * 512
    return total
