"""What a sandbox is made of on Linux, as data. `make_plan` is pure; whoever executes the plan decides nothing.

Theory of operation. A sandbox is a process tree in namespaces of its own, over a file tree of its own, with fewer
rights than its root user believes to have. Each wall below holds without the others:

* **User namespace.** The sandbox's ids are a range of 65,536 host ids that no other sandbox and no user of the host
  has. Root inside is nobody outside. Image files keep their on-disk ids and are mapped while mounted, so nothing is
  copied or chowned.
* **Mount namespace.** The root is an overlay, mounted inside the sandbox's own mount namespace, so it vanishes with
  it. The root directory lies one level *below* the overlay's mount point: no mount table inside names the overlay
  or a host path.
* **PID, IPC, UTS, network, cgroup namespaces.** IPC, UTS and network belong to the host's user namespace, not to
  the sandbox's: root inside has no power over them, and of their files under `/proc/sys` none is writable; those of
  the PID namespace are shadowed. Port 80 and `ping` are opened by two settings of the network namespace instead of
  by capabilities.
* **Capabilities.** Seven, all meaningless outside: CHOWN, DAC_OVERRIDE, FOWNER, FSETID (a package manager changes
  owners and modes), SETUID, SETGID (`su`, dropping rights), KILL (ending another user's process inside).
* **Seccomp**, see `seccomp.py`. **No new privileges**: set-uid files give nothing.
* **Writable volumes**: root inside is their owner on the disk, never the host's root, and no set-id bit gets there.
* **Masked paths**: what `/proc` and `/sys` tell about the machine."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from atoll.engines.host.cgroups.group_limits import VIRTUAL_KERNEL_THREADS, CgroupLimits
from atoll.engines.host.confinement import masks
from atoll.engines.host.confinement.seccomp import Profile, profile, virtual_kernel_profile
from atoll.engines.host.environment import default_environment
from atoll.errors import SpecError
from atoll.model import SandboxSpec
from atoll.resources import OPEN_FILES

Namespace = Literal["user", "mount", "pid", "ipc", "uts", "net", "cgroup"]
Flag = Literal["ro", "nosuid", "nodev", "noexec"]

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "KILL")
CAPABILITY_BITS = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7,
}  # fmt: skip
RANGE = 65_536
SHM_BYTES = 64 << 20
DEFAULT_ENV = default_environment("/root", "root")


@dataclass(frozen=True, slots=True)
class IdRange:
    """Host ids `first` to `first + count - 1` are the sandbox's ids from 0."""

    first: int
    count: int = RANGE
    inner: int = 0
    """The sandbox's id that the first one is."""
    first_alone: bool = False
    """The first one comes from elsewhere than the rest: the kernel wants a line for each."""

    @property
    def mapping(self) -> str:
        """As the kernel reads it."""
        if self.first_alone:
            return f"{self.inner} {self.first} 1\n{self.inner + 1} {self.first + 1} {self.count - 1}\n"
        return f"{self.inner} {self.first} {self.count}\n"


@dataclass(frozen=True, slots=True)
class Root:
    """The overlay. Its mounted top holds `inner`, which is the sandbox's root directory, and nothing of interest."""

    lowers: tuple[Path, ...]
    """Topmost first; mounted with mapped ids, read-only."""
    upper: Path
    """Holds `upper` and `work`; mounted with mapped ids."""
    inner: str
    usr: Path | None = None
    """The host's own /usr, read-only, when the image has none. What only the host's root may read there stays
    closed."""
    copies: Path | None = None
    """What is put over /usr, see `host_copies`."""


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class DeviceDirectory:
    """A tmpfs on /dev that only the host's root can put devices into. It has no `nodev`, all others have."""

    devices: tuple[Device, ...]
    links: tuple[tuple[str, str], ...]
    target: str = "/dev"
    flags: tuple[Flag, ...] = ("nosuid", "noexec")
    size_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Kernel:
    """A file system of the kernel."""

    kind: Literal["proc", "sysfs", "devpts", "mqueue", "tmpfs"]
    target: str
    flags: tuple[Flag, ...]
    options: str = ""


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory or file of the host that the user asked for."""

    source: str
    target: str
    flags: tuple[Flag, ...]
    through_links: bool = True
    """Whether the source's path may go through symbolic links. Never where a sandbox could have made them."""
    as_owner: bool = False
    """Root inside is the owner of the source on the disk, and never the host's root. Otherwise ids mean there what they
    mean inside."""


Mount = DeviceDirectory | Kernel | Bind


