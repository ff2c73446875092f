"""Encodes a plan as the operations that `atoll-native` and `atoll-mount` execute, and decodes their reports.

Both programs read the same format. An operation is a fixed number of words, each of which ends with NUL; numbers are
decimal. Most operations are common to both programs. The meaning of each is documented in the C code that executes it
(`native/launcher/`).

A mount has to be made where the rights to make it are, and attached where its path exists, so there are two lists of
operations. The host list makes the mounts that only the host's root can make, and numbers them (`_Slots`). The inside
list puts everything together on a tmpfs, the stage, which holds:

    proc, sys  the future /proc and /sys, whose masked paths are covered before they are moved into place
    0 1 2 …    the lower layers, read-only, with mapped ids
    u, usr     the host's /usr, and where it is mounted read-only
    c          copies of some of its files, mounted over it
    w          the writable layer: w/upper, w/work
    root       the overlay; root/<inner> is the sandbox's root directory
    null…      the files that are shown in place of kernel files
    user       the sandbox's user namespace, for an OCI runtime to join

`atoll-native` executes the two lists concurrently: first `early_operations`, which do not depend on the sandbox, then
`sandbox_operations`. `atoll-mount` executes one list after the other (`runtime_operations`), and the rest
(`entry_operations`) once the OCI runtime has made a PID namespace and its /proc.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.engines.linux.plan.id_ranges import VOLUME_IDS
from atoll.engines.linux.plan.sandbox_plan import Bind, DeviceDirectory, Kernel, Plan

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWNET = 0x0002_0000, 0x0400_0000, 0x0800_0000, 0x4000_0000
_NAMESPACES = {"uts": CLONE_NEWUTS, "ipc": CLONE_NEWIPC, "net": CLONE_NEWNET}
_RLIMITS = {"CORE": 4, "NOFILE": 7, "MEMLOCK": 8, "MSGQUEUE": 12, "RTPRIO": 14}
_TERMINALS = (136, None)
_PTMX = (5, 2)
_OVERLAY = "index=off,metacopy=off,xino=off,userxattr"
"""`userxattr` is needed because the sandbox's root, which mounts the overlay, may not use `trusted` attributes. It also
turns redirects off."""
USER_NAMESPACE_FD = 4
"""The descriptor by which the launcher of an ordinary user gets the namespace in which that user is root."""
_STAGE, _SYS, _QUEUES, _FIRST_OWN = "0", "1", "2", 3
_ENTRY_STAGE = "/dev"
"""The stage is mounted over the directory in which the OCI runtime looked for its devices, above the sandbox's root."""
_IMAGE_STEPS = frozenset(("put", "move", "mount", "root", "directory", "base", "cwd"))
"""Operations that resolve a path of the image. If one of them fails, the image is the cause."""


@dataclass(frozen=True, slots=True)
class Joining:
    """How the sandbox's first process enters its control group."""

    lists: tuple[Path, ...] = ()
    """cgroup v1: the process writes its id to each of these files."""
    born_in: Path | None = None
    """cgroup v2: the process is created in the group of this directory."""
    devices: Path | None = None
    """cgroup v1: the directory with the rules about devices that may be opened."""


@dataclass(frozen=True, slots=True)
class Early:
    """The encoded operations that are the same for all sandboxes, so that they can be executed before one is wanted.
    They make the namespaces, `/proc` and `/sys`."""

    host: bytes
    inside: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a launcher gave up: the operation that failed, its subject, and the kernel's error."""

    step: str
    detail: str
    reason: str

    @property
    def is_of_the_image(self) -> bool:
        return self.step in _IMAGE_STEPS

    def __str__(self) -> str:
        return f"{f'{self.step} {self.detail}'.strip()}: {self.reason}"


def failure(line: str) -> Failure | None:
    """Parse a line of a report, which must be printable. Returns None if it does not report a failure."""
    match line.split(" ", 3):
        case ["failed", number, step, detail] if number.isdecimal():
            return Failure(step, detail.strip(), os.strerror(int(number)))
        case ["failed", number, step] if number.isdecimal():
            return Failure(step, "", os.strerror(int(number)))
    return None


