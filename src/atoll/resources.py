"""Default limits of sandboxes, and ceilings for what they may use together, computed for this machine.

These are upper bounds, not reservations: a thousand sandboxes with 4 GiB each may exist as long as they do not all use
it. Their total is bounded by the ceilings of their account (one for each user of a server) and of the whole
installation, which leave enough for the host and for the server itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atoll.errors import EngineUnavailableError, SpecError
from atoll.model import Limits, parse_size

_GIB = 1 << 30
_NONE = ("none", "unlimited")
_SANDBOX = {
    "ATOLL_SANDBOX_MEMORY": "memory_bytes",
    "ATOLL_SANDBOX_CPUS": "cpus",
    "ATOLL_SANDBOX_PIDS": "pids",
    "ATOLL_SANDBOX_DISK": "disk_bytes",
    "ATOLL_SANDBOX_OPEN_FILES": "open_files",
}
_PIDS_FOR_A_CPU = 512
"""The number of processes for each CPU up to which a fork bomb hardly affects others; at twice as many, everything
stalls. Every fork locks the files that a program has mapped, such as its C library, and all programs that use the same
files wait for these locks, in other sandboxes and on the host. The longer the queue for a CPU, the longer each process
holds its lock."""
_PIDS_FOR_EACH = 8
"""An idle sandbox has one process, and a few more while it is used."""
SMALLEST_VOLUME_BYTES = 1 << 20
OPEN_FILES = 4096
"""Enough for browsers and build tools. A thousand sandboxes that open this many stay below the kernel's maximum."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The ceilings of a group of sandboxes. None means no ceiling."""

    memory_bytes: int | None = None
    pids: int | None = None
    """The maximum number of processes, in addition to `pids_for_each` for each sandbox."""
    pids_for_each: int = 0
    """How many processes each sandbox adds to the ceiling of its group, for those that it has even when idle."""
    cpu_weight: int = 100
    """The share of CPU time relative to sibling groups, from 1 to 10,000, as in control groups v2."""


@dataclass(frozen=True, slots=True)
class VolumeSizes:
    """How large volumes are."""

    default_bytes: int = 10 * _GIB
    """The size of a volume for which none was asked."""
    most_bytes: int | None = None
    """The largest size that may be asked for. None: any."""

    def checked(self, size_bytes: int | None) -> int:
        """Return the size of a new volume. Raises SpecError for one that is too small or too large."""
        size = self.default_bytes if size_bytes is None else size_bytes
        if self.most_bytes is not None and size_bytes is None:
            size = min(size, self.most_bytes)
        if size < SMALLEST_VOLUME_BYTES:
            raise SpecError(
                f"a volume has at least {SMALLEST_VOLUME_BYTES:,} bytes, not {size:,}", hint="Ask for more."
            )
        if self.most_bytes is not None and size > self.most_bytes:
            raise SpecError(
                f"a volume has at most {self.most_bytes:,} bytes here, not {size:,}",
                hint="Ask for less, or set ATOLL_VOLUME_MAX_SIZE.",
            )
        return size


@dataclass(frozen=True, slots=True)
class Resources:
    sandbox: Limits
    """The default limits of a sandbox whose spec has none."""
    account: Ceilings
    """The ceilings for all sandboxes of one user of a server."""
    installation: Ceilings
    """The ceilings for all sandboxes of this installation."""
    volumes: VolumeSizes = VolumeSizes()
    """How large named volumes are."""

    @classmethod
    def of_machine(cls, data_dir: Path = Path("/")) -> Resources:
        return sized(_memory(), len(os.sched_getaffinity(0)), _processes(), _disk(data_dir))

    @classmethod
    def load(cls, environ: Mapping[str, str], data_dir: Path) -> Resources:
        """Return the defaults for this machine, changed by environment variables. `none` removes a ceiling."""
        found = cls.of_machine(data_dir)
        given = {field: _value(environ, name) for name, field in _SANDBOX.items() if environ.get(name)}
        try:
            sandbox = Limits(**{**found.sandbox.model_dump(), **given})
        except ValidationError as error:
            detail = error.errors()[0]
            name = next((name for name, field in _SANDBOX.items() if field == detail["loc"][0]), "ATOLL_SANDBOX_…")
            raise _wrong(name, environ.get(name, ""), str(detail["msg"]).removeprefix("Value error, ")) from error
        return cls(
            sandbox,
            _ceilings(environ, "ATOLL_USER", found.account),
            _ceilings(environ, "ATOLL_TOTAL", found.installation),
            _volume_sizes(environ, found.volumes),
        )


