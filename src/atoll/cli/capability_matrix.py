"""The table of `atoll doctor` that shows what each engine can enforce and offer on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from atoll.engines.diagnosis import EngineLevel
from atoll.model import Capability

ROWS: dict[str, Capability | Callable[[EngineLevel], bool]] = {
    "isolated": Capability.ISOLATION,
    "own kernel": lambda level: level.isolation in ("gvisor", "vm"),
    "memory limit": Capability.MEMORY,
    "CPU limit": Capability.CPUS,
    "process limit": Capability.PIDS,
    "disk limit": Capability.DISK,
    "inode limit": Capability.INODES,
    "open files limit": Capability.OPEN_FILES,
    "size of /dev/shm": Capability.SHM,
    "change limits": lambda level: bool(level.changeable_limits),
    "network policies": Capability.NETWORK,
    "images": Capability.IMAGES,
    "volumes (writable)": Capability.VOLUMES,
    "named volumes": Capability.NAMED_VOLUMES,
    "users inside": Capability.USERS,
    "pause": Capability.PAUSE,
    "checkpoints, forks": Capability.CHECKPOINTS,
    "saved memory": Capability.SAVED_MEMORY,
}
"""What each row says about an engine. Every capability has a row."""
_ABREAST = 6
"""How many engines fit side by side into 80 columns."""


def has(level: EngineLevel, row: str) -> bool:
    asked = ROWS[row]
    return asked in level.capabilities if isinstance(asked, Capability) else asked(level)


def tables(levels: Sequence[EngineLevel]) -> Iterator[Table]:
    """Yield tables of at most 80 columns: a row for each ability, and a column for each engine and isolation level."""
    for first in range(0, len(levels), _ABREAST):
        abreast = levels[first : first + _ABREAST]
        title = "\nWhat each engine can enforce and offer here" if first == 0 else ""
        table = Table(title=title or None, title_justify="left", box=None, padding=(0, 1))
        table.add_column("")
        for level in abreast:
            table.add_column(title_of(level), header_style="bold")
        for row in ROWS:
            table.add_row(row, *("[green]yes[/]" if has(level, row) else "no" for level in abreast))
        yield table


def title_of(level: EngineLevel) -> str:
    """The engine's name, and below it the isolation level where that is a stronger one than namespaces."""
    return level.engine if level.isolation in (None, "namespaces") else f"{level.engine}\n{level.isolation}"


def reasons(levels: Sequence[EngineLevel]) -> Iterator[str]:
    """Yield why engines lack capabilities, as far as that is known."""
    names = {asked: row for row, asked in ROWS.items() if isinstance(asked, Capability)}
    for level in levels:
        for capability, why in level.missing.items():
            yield f"{title_of(level).replace(chr(10), ' ')}: {names[capability]}: {why}"


def as_json(levels: Sequence[EngineLevel]) -> list[dict[str, object]]:
    return [
        {
            "engine": level.engine,
            "isolation": level.isolation,
            "capabilities": sorted(level.capabilities),
            "changeable_limits": sorted(level.changeable_limits),
            "missing": {capability.value: why for capability, why in level.missing.items()},
        }
        for level in levels
    ]