def encode(words: Iterable[str]) -> bytes:
    listed = words if isinstance(words, list) else list(words)
    text = "\0".join(listed)
    if text.count("\0") + 1 != len(listed):
        raise ValueError("a word holds a NUL byte")
    return text.encode(errors="surrogateescape") + b"\0"


class _Slots:
    """The numbers of the mounts that the host list makes."""

    def __init__(self) -> None:
        self._next = _FIRST_OWN

    def new(self) -> str:
        self._next += 1
        return str(self._next - 1)


@dataclass(slots=True)
class _Lists:
    for_runtime: bool
    """Whether an OCI runtime makes the PID namespace and its /proc, and perhaps has a kernel of its own."""
    host: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    slots: _Slots = field(default_factory=_Slots)


# -- for `atoll-native` --


def early_operations(plan: Plan, joining: Joining) -> Early:
    host = ["enter", str(USER_NAMESPACE_FD)] if plan.rootless else []
    host += ["unshare", str(_host_owned(plan)), *_network(plan), "stage", _STAGE]
    if joining.born_in is None:
        host.append("first")
    inside = ["enter-stage", "/", _STAGE]
    inside += ["proc", "proc", ",".join(_kernel(plan, "proc").flags), *_covers(plan.masked_paths, "/proc/"), "leave"]
    host += _kernel_mounts(plan)
    inside += ["sys", "sys", _SYS, *_covers(plan.masked_paths, "/sys/")]
    return Early(encode(host), encode(inside))


def sandbox_operations(plan: Plan, joining: Joining) -> tuple[bytes, bytes]:
    """Return the host list and the inside list of the operations that are specific to this sandbox."""
    lists = _Lists(for_runtime=False)
    _begin(plan, joining, lists.host)
    lists.inside += ["base", "proc", *_shadows(plan)]
    _tree(plan, lists)
    _device_rules(plan, joining, lists.host)
    _end(plan, lists.inside)
    return encode(lists.host), encode(lists.inside)


def _begin(plan: Plan, joining: Joining, host: list[str]) -> None:
    host += _hostname(plan)
    for path in joining.lists:
        host += ["group", str(path)]
    if joining.born_in is not None:
        host += ["born-in", str(joining.born_in), "first"]
    single = plan.ids.count == 1
    host += ["identity", str(plan.ids.inner), "1" if single else "0", "map", plan.ids.mapping, plan.ids.mapping]


def _device_rules(plan: Plan, joining: Joining, host: list[str]) -> None:
    """Append the rules about devices. They come last, because the first process waits for them only right before it
    executes the agent."""
    if joining.devices is None:
        return
    rules = [f"c {major}:{'*' if minor is None else minor} rw" for major, minor in _allowed_devices(plan.mounts)]
    host += ["write", f"{joining.devices}/devices.deny", "a"]
    host += ["rules", f"{joining.devices}/devices.allow", str(len(rules)), *rules]


def _allowed_devices(mounts: Sequence[object]) -> Iterator[tuple[int, int | None]]:
    for mount in mounts:
        if isinstance(mount, DeviceDirectory):
            yield from ((device.major, device.minor) for device in mount.devices)
    yield _PTMX
    yield _TERMINALS


def _end(plan: Plan, inside: list[str]) -> None:
    inside += ["cover-all", "root", "chroot", "cwd", plan.cwd]
    for argument in plan.argv:
        inside += ["argument", argument]
    for variable in plan.env:
        inside += ["variable", variable]
    for limit in plan.rlimits:
        inside += ["rlimit", limit.name, str(_RLIMITS[limit.name]), str(limit.value)]
    inside += ["execute", str(plan.capability_mask)]


# -- for `atoll-mount` --


