"""A plan as words for `atoll-native`. What the operations mean is said in the program itself.

There are two lists, executed side by side: the host part makes mounts that only the host's root can make and hands
them over by number (`_Slots`), the first process puts everything together. It is staged in a tmpfs of its own:

    proc, sys  what becomes /proc and /sys, covered before it is placed
    0 1 2 …    the lower layers, ids mapped, read-only
    u, usr     the host's /usr, and where it is mounted read-only
    c          copies of some of its files, over it
    w          the writable layer: w/upper, w/work
    root       the overlay; root/<inner> is the sandbox's root directory
    null…      what is shown instead of files of the kernel
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.engines.linux.plan import Bind, DeviceDirectory, Kernel, Plan
from atoll.engines.linux.stage import CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWUTS, OVERLAY
from atoll.engines.linux.users import VOLUME_IDS

_FLAGS = {"uts": CLONE_NEWUTS, "ipc": CLONE_NEWIPC, "net": CLONE_NEWNET}
_RLIMITS = {"CORE": 4, "NOFILE": 7, "MEMLOCK": 8, "MSGQUEUE": 12, "RTPRIO": 14}
_TERMINALS = (136, None)
_PTMX = (5, 2)
USER_NAMESPACE_FD = 4
"""Where the launcher of an ordinary user finds the namespace in which that user is root."""
_STAGE, _SYS, _QUEUES, _FIRST_OWN = "0", "1", "2", 3


@dataclass(frozen=True, slots=True)
class Joining:
    """How the first process gets into its control group."""

    lists: tuple[Path, ...] = ()
    """v1: it writes itself into each of these."""
    born_in: Path | None = None
    """v2: it is born in this directory."""
    devices: Path | None = None
    """v1: the directory whose rules say which devices may be opened."""


class _Slots:
    """Numbers for the mounts that the host part hands over."""

    def __init__(self) -> None:
        self._next = _FIRST_OWN

    def new(self) -> str:
        self._next += 1
        return str(self._next - 1)


@dataclass(slots=True)
class _Lists:
    host: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    slots: _Slots = field(default_factory=_Slots)


@dataclass(frozen=True, slots=True)
class Early:
    """What is the same for all sandboxes, so that it can be made before one is asked for: the namespaces, and what the
    kernel shows in `/proc` and `/sys`."""

    host: bytes
    inside: bytes


def early(plan: Plan, joining: Joining) -> Early:
    host = ["enter", str(USER_NAMESPACE_FD)] if plan.ordinary_user else []
    host += ["unshare", str(sum(_FLAGS[name] for name in plan.host_owned))]
    inside = [_STAGE]
    if "net" in plan.host_owned:
        host.append("loopback")
        for name, value in plan.sysctls:
            host += ["set", f"sys/{name}", value]
    host += ["stage", _STAGE]
    if joining.born_in is None:
        host.append("first")
    inside += ["proc", "proc", ",".join(_kernel(plan, "proc").flags), *_covers(plan.masked_paths, "/proc/")]
    inside += ["leave", "the host"]
    host += ["filesystem", "sysfs", _SYS, ",".join(_kernel(plan, "sysfs").flags), ""]
    queues = _kernel(plan, "mqueue")
    host += ["filesystem", "mqueue", _QUEUES, ",".join(queues.flags), queues.options]
    inside += ["sys", "sys", _SYS, *_covers(plan.masked_paths, "/sys/")]
    return Early(encode(host), encode(inside))


def _kernel(plan: Plan, kind: str) -> Kernel:
    return next(mount for mount in plan.mounts if isinstance(mount, Kernel) and mount.kind == kind)


def operations(plan: Plan, joining: Joining) -> tuple[bytes, bytes]:
    """The words of the host part and of the first process, for what is this sandbox's own."""
    lists = _Lists()
    _begin(plan, joining, lists)
    _root(plan, lists)
    for mount in plan.mounts:
        _mount(plan, mount, lists)
    _device_rules(plan, joining, lists.host)
    _end(plan, lists)
    return encode(lists.host), encode(lists.inside)


def encode(words: Iterable[str]) -> bytes:
    text = "\0".join(words)
    if text.count("\0") + 1 != len(words if isinstance(words, list) else list(words)):
        raise ValueError("a word holds a NUL byte")
    return text.encode(errors="surrogateescape") + b"\0"


def _begin(plan: Plan, joining: Joining, lists: _Lists) -> None:
    host = lists.host
    if "uts" in plan.host_owned:
        host += ["hostname", plan.hostname]
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


@functools.lru_cache(maxsize=16)
def _covers(paths: tuple[str, ...], below: str) -> tuple[str, ...]:
    return tuple(word for path in paths if path.startswith(below) for word in ("cover", path.removeprefix(below)))


