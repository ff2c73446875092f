"""The features of this machine that matter for sandboxes. This module only reads; it changes nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_TOOLS = {
    "bwrap": "--version",
    "runc": "--version",
    "crun": "--version",
    "runsc": "--version",
    "docker": "--version",
    "criu": "--version",
    "mmdebstrap": "--version",
    "btrfs": "--version",
    "nft": "--version",
}
_TOOL_S = 5
_SHARED_PROGRAMS = "/var/lib/atoll/programs"
"""The default destination of `scripts/get-runsc`; installations with other data directories use it too."""
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_VERSION = 1


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    path: str | None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    kernel: str
    architecture: str
    distribution: str
    cpus: int
    memory_bytes: int
    is_root: bool
    cgroups: Literal["v2", "hybrid", "v1", "none"]
    user_namespaces: bool
    overlayfs: bool
    btrfs: bool
    seccomp: bool
    landlock_abi: int
    """0 if the kernel has no Landlock."""
    kvm: bool
    tools: tuple[Tool, ...]


def locate(name: str, data_dir: Path) -> Path | None:
    """Find a program: named by `ATOLL_RUNC`, `ATOLL_RUNSC` and so on, else in Atoll's own directories, else in the
    PATH."""
    given = os.environ.get(f"ATOLL_{name.upper().replace('-', '_')}")
    path = f"{data_dir / 'programs'}:{_SHARED_PROGRAMS}:{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin"
    found = given or shutil.which(name, path=path)
    return Path(found).absolute() if found and os.access(found, os.X_OK) else None


def look(data_dir: Path) -> Machine:
    """Find out about the machine. `data_dir` may contain programs, in addition to the usual places."""
    filesystems = _read("/proc/filesystems").split()
    return Machine(
        kernel=platform.release(),
        architecture=platform.machine(),
        distribution=platform.freedesktop_os_release().get("PRETTY_NAME", "Linux") if _has_os_release() else "Linux",
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        is_root=os.geteuid() == 0,
        cgroups=cgroup_mode(_read("/proc/self/mountinfo")),
        user_namespaces=_user_namespaces(),
        overlayfs="overlay" in filesystems,
        btrfs="btrfs" in filesystems,
        seccomp="Seccomp:" in _read("/proc/self/status"),
        landlock_abi=_landlock_abi(),
        kvm=os.access("/dev/kvm", os.R_OK | os.W_OK),
        tools=tuple(_tool(name, option, data_dir) for name, option in _TOOLS.items()),
    )


def cgroup_mode(mountinfo: str) -> Literal["v2", "hybrid", "v1", "none"]:
    kinds = {line.partition(" - ")[2].split(" ")[0] for line in mountinfo.splitlines()}
    if "cgroup" in kinds:
        return "hybrid" if "cgroup2" in kinds else "v1"
    return "v2" if "cgroup2" in kinds else "none"


def _user_namespaces() -> bool:
    if not os.path.exists("/proc/self/ns/user") or _read("/proc/sys/user/max_user_namespaces").strip() == "0":
        return False
    return os.geteuid() == 0 or _read("/proc/sys/kernel/unprivileged_userns_clone").strip() != "0"


def _landlock_abi() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)))


def _tool(name: str, option: str, data_dir: Path) -> Tool:
    found = locate(name, data_dir)
    if found is None:
        return Tool(name, None)
    path = str(found)
    try:
        said = subprocess.run([path, option], capture_output=True, text=True, timeout=_TOOL_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return Tool(name, path)
    match = re.search(r"\d+(?:\.\d+)+\S*", said.stdout + said.stderr)
    return Tool(name, path, match[0].rstrip(",") if match else None)


def _has_os_release() -> bool:
    return any(os.path.exists(path) for path in ("/etc/os-release", "/usr/lib/os-release"))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
