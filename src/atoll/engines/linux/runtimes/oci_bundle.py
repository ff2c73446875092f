"""Converts a plan to the `config.json` of an OCI bundle. No other module knows that format.

`atoll-mount` makes the file tree and the namespaces that belong to the host before the OCI runtime starts (see
`launcher_protocol.py`), because the OCI runtimes of today's distributions support neither id-mapped layers nor overlays
in a user namespace. The OCI runtime does the rest: PID, mount and cgroup namespaces, joining the user namespace,
`/proc`, the control group with its limits, rlimits, Linux capabilities and no_new_privs.

The root of the OCI runtime is the overlay's top directory. It starts `atoll-mount within`, which covers parts of
`/proc`, enters the real root one level below, gives up the Linux capabilities that it needed for that, and installs the
system call filter before the agent runs. The OCI runtime could do the first and the last itself, but takes 20 ms
longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.engines.linux.plan.sandbox_plan import SAFE, DeviceDirectory, Kernel, Plan

Json = dict[str, Any]

ENTRY_CAPABILITIES = ("SETPCAP", "SYS_CHROOT", "SYS_ADMIN")
SOCKET_FD, ENTRY_FD, AGENT_FD, WORDS_FD, FILTER_FD, GUARD_FD = 3, 4, 5, 6, 7, 8


def config(plan: Plan, stage: Path, cgroup_path: str) -> Json:
    inner = f"/{plan.root.inner}"
    proc = next(mount for mount in plan.mounts if isinstance(mount, Kernel) and mount.kind == "proc")
    capabilities = [f"CAP_{name}" for name in (*plan.capabilities, *ENTRY_CAPABILITIES)]
    numbers = [str(fd) for fd in (WORDS_FD, FILTER_FD, AGENT_FD, *((GUARD_FD,) if plan.is_supervised else ()))]
    entry = [f"/proc/self/fd/{ENTRY_FD}", "within", *numbers, "--"]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(stage / "root"), "readonly": False},
        "mounts": [
            {
                "destination": inner + proc.target,
                "type": "proc",
                "source": "proc",
                "options": list(proc.flags),
            },
            # The OCI runtime looks for /dev/null here. A bind mount keeps it from making devices itself.
            {
                "destination": "/dev",
                "type": "bind",
                "source": str(stage / "root" / plan.root.inner / "dev"),
                "options": ["rbind"],
            },
        ],
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [*entry, *plan.argv],
            "env": list(plan.env),
            "cwd": "/",
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
            "rlimits": [
                {"type": f"RLIMIT_{limit.name}", "soft": limit.value, "hard": limit.value} for limit in plan.rlimits
            ],
            "noNewPrivileges": plan.no_new_privileges,
        },
        "linux": {
            "namespaces": _namespaces(plan, stage),
            "uidMappings": [_mapping(plan)],
            "gidMappings": [_mapping(plan)],
            "cgroupsPath": cgroup_path,
            "resources": resources(plan),
        },
    }


def virtual_config(plan: Plan, stage: Path, cgroup_path: str) -> Json:
    """Convert a plan for an OCI runtime with a kernel of its own (gVisor, a virtual machine). Its root is the sandbox's
    root itself."""
    capabilities = [f"CAP_{name}" for name in (*plan.capabilities, "NET_BIND_SERVICE")]
    shm = [*SAFE, "mode=1777", f"size={plan.shm_bytes}"]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(stage / "root" / plan.root.inner), "readonly": False},
        "hostname": plan.hostname,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": list(SAFE)},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro", *SAFE]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "tmpfs", "options": shm},  # noqa: S108
        ],
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(plan.argv),
            "env": list(plan.env),
            "cwd": plan.cwd,
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
            "rlimits": _rlimits(plan),
            "noNewPrivileges": plan.no_new_privileges,
        },
        "linux": {
            "namespaces": [
                *({"type": name} for name in ("pid", "mount", "ipc", "uts", "cgroup", "user")),
                {"type": "network", **({"path": plan.network_path} if plan.network_path else {})},
            ],
            "uidMappings": [_mapping(plan)],
            "gidMappings": [_mapping(plan)],
            "cgroupsPath": cgroup_path,
            "resources": {name: value for name, value in resources(plan).items() if name != "devices"},
        },
    }


def _rlimits(plan: Plan) -> list[Json]:
    return [{"type": f"RLIMIT_{limit.name}", "soft": limit.value, "hard": limit.value} for limit in plan.rlimits]


def _namespaces(plan: Plan, stage: Path) -> list[Json]:
    made_by_runtime = [name for name in ("pid", "mount", "cgroup") if name in plan.namespaces]
    return [*({"type": name} for name in made_by_runtime), {"type": "user", "path": str(stage / "user")}]


def _mapping(plan: Plan) -> Json:
    return {"containerID": 0, "hostID": plan.ids.first, "size": plan.ids.count}


def resources(plan: Plan) -> Json:
    limits = plan.cgroup
    found: Json = {
        "devices": [
            {"allow": False, "access": "rwm"},
            *(
                {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rw"}
                for major, minor in _allowed_devices(plan)
            ),
            {"allow": True, "type": "c", "major": 136, "access": "rw"},
        ]
    }
    if limits.memory_bytes is not None:
        found["memory"] = {"limit": limits.memory_bytes, "swap": limits.memory_bytes}
    if limits.cpu_quota_us is not None:
        found["cpu"] = {"quota": limits.cpu_quota_us, "period": limits.cpu_period_us}
    if limits.pids is not None:
        found["pids"] = {"limit": limits.pids}
    return found


def _allowed_devices(plan: Plan) -> list[tuple[int, int]]:
    directories = [mount for mount in plan.mounts if isinstance(mount, DeviceDirectory)]
    return [*((device.major, device.minor) for directory in directories for device in directory.devices), (5, 2)]