def runtime_operations(
    plan: Plan, stage: Path, joined: Sequence[Path] = (), guard: tuple[int, int] | None = None
) -> bytes:
    """Return the operations for `atoll-mount prepare`. /proc and its masked paths are left to the OCI runtime, which
    makes the PID namespace.

    `joined` are files of control groups that the program, and with it the OCI runtime, enters first. `guard` are the
    descriptors of a system call filter for the OCI runtime itself and of the socket of its supervisor.
    """
    lists = _Lists(for_runtime=True)
    host = lists.host
    for path in joined:
        host += ["group", str(path)]
    if guard is not None:
        host += ["guard", *map(str, guard)]
    host += ["unshare", str(CLONE_NEWNS | _host_owned(plan)), "userns", plan.ids.mapping, plan.ids.mapping]
    host += [*_hostname(plan), *_network(plan)]
    if plan.hide_unified_cgroup:
        host += ["umount", "/sys/fs/cgroup/unified"]
    if any(isinstance(mount, Kernel) for mount in plan.mounts):  # a virtual kernel has its own
        host += _kernel_mounts(plan)
        lists.inside += ["sys", "sys", _SYS, *_covers(plan.masked_paths, "/sys/")]
    _tree(plan, lists)
    if plan.network_path is not None:
        # gVisor takes a network namespace that shows `rmem_default` for the host's, which it was in Linux 5.
        host += ["hide", "/proc/sys/net"]
    if plan.lets_go_of_loops:
        host.append("let-go")
    # The stage comes last, because it may cover directories that are cloned above.
    host += ["stage", _STAGE, "enter-stage", str(stage), _STAGE, "keep-userns", "user"]
    return encode([*host, "inside", *lists.inside])


def entry_operations(plan: Plan) -> bytes:
    """Return the operations for `atoll-mount within`. They cover or replace parts of /proc, enter the sandbox's root
    directory, and give up all rights that the agent does not have."""
    root = f"/{plan.root.inner}"
    words = ["stage", _STAGE, "enter-stage", _ENTRY_STAGE, _STAGE, "base", f"{root}/proc"]
    words += [*_covers(plan.masked_paths, "/proc/"), *_shadows(plan)]
    words += ["root", root, "chroot", "cwd", plan.cwd, "execute", str(plan.capability_mask)]
    return encode(words)


# -- for both --


def _host_owned(plan: Plan) -> int:
    return sum(_NAMESPACES[name] for name in plan.host_owned)


def _hostname(plan: Plan) -> list[str]:
    return ["hostname", plan.hostname] if "uts" in plan.host_owned else []


def _network(plan: Plan) -> list[str]:
    if "net" not in plan.host_owned:
        return []
    return ["loopback", *(word for name, value in plan.sysctls for word in ("set", f"sys/{name}", value))]


def _kernel(plan: Plan, kind: str) -> Kernel:
    return next(mount for mount in plan.mounts if isinstance(mount, Kernel) and mount.kind == kind)


def _kernel_mounts(plan: Plan) -> list[str]:
    """Return the operations that mount sysfs and mqueue. Their namespaces belong to the host, so only the host's root
    can mount them."""
    queues = _kernel(plan, "mqueue")
    return [
        *("filesystem", "sysfs", _SYS, ",".join(_kernel(plan, "sysfs").flags), ""),
        *("filesystem", "mqueue", _QUEUES, ",".join(queues.flags), queues.options),
    ]


@functools.lru_cache(maxsize=16)
def _covers(paths: tuple[str, ...], below: str) -> tuple[str, ...]:
    return tuple(word for path in paths if path.startswith(below) for word in ("cover", path.removeprefix(below)))


def _shadows(plan: Plan) -> list[str]:
    words = []
    for number, shadow in enumerate(plan.shadows):
        words += ["shadow", f"null-{number}", shadow.path.removeprefix("/proc/"), shadow.content]
    return words


def _tree(plan: Plan, lists: _Lists) -> None:
    _root(plan, lists)
    for directory in plan.directories:
        lists.inside += ["directory", directory.path, str(directory.mode)]
    for mount in plan.mounts:
        _mount(plan, mount, lists)


