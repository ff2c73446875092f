"""The command line of bubblewrap, as a pure function of the spec.

The sandbox's root is an empty, read-only tmpfs of bubblewrap's. On it are mounted, read-only, the host's `/usr` (with
the links that lead into it), a small `/etc` and the agent. Only the sandbox's own three directories, its volumes and a
`/dev/shm` of limited size are writable. Every namespace is new: there is no network but loopback, and processes,
message queues and host names of others are not visible. The only user inside is an ordinary one, who has no Linux
capability and cannot get any: bubblewrap sets `no_new_privs`, file systems are mounted `nosuid`, and further user
namespaces are disabled. The system call filter is that of the other engines. Code that may write to a volume cannot
make a file there set-uid, because that would be a set-uid program of the host.

bubblewrap itself is started by the agent's `--as`, which leaves the session keyring, disables core dumps and gives
`/usr` and `/etc` inodes of their own (`native/agent/fresh.c`).

The environment may hold secrets, and every user of the host can read the command line of a process. So everything but
the agent's own arguments is passed through a descriptor (`hidden_arguments`).
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.bubblewrap.base_files import HOME, UID
from atoll.engines.host.confinement import bpf
from atoll.engines.host.confinement.seccomp import profile
from atoll.errors import SpecError
from atoll.model import SandboxSpec
from atoll.model.spec import SHM_BYTES

AGENT = "/run/atoll/agent"
_LONGEST_S = 1e9
_RESERVED = (
    "/proc",
    "/dev",
    "/sys",
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/run/atoll",
)


@dataclass(frozen=True, slots=True)
class Mount:
    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Descriptors:
    listener: int
    """The socket that the agent serves."""
    info: int
    """Where bubblewrap writes the id of the first process inside."""
    hidden: int
    """Where bubblewrap reads the hidden arguments."""
    hosts: int | None
    """Where bubblewrap reads an /etc/hosts, if the sandbox has a host name of its own."""
    filter: int
    """Where bubblewrap reads the system call filter."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Everything besides the spec that the command line depends on."""

    home: Path
    """The sandbox's directory, with `work`, `home` and `tmp`."""
    base: Path
    """The directory with `etc` and `agent`, and with the host's `/usr` for processes started with `--own-files`."""
    links: Mapping[str, str]
    """Top-level links of the host that lead into /usr, such as /lib → usr/lib."""
    directories: tuple[str, ...]
    """The other top-level directories of these names, on hosts where /usr is not merged."""
    fds: Descriptors
    covered: tuple[str, ...] = ()
    """Files of /proc that reveal facts about the machine and exist here. An empty file is mounted over each."""


TELLING = ("buddyinfo", "cmdline", "config.gz", "diskstats", "interrupts", "key-users", "keys", "partitions")
"""Files of /proc that are worth hiding although every user of the machine may read them."""


def arguments(spec: SandboxSpec, around: Surroundings) -> list[str]:
    """Return the arguments for bubblewrap, without its own name. The command in the sandbox is the agent, as process
    1."""
    agent = [AGENT, "--listen-fd", str(around.fds.listener), "--work-dir", spec.directory]
    if spec.limits.open_files is not None:
        agent += ["--rlimit-nofile", str(spec.limits.open_files)]
    if spec.limits.lifetime_s is not None:
        agent += ["--lifetime-ms", str(max(1, round(min(spec.limits.lifetime_s, _LONGEST_S) * 1000)))]
    return [
        *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup"),
        *("--disable-userns", "--cap-drop", "ALL", "--uid", str(UID), "--gid", str(UID)),
        *("--as-pid-1", "--hostname", spec.hostname, "--info-fd", str(around.fds.info)),
        *("--seccomp", str(around.fds.filter)),
        *_system(around, spec.limits.shm_bytes or SHM_BYTES),
        *_binds(_own_directories(spec, around)),
        *_binds(volumes(spec)),
        *("--remount-ro", "/", "--chdir", spec.directory),
        *("--args", str(around.fds.hidden), "--", *agent),
    ]


def hidden_arguments(before: Iterable[str], environment: Mapping[str, str]) -> bytes:
    """Return the arguments that bubblewrap reads from a descriptor: those before that descriptor, and the
    environment."""
    words = [*before, "--clearenv"]
    for name, value in environment.items():
        words += ["--setenv", name, value]
    return b"".join(os.fsencode(word) + b"\0" for word in words)


@functools.cache
def call_filter(*, refuses_set_id: bool) -> bytes:
    """Return the filter of system calls in the format that bubblewrap takes.

    With `refuses_set_id` no file can become set-uid: it could be a file of the host.
    """
    return bpf.assemble(profile("refused" if refuses_set_id else "allowed"), platform.machine())


def _system(around: Surroundings, shm_bytes: int) -> list[str]:
    words = ["--ro-bind", f"{around.base}/usr", "/usr"]
    for path in around.directories:
        words += ["--ro-bind", path, path]
    for path, target in around.links.items():
        words += ["--symlink", target, path]
    words += ["--ro-bind", f"{around.base}/etc", "/etc", "--ro-bind", f"{around.base}/agent", AGENT]
    if around.fds.hosts is not None:
        words += ["--perms", "0644", "--ro-bind-data", str(around.fds.hosts), "/etc/hosts"]
    # bubblewrap's /dev is a tmpfs without a size limit; only /dev/shm has to be writable.
    words += ["--proc", "/proc"]
    for name in around.covered:
        words += ["--ro-bind", f"{around.base}/nothing", f"/proc/{name}"]
    words += ["--dev", "/dev", "--size", str(shm_bytes), "--perms", "1777", "--tmpfs", "/dev/shm"]  # noqa: S108
    return [*words, "--remount-ro", "/dev", "--symlink", "/tmp", "/var/tmp"]  # noqa: S108


def _own_directories(spec: SandboxSpec, around: Surroundings) -> list[Mount]:
    own = {HOME: "home", "/tmp": "tmp", spec.directory: "work"}  # noqa: S108
    return [Mount(f"{around.home}/{name}", target, False) for target, name in own.items()]


def _binds(mounts: Iterable[Mount]) -> list[str]:
    """Return the arguments for mounts. A mount inside another one has to come after it."""
    words: list[str] = []
    for mount in sorted(mounts, key=lambda mount: mount.target.count("/")):
        words += ["--ro-bind" if mount.read_only else "--bind", mount.source, mount.target]
    return words


def check_targets(spec: SandboxSpec) -> None:
    """Raise SpecError for paths that would cover what the sandbox's isolation and programs depend on."""
    targets = [volume.path for volume in spec.volumes]
    for target in [spec.directory, *targets]:
        if target == "/" or any(is_inside(target, reserved) or is_inside(reserved, target) for reserved in _RESERVED):
            raise SpecError(
                f"'{target}' in the sandbox is reserved", hint=f"Choose a path outside {', '.join(_RESERVED)}."
            )
    if len(set(targets)) != len(targets):
        raise SpecError("two volumes have the same path in the sandbox")


def volumes(spec: SandboxSpec) -> list[Mount]:
    """Return the volumes with their resolved sources. Raises SpecError for a source that does not exist."""
    mounts = []
    for volume in spec.volumes:
        try:
            source = os.path.realpath(volume.host, strict=True)
        except OSError as error:
            raise SpecError(f"the volume '{volume.host}' cannot be used: {error.strerror}") from error
        mounts.append(Mount(source, volume.path, volume.read_only))
    return mounts


def is_inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