def _root(plan: Plan, lists: _Lists) -> None:
    root = plan.root
    lists.inside += ["base", "proc"]
    for number, shadow in enumerate(plan.shadows):
        lists.inside += ["shadow", f"null-{number}", shadow.path.removeprefix("/proc/"), shadow.content]
    names = [str(number) for number in range(len(root.lowers))]
    for name, lower in zip(names, root.lowers, strict=True):
        _stage(plan, lists, lower, name, "ro,nosuid,nodev")
    _stage(plan, lists, root.upper, "w", "nosuid,nodev")
    options = f"lowerdir={':'.join(names)},upperdir=w/upper,workdir=w/work,volatile,{OVERLAY}"
    lists.inside += ["mkdir", "root", "overlay", "root", "nosuid,nodev", options, "root", f"root/{root.inner}"]
    if root.usr is not None:
        _stage(plan, lists, root.usr, "u", "ro,nosuid,nodev")
        # An ordinary user is no owner of these files, and may have no other id to be.
        flags = "ro,nosuid,nodev" if plan.ordinary_user else "ro,nosuid,nodev,outsider"
        if root.copies is None:  # an overlay has two layers at least
            lists.inside += ["mkdir", "e"]
            layers = "u:e"
        else:
            _stage(plan, lists, root.copies, "c", "ro,nosuid,nodev")
            layers = "c:u"
        lists.inside += ["mkdir", "usr", "overlay", "usr", flags, f"lowerdir={layers},{OVERLAY}"]
        lists.inside += ["move", "/usr", "usr"]
    for directory in plan.directories:
        lists.inside += ["directory", directory.path, str(directory.mode)]


def _stage(plan: Plan, lists: _Lists, source: Path, name: str, flags: str) -> None:
    lists.inside += ["stage", name, _clone(plan, lists, str(source), flags)]


def _clone(plan: Plan, lists: _Lists, source: str, flags: str) -> str:
    """The slot in which the tree of the host comes. An ordinary user's ids are on the disk already."""
    slot = lists.slots.new()
    lists.host += ["clone", source, slot, flags if plan.ordinary_user else f"{flags},mapped"]
    return slot


def _mount(plan: Plan, mount: DeviceDirectory | Kernel | Bind, lists: _Lists) -> None:
    owner, flags = str(plan.ids.first), ",".join(mount.flags)
    match mount:
        case DeviceDirectory():
            slot = lists.slots.new()
            nodes = () if plan.ordinary_user else mount.devices
            options = f"mode=755,size={mount.size_bytes},nr_inodes=1024,uid={owner},gid={owner}"
            lists.host += ["devices", slot, flags, options, owner, str(len(nodes)), str(len(mount.links))]
            for device in nodes:
                lists.host += [device.name, str(device.major), str(device.minor)]
            for name, target in mount.links:
                lists.host += [name, target]
            lists.inside += ["put", mount.target, slot, "strict"]
            if plan.ordinary_user:
                for device in mount.devices:
                    lists.inside += ["put", f"{mount.target}/{device.name}"]
                    lists.inside += [_clone(plan, lists, f"/dev/{device.name}", flags), "strict"]
        case Kernel(kind="proc" | "sysfs"):
            lists.inside += ["move", mount.target, "proc" if mount.kind == "proc" else "sys"]
        case Kernel(kind="mqueue"):
            # Of a namespace that belongs to the host, so only the host's root can mount it: see `early`.
            lists.inside += ["put", mount.target, _QUEUES, "strict"]
        case Kernel():
            lists.inside += ["mount", mount.target, mount.kind, flags, mount.options]
        case Bind():
            lists.inside += ["put", mount.target, _bind(plan, lists, mount), ""]


def _bind(plan: Plan, lists: _Lists, mount: Bind) -> str:
    flags = ",".join((*mount.flags, *(() if mount.through_links else ("nolinks",))))
    if not mount.as_owner or plan.ordinary_user:
        return _clone(plan, lists, mount.source, flags)
    slot = lists.slots.new()
    ids = (plan.ids.first, plan.ids.count, VOLUME_IDS)
    lists.host += ["volume", mount.source, slot, flags, *map(str, ids)]
    return slot


def _end(plan: Plan, lists: _Lists) -> None:
    inside = lists.inside
    inside += ["cover-all", "root", "cwd", plan.cwd]
    for argument in plan.argv:
        inside += ["argument", argument]
    for variable in plan.env:
        inside += ["variable", variable]
    for limit in plan.rlimits:
        inside += ["rlimit", limit.name, str(_RLIMITS[limit.name]), str(limit.value)]
    inside += ["execute", f"{plan.capability_mask:x}"]
