"""The plan of a sandbox on Linux, as plain data. `make_plan` is pure, and the launchers that execute a plan decide
nothing themselves.

Theory of operation. A sandbox is a process tree in its own namespaces, over its own file tree, with fewer rights than
its root user seems to have. Each of these walls holds without the others:

* **User namespace.** The sandbox's ids are a range of 65,536 host ids that no other sandbox and no user of the host
  has. Root inside has no rights outside. Image files keep their ids on disk and are mapped when they are mounted, so
  nothing is copied or chowned.
* **Mount namespace.** The root is an overlay, mounted inside the sandbox's own mount namespace, so it vanishes with
  it. The root directory is one level *below* the overlay's mount point, so that no mount table inside shows the overlay
  or a path of the host.
* **PID, IPC, UTS, network, cgroup namespaces.** IPC, UTS and network belong to the host's user namespace, not to
  the sandbox's. Root inside has no power over them, and cannot write to any of their files under `/proc/sys`; files of
  the PID namespace there are shadowed. Low ports such as 80 and `ping` are allowed by two settings of the network
  namespace instead of by Linux capabilities.
* **Linux capabilities.** There are seven, none of which has an effect outside: CHOWN, DAC_OVERRIDE, FOWNER, FSETID (a
  package manager changes owners and modes), SETUID, SETGID (`su`, dropping rights), KILL (ending the process of another
  user inside).
* **Seccomp**: the system call filter, see `seccomp.py`. **No new privileges**: set-uid files have no effect.
* **Named volumes**: their files have the ids that they have inside, and are reachable only for the host's root.
* **Writable directories of the host**: root inside acts as their owner on disk, who is never the host's root, and no
  set-id bit can be set there.
* **Masked paths**: files that reveal properties of the machine in `/proc` and `/sys`.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from atoll.engines.host.cgroups.group_limits import VIRTUAL_KERNEL_THREADS, CgroupLimits
from atoll.engines.host.confinement import masks
from atoll.engines.host.confinement.seccomp import Profile, profile, virtual_kernel_profile
from atoll.engines.host.environment import default_environment
from atoll.errors import SpecError
from atoll.model import SandboxSpec, default_user
from atoll.model.spec import SHM_BYTES
from atoll.resources import OPEN_FILES

Namespace = Literal["user", "mount", "pid", "ipc", "uts", "net", "cgroup"]
Flag = Literal["ro", "nosuid", "nodev", "noexec"]

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "KILL")
CAPABILITY_BITS = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7,
}  # fmt: skip
RANGE = 65_536
DEFAULT_ENV = default_environment("/root", "root")


@dataclass(frozen=True, slots=True)
class IdRange:
    """Host ids `first` to `first + count - 1`, which are the sandbox's ids from `inner` on."""

    first: int
    count: int = RANGE
    inner: int = 0
    """The id inside the sandbox to which `first` is mapped."""
    first_alone: bool = False
    """Whether the first id is not from the same range as the rest, so that the kernel needs a line for each."""

    @property
    def mapping(self) -> str:
        """The content of `/proc/PID/uid_map`."""
        if self.first_alone:
            return f"{self.inner} {self.first} 1\n{self.inner + 1} {self.first + 1} {self.count - 1}\n"
        return f"{self.inner} {self.first} {self.count}\n"


@dataclass(frozen=True, slots=True)
class Root:
    """The overlay. Its top directory holds `inner`, which is the sandbox's root directory, and nothing else of use."""

    lowers: tuple[Path, ...]
    """The lower layers, topmost first, mounted read-only with mapped ids."""
    upper: Path
    """The directory with `upper` and `work`, mounted with mapped ids."""
    inner: str
    usr: Path | None = None
    """The host's /usr, mounted read-only if the image has none. The sandbox cannot read files there that only the
    host's root may read."""
    copies: Path | None = None
    """A layer to mount over /usr, see `host_copies`."""


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class DeviceDirectory:
    """A tmpfs on /dev in which only the host's root can make devices. It is the only mount without `nodev`."""

    devices: tuple[Device, ...]
    links: tuple[tuple[str, str], ...]
    target: str = "/dev"
    flags: tuple[Flag, ...] = ("nosuid", "noexec")
    size_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Kernel:
    """A file system that the kernel provides."""

    kind: Literal["proc", "sysfs", "devpts", "mqueue", "tmpfs"]
    target: str
    flags: tuple[Flag, ...]
    options: str = ""


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory or file of the host that is mounted: a volume, or a file that Atoll provides."""

    source: str
    target: str
    flags: tuple[Flag, ...]
    through_links: bool = True
    """Whether the path of the source may go through symbolic links. It must not where a sandbox could have made
    them."""
    as_owner: bool = False
    """Whether root inside acts as the owner of the source on disk, who is never the host's root. Otherwise ids inside
    and on disk are the same."""


Mount = DeviceDirectory | Kernel | Bind


@dataclass(frozen=True, slots=True)
class Rlimit:
    name: str
    value: int
    """Both the soft and the hard limit, because a soft limit alone could be raised."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that is made if it is missing."""

    path: str
    mode: int = 0o755


