"""Finds out whether the engine can work on this machine: what is missing, and whether a test sandbox is really
isolated."""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll import agent_binary
from atoll.engines.contract import Engine
from atoll.engines.host import process_ref
from atoll.engines.linux.native import launcher_process
from atoll.engines.linux.plan.id_ranges import FIRST
from atoll.engines.linux.plan.sandbox_plan import CAPABILITIES, CAPABILITY_BITS
from atoll.errors import EngineUnavailableError, SandboxError
from atoll.model import Capability, SandboxSpec
from atoll.model.state import Availability
from atoll.settings import Settings

_MACHINES = ("x86_64", "aarch64")
_STAMP = "native-tested"
_SWITCHES = {
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}
"""Settings that forbid user namespaces: the file, the content that does, and the remedy."""
_OLDEST_KERNEL = (5, 12)
"""The first version of Linux with id-mapped mounts."""


class ProbedEngine(Engine, Protocol):
    def first_pid(self, sandbox_id: str) -> int:
        """Return the host's id of the sandbox's first process."""

    def about(self) -> tuple[str, ...]:
        """Return remarks for users about sandboxes on this machine."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The properties that the kernel must report of a sandbox's first process."""

    capabilities: tuple[str, ...] = CAPABILITIES
    lowest_id: int = FIRST
    """Lower host ids belong to other users of the host."""
    no_groups: bool = True


def expected(ordinary: bool, single: bool) -> Expected:
    if not ordinary:
        return Expected()
    # Root inside is the user outside. With a single id the kernel does not allow dropping groups.
    return Expected(() if single else CAPABILITIES, os.geteuid(), no_groups=not single)


def problems() -> dict[str, str]:
    """Return the problems of this machine, each with a remedy. Changes nothing."""
    if sys.platform != "linux":
        return {"it needs Linux": "Use engine 'docker'."}
    found = {}
    if os.uname().machine not in _MACHINES:
        found[f"it does not support the architecture '{os.uname().machine}'"] = "Use engine 'docker'."
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdecimal())
    if release < _OLDEST_KERNEL:
        found[f"Linux {os.uname().release} is too old: it needs 5.12"] = "Use engine 'bubblewrap'."
    if os.geteuid() != 0:
        for path, (off, remedy) in _SWITCHES.items():
            with suppress(OSError):
                if Path(path).read_text().strip() == off:
                    found[f"ordinary users may not make user namespaces ({path} is {off})"] = f"As root: '{remedy}'."
    for name in ("atoll-native", "atoll-agent"):
        if not os.access(Path(agent_binary.__file__).parent / "bin" / name, os.X_OK):
            found[f"the program '{name}' is missing"] = (
                "In a working copy run 'make agent'; otherwise install the package again."
            )
    return found


_DEFAULT = Expected()


async def try_walls(engine: ProbedEngine) -> None:
    """Make a sandbox, check its first process as the kernel reports it, and delete it. Raises SandboxError if the
    sandbox cannot be made or would not be isolated."""
    handle = await engine.create(f"probe-{os.urandom(6).hex()}", SandboxSpec())
    try:
        description = await engine.describe()
        wanted = expected(os.geteuid() != 0, Capability.USERS not in description.capabilities)
        broken = broken_walls(Path(f"/proc/{engine.first_pid(handle.sandbox_id)}"), wanted)
    finally:
        await engine.delete(handle)
        await engine.aclose()
    if broken:
        raise EngineUnavailableError(f"a sandbox made here would not be safe: {'; '.join(broken)}")


def broken_walls(process: Path, wanted: Expected = _DEFAULT) -> list[str]:
    """Return the faults in the isolation of a sandbox's first process. `process` is its directory in /proc."""
    lines = (line.partition(":") for line in (process / "status").read_text().splitlines())
    status = {name: value.split() for name, _, value in lines}
    mask = f"{sum(1 << CAPABILITY_BITS[name] for name in wanted.capabilities):016x}"
    right = {
        "Seccomp": ["2"], "NoNewPrivs": ["1"], "CapEff": [mask], "CapPrm": [mask], "CapBnd": [mask],
        "CapInh": ["0" * 16], "CapAmb": ["0" * 16],
    }  # fmt: skip
    if wanted.no_groups:
        right["Groups"] = []
    found = [f"{name} is {status.get(name)}" for name, value in right.items() if status.get(name) != value]
    found += [f"{name} is one of the host's" for name in ("Uid", "Gid") if int(status[name][0]) < wanted.lowest_id]
    found += [
        f"the {name} namespace is the host's"
        for name in ("user", "mnt", "pid", "ipc", "uts", "net", "cgroup")
        if os.readlink(process / "ns" / name) == os.readlink(f"/proc/self/ns/{name}")
    ]
    table = (process / "mountinfo").read_text()
    if "upperdir=" in table:
        found.append("the mount table shows paths of the host")
    if any(path.startswith("/") and not path.endswith("/null") for path in _opened(process)):
        found.append("files of the host were left open")
    return found


def _opened(process: Path) -> list[str]:
    found = []
    try:
        paths = list((process / "fd").iterdir())
    except PermissionError:
        if os.geteuid() == 0:
            raise
        return []  # without a root inside, only the host's root may see the descriptors of the process
    for path in paths:
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(path))
    return found


def probe(engine: ProbedEngine, settings: Settings, *, thorough: bool) -> Availability:
    """Find out whether the engine is available. Missing parts are checked in every call. Isolation is tested once after
    each boot of the machine, and in each thorough call."""
    missing = problems()
    if missing:
        return Availability(engine.name, False, tuple(missing), tuple(missing.values()))
    stamp, now = settings.run_dir / _STAMP, _version()
    if thorough or _read(stamp) != now:
        try:
            with ThreadPoolExecutor(1) as pool:  # there may be an event loop in this thread
                pool.submit(asyncio.run, try_walls(engine)).result()
        except SandboxError as error:
            stamp.unlink(missing_ok=True)
            return Availability(engine.name, False, (error.reason,), ((error.hint,) if error.hint else ()))
        with suppress(OSError):
            stamp.write_text(now)
    return Availability(engine.name, True, ("Atoll's own launcher, no OCI runtime", *engine.about()))


def _version() -> str:
    """Return a text that identifies what was tested: the boot of the machine and the versions of Atoll's programs."""
    paths = [launcher_process.program(), agent_binary.path()]
    return " ".join((process_ref.boot_id(), *(str(path.stat().st_mtime_ns) for path in paths)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