def sized(memory_bytes: int, cpus: int, processes: int, disk_bytes: int) -> Resources:
    """Compute the defaults for a machine of this size.

    The lower bounds come from typical work of AI agents: `pip install`, compilers and a headless browser need 512 MiB
    to 4 GiB, and a browser has some hundred threads, each of which counts as a process.
    """
    reserve = min(max(memory_bytes // 8, 512 << 20), 4 * _GIB)
    total = max(memory_bytes - reserve, memory_bytes // 2)
    most = max(processes * 3 // 4, 1024)
    working = min(_PIDS_FOR_A_CPU * cpus, most // 4)
    return Resources(
        sandbox=Limits(
            memory_bytes=min(max(memory_bytes // 4, 512 << 20), 4 * _GIB),
            cpus=float(min(cpus, max(2, cpus // 2))),
            pids=min(2048, working),
            disk_bytes=min(10 * _GIB, max(disk_bytes // 4, 1 * _GIB)),
            open_files=OPEN_FILES,
        ),
        # Half of the total: one user may work hard but cannot prevent all others from starting anything.
        account=Ceilings(total // 2, working, _PIDS_FOR_EACH),
        # The weight is below the default of 100, so that the host and the server take precedence over sandboxes.
        installation=Ceilings(total, working * 4, _PIDS_FOR_EACH, cpu_weight=50),
        volumes=VolumeSizes(min(10 * _GIB, max(disk_bytes // 4, 1 * _GIB))),
    )


def _ceilings(environ: Mapping[str, str], prefix: str, found: Ceilings) -> Ceilings:
    memory, pids, weight = (f"{prefix}_{name}" for name in ("MEMORY", "PIDS", "CPU_WEIGHT"))
    if environ.get(memory):
        found = replace(found, memory_bytes=_number(environ, memory, least=4 << 20))
    if environ.get(pids):
        found = replace(found, pids=_number(environ, pids, least=2), pids_for_each=0)
    if environ.get(weight):
        number = _number(environ, weight, least=1, most=10_000)
        found = replace(found, cpu_weight=100 if number is None else number)
    return found


def _volume_sizes(environ: Mapping[str, str], found: VolumeSizes) -> VolumeSizes:
    if environ.get("ATOLL_VOLUME_MAX_SIZE"):
        most = _number(environ, "ATOLL_VOLUME_MAX_SIZE", least=SMALLEST_VOLUME_BYTES)
        found = replace(found, most_bytes=most)
    if environ.get("ATOLL_VOLUME_SIZE"):
        size = _number(environ, "ATOLL_VOLUME_SIZE", least=SMALLEST_VOLUME_BYTES)
        if size is None:
            raise _wrong("ATOLL_VOLUME_SIZE", environ["ATOLL_VOLUME_SIZE"], "every volume has a size")
        found = replace(found, default_bytes=size)
    return found


def _number(environ: Mapping[str, str], name: str, *, least: int, most: int = 1 << 62) -> int | None:
    value = _value(environ, name)
    if value is None:
        return None
    try:
        number = parse_size(value)
    except ValueError as error:
        raise _wrong(name, value, str(error)) from error
    if not least <= number <= most:
        raise _wrong(name, value, f"it must be at least {least}" if number < least else f"it must be at most {most}")
    return number


def _value(environ: Mapping[str, str], name: str) -> Any:
    return None if environ[name].strip().lower() in _NONE else environ[name].strip()


def _wrong(name: str, value: str, why: str) -> EngineUnavailableError:
    return EngineUnavailableError(f"{name} is '{value}': {why}", hint="Correct it, or write 'none' for no ceiling.")


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processes() -> int:
    """Return the maximum number of processes that the kernel allows at once."""
    found = [32_768]
    for name in ("pid_max", "threads-max"):
        try:
            found.append(int(Path(f"/proc/sys/kernel/{name}").read_text()))
        except (OSError, ValueError):
            continue
    return min(found[1:] or found)


def _disk(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize
