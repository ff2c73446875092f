"""Sandboxes of an ordinary user of the host, without root.

Theory of operation. Atoll makes one user namespace for the user, who has all Linux capabilities in it. All launchers
work inside that namespace, as root does on the host, and each sandbox has its own user namespace below it. So, as with
the host's root, the network, IPC and UTS namespaces of a sandbox belong to a user namespace over which the sandbox's
own root has no power.

The ids in the namespace: id 1 is the user. If the machine gave the user a range of ids (`/etc/subuid`, `/etc/subgid`),
and `newuidmap` and `newgidmap` are installed to map it, ids 2 to 65,536 are taken from that range; otherwise there is
only id 1. Id 0 is not mapped, because it would own the settings of the namespaces in `/proc/sys`; so no sandbox's root
can have it. A sandbox's files belong to these ids, so they have to be removed from within the namespace.

The namespace is held by a descriptor. It vanishes with the last process that has this descriptor or lives in it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.linux.launcher_protocol import USER_NAMESPACE_FD, Early, encode
from atoll.engines.linux.native import launcher_process
from atoll.engines.linux.native.launcher_process import LauncherProcess
from atoll.engines.linux.plan.sandbox_plan import RANGE, IdRange
from atoll.errors import EngineError, EngineUnavailableError
from atoll.model import Capability
from atoll.storage import PlainLayers

_CLONE_NEWUSER = 0x1000_0000
_USER = 1
_ALONE = 1000
"""The id of the only user inside a sandbox that has a single id: `user` of the image `host`."""
_HELPER_S = 20.0


_NO_GROUPS = "no control groups with that limit are delegated to this user"
MISSING = {
    Capability.MEMORY: _NO_GROUPS,
    Capability.CPUS: _NO_GROUPS,
    Capability.PIDS: _NO_GROUPS,
    Capability.PAUSE: _NO_GROUPS,
    Capability.DISK: "only root can make a file system with quotas",
    Capability.INODES: "no file system that sandboxes use limits them",
}
"""Why an ordinary user's sandboxes lack these capabilities."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """The first user id and the first group id of the ranges that the machine gave to the user."""

    users: int
    groups: int


def find_ranges(uid: int, etc: Path = Path("/etc")) -> Ranges | None:
    """Return the ranges of a user, or None if there are none or the programs to map them are missing."""
    if shutil.which("newuidmap") is None or shutil.which("newgidmap") is None:
        return None
    users, groups = _range(etc / "subuid", uid), _range(etc / "subgid", uid)
    return Ranges(users, groups) if users is not None and groups is not None else None


def _range(path: Path, uid: int) -> int | None:
    names = {str(uid)}
    with suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        match line.split(":"):
            case [name, first, count] if name in names and first.isdecimal() and count.isdecimal():
                if int(count) >= RANGE - 1:
                    return int(first)
    return None


class UserNamespace:
    """The user namespace of an ordinary user. It is made when it is first needed."""

    def __init__(self) -> None:
        self.ranges = find_ranges(os.geteuid())
        self._fd: int | None = None

    @property
    def ids(self) -> IdRange:
        """The ids of every sandbox, as numbered in this namespace."""
        return IdRange(_USER, first_alone=True) if self.ranges is not None else IdRange(_USER, 1, inner=_ALONE)

    def about(self, capabilities: frozenset[Capability]) -> tuple[str, ...]:
        """Return remarks for users about sandboxes in this namespace."""
        ids = (
            "user ids inside: 65,536, from your range in /etc/subuid"
            if self.ranges is not None
            else "user ids inside: one, not root (more need newuidmap, and a range in /etc/subuid and /etc/subgid)"
        )
        limits = (Capability.MEMORY, Capability.CPUS, Capability.PIDS, Capability.DISK)
        missing = ", ".join(limit.value for limit in limits if limit not in capabilities)
        groups = "delegated to you" if Capability.PAUSE in capabilities else "none of your own"
        return ids, f"control groups: {groups}; no limits for {missing}"

    def open(self) -> int:
        """Return the descriptor of the namespace, which this object owns. Blocks for some milliseconds the first
        time."""
        if self._fd is None:
            self._fd = self._make()
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _make(self) -> int:
        program = str(launcher_process.program())
        holder = LauncherProcess.start(program, Early(encode(["unshare", str(_CLONE_NEWUSER), "ready"]), b"\0"))
        try:
            _wait(holder, b"ready\n", "a user namespace could not be made")
            self._map(holder.pid)
            return os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            holder.close()
            with suppress(ChildProcessError):
                os.waitpid(holder.pid, 0)

    def _map(self, pid: int) -> None:
        uid, gid = os.geteuid(), os.getegid()
        if self.ranges is None:
            Path(f"/proc/{pid}/setgroups").write_text("deny")
            Path(f"/proc/{pid}/uid_map").write_text(f"{_USER} {uid} 1\n")
            Path(f"/proc/{pid}/gid_map").write_text(f"{_USER} {gid} 1\n")
            return
        for program, own, first in (("newuidmap", uid, self.ranges.users), ("newgidmap", gid, self.ranges.groups)):
            words = [program, *map(str, (pid, _USER, own, 1, _USER + 1, first, RANGE - 1))]
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_HELPER_S)
            if done.returncode != 0:
                raise EngineUnavailableError(
                    f"{program} does not work: {done.stderr.strip()[:300]}",
                    hint="It must belong to root and be set-uid: 'apt-get install --reinstall uidmap'.",
                )

    def remove(self, path: Path) -> None:
        """Remove a directory tree whose files may belong to any of the ids. Blocks. Raises EngineError."""
        if not os.path.lexists(path):
            return
        words = ["enter", str(USER_NAMESPACE_FD), "remove", str(path), "ready"]
        helper = LauncherProcess.start(str(launcher_process.program()), Early(encode(words), b"\0"), (self.open(),))
        try:
            _wait(helper, b"ready\n", f"'{path}' could not be removed")
        finally:
            helper.close()
            with suppress(ChildProcessError):
                os.waitpid(helper.pid, 0)


def _wait(helper: LauncherProcess, word: bytes, problem: str) -> None:
    helper.channel.settimeout(_HELPER_S)
    said = b""
    try:
        while not said.endswith(word):
            piece = helper.channel.recv(2048)
            if not piece:
                raise EngineError(f"{problem}: {launcher_process.understood(said)}")
            said += piece
    except TimeoutError:
        raise EngineError(f"{problem} in time", hint="The machine may be overloaded.") from None


@dataclass(frozen=True, slots=True)
class UserLayers(PlainLayers):
    """Writable layers as plain directories. What sandboxes wrote is removed from within the user namespace."""

    namespace: UserNamespace | None = None

    def delete_layer(self, layer_id: str) -> None:
        assert self.namespace is not None
        self.namespace.remove(self.path(layer_id))
