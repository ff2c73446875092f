"""A plan as operations for `atoll-mount`, which makes the file tree and the host-owned namespaces of a sandbox.

What the operations mean is said in the program itself. Everything is staged in a tmpfs that only the sandbox's mount
namespace has:

    0 1 2 …    the lower layers, ids mapped, read-only
    u, usr     the host's /usr, and where it is mounted read-only
    c          copies of some of its files, over it
    w          the writable layer: w/upper, w/work
    root       the overlay; root/<inner> is the sandbox's root directory
    user       the sandbox's user namespace, for the runtime to join
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.engines.linux.plan import Bind, DeviceDirectory, Kernel, Plan
from atoll.engines.linux.users import VOLUME_IDS

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWNET = 0x0002_0000, 0x0400_0000, 0x0800_0000, 0x4000_0000
_FLAGS = {"uts": CLONE_NEWUTS, "ipc": CLONE_NEWIPC, "net": CLONE_NEWNET}
OVERLAY = "index=off,metacopy=off,xino=off,userxattr"
"""`userxattr`: mounted by the sandbox's root, who has no trusted attributes; it also turns redirects off."""


def operations(plan: Plan, stage: Path, joined: Sequence[Path] = (), guard: tuple[int, int] | None = None) -> bytes:
    """The words for `atoll-mount prepare`. `proc` is left to whoever makes the PID namespace, and so are its masks.

    `joined`: the lists of control groups that the program, and with it the runtime, enters first. `guard`: descriptors
    of a filter for the runtime itself, and of the socket of its supervisor.
    """
    words = [word for path in joined for word in ("join", str(path))]
    if guard is not None:
        words += ["guard", *map(str, guard)]
    _host_part(plan, stage, words)
    words.append("enter")
    _sandbox_part(plan, words)
    return _encoded(words)


def covers(plan: Plan) -> bytes:
    """The words for `atoll-mount within`: what of /proc is not shown, or shown as something else."""
    words = [word for path in plan.masked_paths if path.startswith("/proc/") for word in ("mask", path)]
    words += [word for shadow in plan.shadows for word in ("shadow", shadow.path, shadow.content)]
    return _encoded(words)


def _encoded(words: Sequence[str]) -> bytes:
    for word in words:
        if "\0" in word:
            raise ValueError("a path holds a NUL byte")
    return b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)


def _host_part(plan: Plan, stage: Path, words: list[str]) -> None:
    flags = CLONE_NEWNS | sum(_FLAGS[name] for name in plan.host_owned)
    mapping = f"0 {plan.ids.first} {plan.ids.count}\n"
    words += ["unshare", hex(flags), "userns", mapping, mapping]
    if "uts" in plan.host_owned:
        words += ["hostname", plan.hostname]
    if "net" in plan.host_owned:
        words.append("loopback")
        for name, value in plan.sysctls:
            words += ["write", f"/proc/sys/{name}", value]
    if plan.hide_unified_cgroup:
        words += ["umount", "/sys/fs/cgroup/unified"]
    for number, lower in enumerate(plan.root.lowers):
        words += ["clone", str(lower), str(number), "ro,nosuid,nodev,idmap"]
    words += ["clone", str(plan.root.upper), "w", "nosuid,nodev,idmap"]
    if plan.root.usr is not None:
        words += ["clone", str(plan.root.usr), "u", "ro,nosuid,nodev,idmap"]
    if plan.root.copies is not None:
        words += ["clone", str(plan.root.copies), "c", "ro,nosuid,nodev,idmap"]
    for number, mount in enumerate(plan.mounts):
        if isinstance(mount, Bind):
            how = ",".join((*mount.flags, *(() if mount.through_links else ("nolinks",)), "idmap"))
            if mount.as_owner:
                ids = (plan.ids.first, plan.ids.count, VOLUME_IDS)
                words += ["volume", mount.source, f"m{number}", how, *map(str, ids)]
            else:
                words += ["clone", mount.source, f"m{number}", how]
    if plan.network_path is not None:
        # gVisor takes a network namespace that shows `rmem_default` for the host's own, as it was in Linux 5.
        words += ["hide", "/proc/sys/net"]
    if plan.lets_go_of_loops:
        words.append("let-go")
    words += ["stage", str(stage), "keep-userns", "user", "mkdir", "root", "mkdir", "usr", "mkdir", "e"]
    for number, mount in enumerate(plan.mounts):
        _stage_mount(plan, number, mount, words)


def _stage_mount(plan: Plan, number: int, mount: DeviceDirectory | Kernel | Bind, words: list[str]) -> None:
    owner = str(plan.ids.first)
    match mount:
        case DeviceDirectory():
            options = f"mode=755,size={mount.size_bytes},nr_inodes=1024,uid={owner},gid={owner}"
            words += ["filesystem", "tmpfs", "dev", ",".join(mount.flags), options]
            for device in mount.devices:
                words += ["device", f"dev/{device.name}", "0666", str(device.major), str(device.minor), owner]
            for name, target in mount.links:
                words += ["link", f"dev/{name}", target, owner]
        case Kernel(kind="sysfs" | "mqueue"):
            words += ["filesystem", mount.kind, f"m{number}", ",".join(mount.flags), mount.options]


def _sandbox_part(plan: Plan, words: list[str]) -> None:
    root = plan.root
    lowers = ":".join(str(number) for number in range(len(root.lowers)))
    words += [
        "overlay",
        "root",
        "nosuid,nodev",
        f"lowerdir={lowers},upperdir=w/upper,workdir=w/work,volatile,{OVERLAY}",
    ]
    words += ["root", f"root/{root.inner}"]
    if root.usr is not None:
        layers = "u:e" if root.copies is None else "c:u"
        words += ["overlay", "usr", "ro,nosuid,nodev,outsider", f"lowerdir={layers},{OVERLAY}"]
        words += ["place", "usr", "/usr", "strict"]
    for directory in plan.directories:
        words += ["directory", directory.path, oct(directory.mode).replace("0o", "0"), "0", "0"]
    for number, mount in enumerate(plan.mounts):
        match mount:
            case DeviceDirectory():
                words += ["place", "dev", mount.target, "strict"]
            case Kernel(kind="proc"):
                pass
            case Kernel(kind="sysfs" | "mqueue"):
                words += ["place", f"m{number}", mount.target, "strict"]
            case Kernel():
                words += ["mount", mount.kind, mount.target, ",".join(mount.flags), mount.options]
            case Bind():
                words += ["place", f"m{number}", mount.target, ",".join(mount.flags)]
    for path in plan.masked_paths:
        if not path.startswith("/proc/"):
            words += ["mask", path]
