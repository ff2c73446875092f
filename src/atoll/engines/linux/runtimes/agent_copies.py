"""The copy of the agent that a sandbox with a kernel of its own runs from.

Saved memory refers to the agent's file, and processes go on only over the same bytes. So the name of the copy is noted
where the sandbox runs, moves into the directory of its memory, and the copy is used again when that memory is restored,
whatever agent this version of Atoll has.

    <run>/agent        the name of the copy below `programs`, while the sandbox runs
    <memory>/agent     the same, for memory on the disk

Without a note, as with what was made before there were any, it is the copy that was the newest one at that time.
"""

from __future__ import annotations

import re
from pathlib import Path

from atoll.engines.linux.layout import SandboxLayout

NOTE = "agent"
_MODE = 0o755
_NAME = re.compile(r"atoll-agent-[0-9a-f]{16}-755")
_BUNDLE, _IMAGE = "config.json", "checkpoint.img"
"""Files that are as old as the start of a sandbox, and as its memory."""


def chosen(layout: SandboxLayout, sandbox_id: str, memory: Path | None) -> Path:
    """The copy for a sandbox that is about to start, with its processes from this directory. It is noted."""
    path = _noted(layout, memory / NOTE, memory / _IMAGE) if memory is not None else None
    path = path or layout.agent(_MODE)
    (layout.run(sandbox_id) / NOTE).write_text(path.name)
    return path


def note_in(layout: SandboxLayout, sandbox_id: str, memory: Path) -> None:
    """For the memory of a running sandbox, which has just been written to this directory."""
    run = layout.run(sandbox_id)
    path = _noted(layout, run / NOTE, run / _BUNDLE)
    if path is not None:
        (memory / NOTE).write_text(path.name)


def _noted(layout: SandboxLayout, note: Path, dated: Path) -> Path | None:
    try:
        name = note.read_text()
    except OSError:
        return _newest_before(layout, dated)
    path = layout.programs / name
    return path if _NAME.fullmatch(name) and path.exists() else None


def _newest_before(layout: SandboxLayout, dated: Path) -> Path | None:
    try:
        moment = dated.stat().st_mtime_ns
        copies = {path: path.stat().st_mtime_ns for path in layout.programs.iterdir() if _NAME.fullmatch(path.name)}
    except OSError:
        return None
    return max((path for path, made in copies.items() if made <= moment), key=copies.__getitem__, default=None)
