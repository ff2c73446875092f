"""What a sandbox could have changed on this machine. Others work here too: only what can be ours is looked at."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.engines.linux.runtimes.oci_runtimes import locate
from atoll.settings import Settings

_RUNTIMES = ("runc", "crun", "runsc", "bwrap")
_FIRST_ID_OF_SANDBOXES = 100_000
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "kmsg", "console", "shm", "pts", "fuse")
_SETTINGS = (
    "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/kernel/modprobe",
    "/proc/sys/kernel/domainname", "/proc/sys/kernel/sysrq", "/proc/sys/fs/suid_dumpable",
    "/sys/kernel/uevent_helper", "/proc/sys/net/ipv4/ip_unprivileged_port_start", "/proc/sys/fs/binfmt_misc/status",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostState:
    """Two of these are equal when nothing was changed and nothing left behind."""

    processes: tuple[str, ...]
    mounts: tuple[str, ...]
    namespaces: tuple[str, ...]
    """That a mount of ours keeps, wherever it is."""
    groups: tuple[str, ...]
    loops: tuple[str, ...]
    files: tuple[str, ...]
    """Of sandboxes, in the state directories."""
    descriptors: tuple[str, ...]
    """Of this process, that lead to sandboxes."""
    programs: tuple[str, ...]
    """With their digests: the runtimes, and our copies of the agent."""
    settings: tuple[str, ...]
    devices: tuple[tuple[str, int], ...]

    @classmethod
    def take(cls, settings: Settings, folder: Path) -> HostState:
        """`folder` holds the settings' directories and all else that the tests make."""
        groups = _groups(settings)
        return cls(
            processes=tuple(_processes(str(folder), groups)),
            mounts=tuple(line for line in _mounts() if str(folder) in line),
            namespaces=tuple(line for line in _mounts() if " nsfs " in line and "atoll" in line),
            groups=groups,
            loops=tuple(_loops(str(folder))),
            files=tuple(_files(settings)),
            descriptors=tuple(_descriptors(str(settings.run_dir))),
            programs=tuple(_programs(settings)),
            settings=tuple(f"{path}: {_text(path)}" for path in _SETTINGS),
            devices=devices(),
        )


def devices() -> tuple[tuple[str, int], ...]:
    """The modes of the host's own device files, which runtimes hold and show."""
    paths = [path for name in _DEVICES if (path := Path("/dev", name)).exists()]
    return tuple((str(path), path.stat().st_mode) for path in paths)


def put_right(wanted: tuple[tuple[str, int], ...]) -> None:
    """This machine goes on being used after a test has failed: no sandbox owns its devices."""
    for path, mode in wanted:
        info = os.stat(path)
        if info.st_uid >= _FIRST_ID_OF_SANDBOXES:
            os.chown(path, 0, 0)
        if info.st_mode != mode:
            os.chmod(path, stat.S_IMODE(mode))


def settled(settings: Settings, folder: Path) -> HostState:
    """The kernel lets go of a loop device a moment after its last user."""
    deadline = time.monotonic() + 15
    while (state := HostState.take(settings, folder)).loops and time.monotonic() < deadline:
        time.sleep(0.1)
    return state


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _mounts() -> list[str]:
    return Path("/proc/self/mounts").read_text().splitlines()


def _groups(settings: Settings) -> tuple[str, ...]:
    group = Group(Hierarchy.find(), f"/atoll-{settings.installation_id()[:12]}")
    return tuple(sorted(str(path) for path in group.directories() if path.exists()))


def _processes(folder: str, groups: tuple[str, ...]) -> list[str]:
    """Those in our control groups, or that have our directories in their arguments or in mounts of their own."""
    ours, names = os.readlink("/proc/self/ns/mnt"), {os.path.basename(path) for path in groups}
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            other_mounts = os.readlink(f"/proc/{pid}/ns/mnt") != ours
            if (
                folder in _text(f"/proc/{pid}/cmdline")
                or any(name in _text(f"/proc/{pid}/cgroup") for name in names)
                or (other_mounts and _shows(folder, _text(f"/proc/{pid}/mountinfo")))
            ):
                found.append(f"{pid} {_text(f'/proc/{pid}/comm').strip()}")
    return sorted(found)


def _shows(folder: str, table: str) -> bool:
    """Whether a directory of ours is mounted there. A mere copy of the host's own mounts is anybody's."""
    return any(folder in line.split()[3] for line in table.splitlines())


def _loops(folder: str) -> list[str]:
    paths = Path("/sys/block").glob("loop*/loop/backing_file")
    return sorted(f"{path.parts[3]} {text.strip()}" for path in paths if folder in (text := _text(path)))


def _files(settings: Settings) -> list[str]:
    shared = (".base", ".users")
    homes = [path for path in settings.data_dir.glob("process/*") if path.name not in shared]
    for pattern in ("oci/sandboxes/*", "oci/ids/*", "process/.users/*", "pool/*", "layers/*"):
        homes += settings.data_dir.glob(pattern)
    return sorted(str(path) for path in (*homes, *settings.run_dir.glob("*/*")))


def _descriptors(run_dir: str) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if run_dir in target or "memfd:operations" in target:
                found.append(target)
    return sorted(found)


def _programs(settings: Settings) -> list[str]:
    paths = [path for name in _RUNTIMES if (path := locate(name, settings.data_dir)) is not None]
    paths += (settings.data_dir / "oci" / "programs").glob("atoll-*")
    return sorted(f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths)