@dataclass(frozen=True, slots=True)
class Rlimit:
    name: str
    value: int
    """Soft and hard alike: what may be raised is no limit."""


@dataclass(frozen=True, slots=True)
class Directory:
    """Made if missing."""

    path: str
    mode: int = 0o755


@dataclass(frozen=True, slots=True)
class Shadow:
    """A file of /proc that the sandbox could write to; it sees this text instead, and cannot."""

    path: str
    content: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    machine: str = "x86_64"
    cpus: int = 1
    hide_unified_cgroup: bool = False
    """A hybrid host whose v2 mount would confuse the runtime: it must not see it."""


@dataclass(frozen=True, slots=True)
class Plan:
    sandbox_id: str
    machine: str
    root: Root
    ids: IdRange
    mounts: tuple[Mount, ...]
    directories: tuple[Directory, ...]
    namespaces: frozenset[Namespace]
    host_owned: frozenset[Namespace]
    """Those of `namespaces` that belong to the host's user namespace."""
    capabilities: tuple[str, ...]
    seccomp: Profile
    masked_paths: tuple[str, ...]
    shadows: tuple[Shadow, ...]
    cgroup: CgroupLimits
    rlimits: tuple[Rlimit, ...]
    sysctls: tuple[tuple[str, str], ...]
    hostname: str
    env: tuple[str, ...]
    argv: tuple[str, ...]
    cwd: str
    no_new_privileges: bool = True
    hide_unified_cgroup: bool = False
    lets_go_of_loops: bool = False
    """Whoever runs it keeps a copy of the host's mounts: file systems on loop devices must not be among them."""
    rootless: bool = False
    """Whoever makes it has no rights on the host: see `for_rootless`."""
    labels: dict[str, str] = field(default_factory=dict)
    network_path: str | None = None
    """A network namespace that is there already. None: an empty one of its own."""

    @property
    def is_supervised(self) -> bool:
        """Whether somebody has to decide about set-id bits: there is a volume that it may write to."""
        return any(isinstance(mount, Bind) and mount.as_owner for mount in self.mounts)

    @property
    def capability_mask(self) -> int:
        return sum(1 << CAPABILITY_BITS[name] for name in self.capabilities)


STANDARD_DEVICES = DeviceDirectory(
    devices=(
        Device("null", 1, 3), Device("zero", 1, 5), Device("full", 1, 7), Device("random", 1, 8),
        Device("urandom", 1, 9), Device("tty", 5, 0),
    ),
    links=(
        ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"), ("ptmx", "pts/ptmx"),
    ),
)  # fmt: skip

SHADOWS = (Shadow("/proc/sys/kernel/pid_max", "32768\n"), Shadow("/proc/sys/kernel/ns_last_pid", "1\n"))
"""The two settings of a PID namespace, which is the one that the sandbox's user namespace must own."""

_NAMESPACE = uuid.UUID("4f6b2a52-8a55-4d1e-9a3c-3f1f3f0a7c11")

SAFE: tuple[Flag, ...] = ("nosuid", "nodev", "noexec")


def make_plan(
    spec: SandboxSpec,
    facts: HostFacts,
    root: Root,
    ids: IdRange,
    *,
    sandbox_id: str,
    argv: tuple[str, ...],
    env: dict[str, str] | None = None,
    files: tuple[Bind, ...] = (),
) -> Plan:
    """`env` is the image's own; the spec's wins over it. `files` are ours.

    Raises SpecError for a volume that would cover a wall.
    """
    limits = spec.limits
    ours = {"HOSTNAME": spec.hostname}
    variables = DEFAULT_ENV | (env or {}) | ours | spec.env | {"ATOLL_SANDBOX_ID": sandbox_id}
    return Plan(
        sandbox_id=sandbox_id,
        machine=facts.machine,
        root=root,
        ids=ids,
        mounts=(*_standard_mounts(), *files, *_volumes(spec)),
        directories=(Directory(spec.work_dir), Directory("/tmp", 0o1777), Directory("/root", 0o700)),  # noqa: S108
        namespaces=frozenset(("user", "mount", "pid", "ipc", "uts", "net", "cgroup")),
        host_owned=frozenset(("ipc", "uts", "net")),
        capabilities=CAPABILITIES,
        seccomp=profile("supervised" if spec.has_writable_volume else "allowed"),
        masked_paths=masks.masked_paths(facts.cpus),
        shadows=(*SHADOWS, _boot_id(sandbox_id)),
        cgroup=CgroupLimits.of(limits),
        rlimits=(
            Rlimit("CORE", 0),
            Rlimit("NOFILE", limits.open_files or OPEN_FILES),
            Rlimit("RTPRIO", 0),
            Rlimit("MEMLOCK", 8 << 20),
            Rlimit("MSGQUEUE", 819_200),
        ),
        sysctls=(
            ("net/ipv4/ip_unprivileged_port_start", "0"),
            ("net/ipv4/ping_group_range", "0 2147483647"),
        ),
        hostname=spec.hostname,
        env=tuple(f"{name}={value}" for name, value in variables.items()),
        argv=argv,
        cwd=spec.work_dir,
        hide_unified_cgroup=facts.hide_unified_cgroup,
    )


