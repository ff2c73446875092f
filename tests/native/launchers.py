"""Launchers of the engine `native`, as part of what a sandbox or its making may leave behind."""

from __future__ import annotations

import os
from pathlib import Path

import leftovers
from atoll.engines.host import process_ref
from atoll.engines.linux.native_engine import NativeEngine

_of_others: set[int] = set()
"""Launchers that other tests of this process keep waiting."""


def note_those_of_others() -> None:
    """Count the launchers that are there now as those of other tests."""
    _of_others.clear()
    _of_others.update(_launchers())


def left_behind(engine: NativeEngine) -> list[str]:
    """Return processes, mounts, control groups and files that only a sandbox or its making has."""
    return leftovers.left_behind(engine) + [f"launcher {pid}" for pid in _launchers() - _of_others]


def _launchers() -> set[int]:
    return {pid for pid in process_ref.descendants(os.getpid()) if _is_launcher(pid)}


def _is_launcher(pid: int) -> bool:
    try:
        return "atoll-native" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return False