@dataclass(frozen=True, slots=True)
class Shadow:
    """A file of /proc that the sandbox could write to. It sees a read-only file with this content instead."""

    path: str
    content: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    machine: str = "x86_64"
    cpus: int = 1
    hide_unified_cgroup: bool = False
    """Whether the host has control groups of both versions and the OCI runtime must not see the mount of v2, which
    would confuse it."""


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
    """The members of `namespaces` that belong to the host's user namespace."""
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
    """Whether the OCI runtime keeps a copy of the host's mounts while the sandbox runs. File systems on loop devices
    must then be unmounted from it, so that the host can release them."""
    rootless: bool = False
    """Whether an ordinary user of the host makes the sandbox, see `for_rootless`."""
    labels: dict[str, str] = field(default_factory=dict)
    shm_bytes: int = SHM_BYTES
    """The size of /dev/shm."""
    network_path: str | None = None
    """The path of an existing network namespace to use. None: a new, empty one."""

    @property
    def is_supervised(self) -> bool:
        """Whether the sandbox needs a supervisor that decides about set-id bits, because it may write to a volume."""
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
"""The two settings of a PID namespace. It is the only namespace with settings that the sandbox's user namespace must
own, so they would be writable."""

_NAMESPACE = uuid.UUID("4f6b2a52-8a55-4d1e-9a3c-3f1f3f0a7c11")

_NO_VOLUMES: Mapping[str, Path] = MappingProxyType({})
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
    named: Mapping[str, Path] = _NO_VOLUMES,
) -> Plan:
    """Compute the plan of a sandbox.

    `env` are the variables of the image; those of the spec take precedence. `files` are mounts that Atoll adds, `named`
    are the directories of the named volumes. Raises SpecError for a volume that would cover /proc, /sys or another part
    of the isolation.
    """
    limits = spec.limits
    ours = {"HOSTNAME": spec.hostname}
    variables = DEFAULT_ENV | (env or {}) | ours | spec.env | {"ATOLL_SANDBOX_ID": sandbox_id}
    return Plan(
        sandbox_id=sandbox_id,
        machine=facts.machine,
        root=root,
        ids=ids,
        mounts=(*_standard_mounts(limits.shm_bytes or SHM_BYTES), *files, *_volumes(spec, named)),
        directories=(_work_dir(spec), Directory("/tmp", 0o1777), Directory("/root", 0o700)),  # noqa: S108
        namespaces=frozenset(("user", "mount", "pid", "ipc", "uts", "net", "cgroup")),
        host_owned=frozenset(("ipc", "uts", "net")),
        capabilities=CAPABILITIES,
        seccomp=profile("supervised" if spec.has_writable_volume else "contained" if spec.volumes else "allowed"),
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
        cwd=spec.directory,
        hide_unified_cgroup=facts.hide_unified_cgroup,
        shm_bytes=limits.shm_bytes or SHM_BYTES,
    )


def for_virtual_kernel(plan: Plan, agent: Path, target: str) -> Plan:
    """Adapt a plan to an OCI runtime with a kernel of its own, and return the new one.

    That kernel provides /proc, /sys and /dev, with nothing of the host in them, and has a system call filter of its
    own. The agent is mounted as a file, since descriptors cannot be passed inside. The host sees the threads of that
    kernel and not the processes inside, so the number of processes cannot be limited; the number of those threads is.
    """
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
    """Adapt a plan to an ordinary user of the host, who makes the sandbox in a user namespace in which that user is
    root, and return the new one.

    Ids are those of that namespace. If it has a range of ids, the sandbox's root is the user who made it, and the other
    ids are those that the machine gave to that user. With a single id there is no other user inside, so no root is
    needed: the only user inside is an ordinary one, without Linux capabilities. Device files are those of the host,
    because only the host's root can make new ones.
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


def _standard_mounts(shm_bytes: int) -> tuple[Mount, ...]:
    return (
        STANDARD_DEVICES,
        # A terminal device belongs to group 5 (tty); 64 terminals are enough for one sandbox.
        Kernel("devpts", "/dev/pts", ("nosuid", "noexec"), "newinstance,ptmxmode=0666,mode=0620,gid=5,max=64"),
        Kernel("tmpfs", "/dev/shm", SAFE, f"mode=1777,size={shm_bytes}"),  # noqa: S108
        Kernel("mqueue", "/dev/mqueue", SAFE),
        Kernel("sysfs", "/sys", ("ro", *SAFE)),
        Kernel("proc", "/proc", SAFE),
    )


def _work_dir(spec: SandboxSpec) -> Directory:
    """Return the work directory. If it has to be made and commands are not run by root, every user inside may use
    it."""
    return Directory(spec.directory, 0o755 if default_user(spec) is None else 0o1777)


def _boot_id(sandbox_id: str) -> Shadow:
    """Return a boot id that is specific to the sandbox. With the real one, two sandboxes could find out that they share
    a machine."""
    return Shadow("/proc/sys/kernel/random/boot_id", f"{uuid.uuid5(_NAMESPACE, sandbox_id)}\n")


def _volumes(spec: SandboxSpec, named: Mapping[str, Path]) -> list[Bind]:
    binds = []
    for volume in spec.volumes:
        top = volume.path.split("/")[1]
        if top in ("", "proc", "sys", "dev"):
            raise SpecError(f"a volume cannot be mounted on '{volume.path}'", hint="Choose a directory such as /data.")
        binds.append(
            Bind(
                str(named[volume.name]) if volume.name else volume.host,
                volume.path,
                ("ro", "nosuid", "nodev") if volume.read_only else ("nosuid", "nodev"),
                through_links=False,
                as_owner=bool(volume.host) and not volume.read_only,
            )
        )
    return sorted(binds, key=lambda bind: bind.target)