def for_virtual_kernel(plan: Plan, agent: Path, target: str) -> Plan:
    """The same sandbox for a runtime that brings a kernel of its own: that kernel has its own /proc, /sys and /dev,
    with nothing of the host in them, and its own filter around itself. The agent comes as a file, since descriptors
    do not reach inside. The host counts that kernel's own threads, not the processes inside, so the number of those
    cannot be limited; what it may take of the host is."""
    binds = tuple(mount for mount in plan.mounts if isinstance(mount, Bind))
    return dataclasses.replace(
        plan,
        mounts=(*binds, Bind(str(agent), target, ("ro", "nosuid", "nodev"))),
        seccomp=virtual_kernel_profile(),
        masked_paths=(),
        shadows=(),
        cgroup=dataclasses.replace(plan.cgroup, pids=VIRTUAL_KERNEL_THREADS),
        lets_go_of_loops=True,
    )


def for_rootless(plan: Plan) -> Plan:
    """The same sandbox, made by a user without rights, in a user namespace in which that user is root.

    Ids are that namespace's. With a range of them the sandbox's root is the user who made it, and the other ids are
    those that the machine gave to that user. With a single one there is nobody else inside, so nobody needs to be root:
    it is an ordinary user there too, without capabilities. Devices are the host's own: only its root can make nodes.
    """
    single = plan.ids.count == 1
    groups = f"{plan.ids.first} {plan.ids.first + plan.ids.count - 1}"
    mounts = tuple(_without_tty_group(mount) if single else mount for mount in plan.mounts)
    named = {"HOME=/root": "HOME=/home/user", "USER=root": "USER=user", "LOGNAME=root": "LOGNAME=user"}
    return dataclasses.replace(
        plan,
        rootless=True,
        mounts=mounts,
        capabilities=() if single else plan.capabilities,
        sysctls=tuple((name, groups if name.endswith("ping_group_range") else value) for name, value in plan.sysctls),
        env=tuple(named.get(variable, variable) if single else variable for variable in plan.env),
        directories=tuple(each for each in plan.directories if not (single and each.path == "/root")),
    )


def _without_tty_group(mount: Mount) -> Mount:
    if isinstance(mount, Kernel) and mount.kind == "devpts":
        return dataclasses.replace(mount, options=mount.options.replace("gid=5,", ""))
    return mount


def _standard_mounts() -> tuple[Mount, ...]:
    return (
        STANDARD_DEVICES,
        # A terminal device belongs to group 5 (tty); 64 terminals are enough for one sandbox.
        Kernel("devpts", "/dev/pts", ("nosuid", "noexec"), "newinstance,ptmxmode=0666,mode=0620,gid=5,max=64"),
        Kernel("tmpfs", "/dev/shm", SAFE, f"mode=1777,size={SHM_BYTES}"),  # noqa: S108
        Kernel("mqueue", "/dev/mqueue", SAFE),
        Kernel("sysfs", "/sys", ("ro", *SAFE)),
        Kernel("proc", "/proc", SAFE),
    )


def _boot_id(sandbox_id: str) -> Shadow:
    """One of its own, or two sandboxes could tell that they share a machine."""
    return Shadow("/proc/sys/kernel/random/boot_id", f"{uuid.uuid5(_NAMESPACE, sandbox_id)}\n")


def _volumes(spec: SandboxSpec) -> list[Bind]:
    binds = []
    for volume in spec.volumes:
        top = volume.path.split("/")[1]
        if top in ("", "proc", "sys", "dev"):
            raise SpecError(f"a volume cannot be mounted on '{volume.path}'", hint="Choose a directory such as /data.")
        binds.append(
            Bind(
                volume.host,
                volume.path,
                ("ro", "nosuid", "nodev") if volume.read_only else ("nosuid", "nodev"),
                through_links=False,
                as_owner=not volume.read_only,
            )
        )
    return sorted(binds, key=lambda bind: bind.target)
