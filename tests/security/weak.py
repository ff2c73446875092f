"""A container with every wall left out: where the attacks of this suite are shown to fire.

It exists only here. It is root of the host with all capabilities, no user namespace, no filter, no masks, every device,
writable /sys and /proc, a descriptor and a socket of the host, and its output goes to a regular file. What is kept
protects this machine and not the sandbox: a mount, PID, IPC, UTS and network namespace that are thrown away, a control
group with limits, a deadline, /usr read-only. Only payloads that do no harm are run in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.engines.linux.host_image import host_view
from atoll.waiting import Deadline

CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip
"""By their numbers."""

_PREPARE = """
set -e
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$WORK/upper,workdir=$WORK/work" "$WORK/root"
mount --bind /usr "$WORK/root/rootfs/usr"
mount -o remount,bind,ro "$WORK/root/rootfs/usr"
umount -l /sys/fs/cgroup/unified 2>/dev/null || true
exec "$@"
"""
_MEMORY_BYTES, _PIDS = 512 << 20, 200


@dataclass(frozen=True, slots=True)
class Said:
    status: int
    output: bytes

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")


@dataclass(slots=True)
class Weak:
    folder: Path
    """Short, writable, on a real disk."""
    secret: Path
    """A file of the host, which leaks into it as a descriptor."""
    runtime: str = "crun"
    groups: list[Group] = field(default_factory=list)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        user: int = 0,
        env: Sequence[str] = (),
        cwd: str = "/",
        root: Path | None = None,
        devices: bool = True,
        timeout_s: float = 40.0,
    ) -> Said:
        """`root`: another root directory than the host image's, as it is. `devices`: mount a /dev."""
        name = f"weak-{secrets.token_hex(4)}"
        work = self.folder / name
        for part in ("upper", "work", "root"):
            (work / part).mkdir(parents=True)
        group = Group(Hierarchy.find(), f"/atoll-test-{name}")
        self.groups.append(group)
        tree = root or work / "root" / host_view.INNER
        bundle = self._bundle(tree, argv, user, env, cwd, group.path, work, devices)
        (work / "config.json").write_text(json.dumps(bundle))
        try:
            with socket.socket(socket.AF_UNIX) as control, open(self.secret, "rb") as leak:
                control.bind(str(work / "sock"))
                return self._start(name, work, stdin, leak.fileno(), timeout_s)
        finally:
            asyncio.run(group.erase(Deadline.after(10)))
            shutil.rmtree(work)

    def _start(self, name: str, work: Path, stdin: bytes, leak: int, timeout_s: float) -> Said:
        program = [
            self.runtime,
            "--root",
            str(work / "state"),
            "run",
            "--bundle",
            str(work),
            "--preserve-fds",
            "1",
            name,
        ]
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _PREPARE, "sh", *program]
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "WORK": str(work),
            "LOWER": str(host_view.skeleton(self.folder / "skeletons")),
        }
        with open(work / "out", "w+b") as out, open(work / "in", "w+b") as feed:
            feed.write(stdin)
            feed.seek(0)
            process = subprocess.Popen(
                command,
                stdin=feed,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: (os.dup2(leak, 3), None)[1],
                pass_fds=(3,),
            )
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = -signal.SIGKILL
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            return Said(status, out.read(16 << 20))

    def _bundle(
        self,
        root: Path,
        argv: Sequence[str],
        user: int,
        env: Sequence[str],
        cwd: str,
        group: str,
        work: Path,
        devices: bool,
    ) -> dict[str, Any]:
        rights = _rights() if user == 0 else []
        mounts: list[dict[str, Any]] = [
            _kernel("proc", "/proc"),
            _kernel("sysfs", "/sys"),
            _kernel("cgroup", "/sys/fs/cgroup"),
        ]
        if devices:
            mounts += [
                _kernel("tmpfs", "/dev", "mode=755"),
                _kernel("devpts", "/dev/pts", "newinstance", "ptmxmode=0666", "mode=0620"),
                _kernel("tmpfs", "/dev/shm", "mode=1777"),
            ]
        if root.name == host_view.INNER:
            mounts.append({"destination": "/run/docker.sock", "source": str(work / "sock"), "options": ["bind"]})
        return {
            "ociVersion": "1.0.2",
            "root": {"path": str(root)},
            "mounts": mounts,
            "process": {
                "user": {"uid": user, "gid": user},
                "args": list(argv),
                "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", *env],
                "cwd": cwd,
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted", "inheritable", "ambient"), rights),
                "noNewPrivileges": False,
            },
            "linux": {
                "namespaces": [{"type": name} for name in ("mount", "pid", "ipc", "uts", "network")],
                "devices": [{"path": "/dev/kmsg", "type": "c", "major": 1, "minor": 11, "fileMode": 0o666}],
                "cgroupsPath": group,
                "resources": {
                    "devices": [{"allow": True, "access": "rwm"}],
                    "memory": {"limit": _MEMORY_BYTES},
                    "pids": {"limit": _PIDS},
                },
            },
        }


def _kernel(kind: str, target: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": kind, "options": ["rw", *options]}


def _rights() -> list[str]:
    """All that this machine's root has itself."""
    lines = Path("/proc/self/status").read_text().splitlines()
    bounding = int(next(line for line in lines if line.startswith("CapBnd:")).split()[1], 16)
    return [f"CAP_{name}" for number, name in enumerate(CAPABILITIES) if bounding >> number & 1]