def _root(plan: Plan, lists: _Lists) -> None:
    root = plan.root
    names = [str(number) for number in range(len(root.lowers))]
    for name, lower in zip(names, root.lowers, strict=True):
        _layer(plan, lists, lower, name, "ro,nosuid,nodev")
    _layer(plan, lists, root.upper, "w", "nosuid,nodev")
    options = f"lowerdir={':'.join(names)},upperdir=w/upper,workdir=w/work,volatile,{_OVERLAY}"
    lists.inside += ["mkdir", "root", "overlay", "root", "nosuid,nodev", options, "root", f"root/{root.inner}"]
    if root.usr is not None:
        _layer(plan, lists, root.usr, "u", "ro,nosuid,nodev")
        # `outsider` mounts the overlay with the rights of an id that owns none of these files. An ordinary user owns
        # none of them anyway, and may have no other id.
        flags = "ro,nosuid,nodev" if plan.rootless else "ro,nosuid,nodev,outsider"
        if root.copies is None:  # an overlay needs at least two layers
            lists.inside += ["mkdir", "e"]
            layers = "u:e"
        else:
            _layer(plan, lists, root.copies, "c", "ro,nosuid,nodev")
            layers = "c:u"
        lists.inside += ["mkdir", "usr", "overlay", "usr", flags, f"lowerdir={layers},{_OVERLAY}"]
        lists.inside += ["move", "/usr", "usr"]


def _layer(plan: Plan, lists: _Lists, source: Path, name: str, flags: str) -> None:
    lists.inside += ["attach", name, _clone(plan, lists, str(source), flags)]


def _clone(plan: Plan, lists: _Lists, source: str, flags: str) -> str:
    """Clone a tree of the host and return its slot. For an ordinary user ids need no mapping: files on disk have the
    sandbox's ids already."""
    slot = lists.slots.new()
    lists.host += ["clone", source, slot, flags if plan.rootless else f"{flags},mapped"]
    return slot


def _mount(plan: Plan, mount: DeviceDirectory | Kernel | Bind, lists: _Lists) -> None:
    flags = ",".join(mount.flags)
    match mount:
        case DeviceDirectory():
            _devices(plan, mount, lists, flags)
        case Kernel(kind="proc"):
            if not lists.for_runtime:
                lists.inside += ["move", mount.target, "proc"]
        case Kernel(kind="sysfs"):
            lists.inside += ["move", mount.target, "sys"]
        case Kernel(kind="mqueue"):
            lists.inside += ["put", mount.target, _QUEUES, "strict"]
        case Kernel():
            lists.inside += ["mount", mount.target, mount.kind, flags, mount.options]
        case Bind():
            lists.inside += ["put", mount.target, _bind(plan, lists, mount), ""]


def _devices(plan: Plan, mount: DeviceDirectory, lists: _Lists, flags: str) -> None:
    slot, owner = lists.slots.new(), str(plan.ids.first)
    nodes = () if plan.rootless else mount.devices
    options = f"mode=755,size={mount.size_bytes},nr_inodes=1024,uid={owner},gid={owner}"
    lists.host += ["devices", slot, flags, options, owner, str(len(nodes)), str(len(mount.links))]
    for device in nodes:
        lists.host += [device.name, str(device.major), str(device.minor)]
    for name, target in mount.links:
        lists.host += [name, target]
    lists.inside += ["put", mount.target, slot, "strict"]
    if plan.rootless:
        for device in mount.devices:
            lists.inside += ["put", f"{mount.target}/{device.name}"]
            lists.inside += [_clone(plan, lists, f"/dev/{device.name}", flags), "strict"]


def _bind(plan: Plan, lists: _Lists, mount: Bind) -> str:
    flags = ",".join((*mount.flags, *(() if mount.through_links else ("nolinks",))))
    if not mount.as_owner or plan.rootless:
        return _clone(plan, lists, mount.source, flags)
    slot = lists.slots.new()
    if lists.for_runtime:
        flags += ",nooverlay"
    ids = (plan.ids.first, plan.ids.count, VOLUME_IDS)
    lists.host += ["volume", mount.source, slot, flags, *map(str, ids)]
    return slot
