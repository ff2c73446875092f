"""A plan as the words that `atoll-native` and `atoll-mount` execute, and what their reports mean.

Both programs read the same format: words that end with NUL, each operation with a fixed number of them, numbers in
decimal. They share most operations; what one means is said where the program executes it (`native/launcher/`).

Mounts are made where the rights are and attached where the path is, so there are two lists. The host's makes mounts
that only the host's root can make, each under a number (`_Slots`); the one inside puts everything together, in a
tmpfs of its own, the stage:

    proc, sys  what becomes /proc and /sys, covered before it is placed
    0 1 2 …    the lower layers, ids mapped, read-only
    u, usr     the host's /usr, and where it is mounted read-only
    c          copies of some of its files, over it
    w          the writable layer: w/upper, w/work
    root       the overlay; root/<inner> is the sandbox's root directory
    null…      what is shown instead of files of the kernel
    user       the sandbox's user namespace, for a runtime to join

`atoll-native` executes the two side by side: `early_operations` before it is known which sandbox is wanted, then
`sandbox_operations`. `atoll-mount` executes them one after the other (`runtime_operations`), and the rest when the
runtime has made a PID namespace with its /proc (`entry_operations`).
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
"""`userxattr`: mounted by the sandbox's root, who has no trusted attributes; it also turns redirects off."""
USER_NAMESPACE_FD = 4
"""Where the launcher of an ordinary user finds the namespace in which that user is root."""
_STAGE, _SYS, _QUEUES, _FIRST_OWN = "0", "1", "2", 3
_ENTRY_STAGE = "/dev"
"""Over the directory that the runtime looked for its devices in; it lies above the sandbox's root."""
_IMAGE_STEPS = frozenset(("put", "move", "mount", "root", "directory", "base", "cwd"))
"""Steps that resolve a path of the image: if one fails, the image is to blame."""


@dataclass(frozen=True, slots=True)
class Joining:
    """How the first process gets into its control group."""

    lists: tuple[Path, ...] = ()
    """v1: it writes itself into each of these."""
    born_in: Path | None = None
    """v2: it is born in this directory."""
    devices: Path | None = None
    """v1: the directory whose rules say which devices may be opened."""


@dataclass(frozen=True, slots=True)
class Early:
    """What is the same for all sandboxes, so that it can be made before one is asked for: the namespaces, and what the
    kernel shows in `/proc` and `/sys`."""

    host: bytes
    inside: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a launcher gave up: the operation, what it was about, and the kernel's answer."""

    step: str
    detail: str
    reason: str

    @property
    def is_of_the_image(self) -> bool:
        return self.step in _IMAGE_STEPS

    def __str__(self) -> str:
        return f"{f'{self.step} {self.detail}'.strip()}: {self.reason}"


def failure(line: str) -> Failure | None:
    """What a line of a report says; None: it is no failure. `line` is printable."""
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
    """Numbers for the mounts that the host part makes."""

    def __init__(self) -> None:
        self._next = _FIRST_OWN

    def new(self) -> str:
        self._next += 1
        return str(self._next - 1)


@dataclass(slots=True)
class _Lists:
    for_runtime: bool
    """A runtime makes the PID namespace and its /proc, and perhaps brings a kernel of its own."""
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
    """The words of the host part and of the first process, for what is this sandbox's own."""
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
    """Last: the first process waits for them only when it is about to execute the agent."""
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
    """The words for `atoll-mount prepare`. `proc` is left to whoever makes the PID namespace, and so are its masks.

    `joined`: the lists of control groups that the program, and with it the runtime, enters first. `guard`: descriptors
    of a filter for the runtime itself, and of the socket of its supervisor.
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
        # gVisor takes a network namespace that shows `rmem_default` for the host's own, as it was in Linux 5.
        host += ["hide", "/proc/sys/net"]
    if plan.lets_go_of_loops:
        host.append("let-go")
    # What was cloned may lie below the stage, which covers it.
    host += ["stage", _STAGE, "enter-stage", str(stage), _STAGE, "keep-userns", "user"]
    return encode([*host, "inside", *lists.inside])


def entry_operations(plan: Plan) -> bytes:
    """The words for `atoll-mount within`: what of /proc is not shown, or shown as something else, and then the step
    down into the sandbox's root, with no more rights than the agent has."""
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
    """Of namespaces that belong to the host, so only the host's root can mount them."""
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
        # An ordinary user is no owner of these files, and may have no other id to be.
        flags = "ro,nosuid,nodev" if plan.rootless else "ro,nosuid,nodev,outsider"
        if root.copies is None:  # an overlay has two layers at least
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
    """The slot in which the tree of the host comes. An ordinary user's ids are on the disk already."""
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
