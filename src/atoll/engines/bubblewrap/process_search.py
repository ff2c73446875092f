"""Finding the processes of a sandbox without its record, by what the kernel says about them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from atoll.engines.host.process_ref import ProcessRef, each_process

MAKING = "ATOLL_MAKING"
"""The variable of bubblewrap itself, never of the sandbox, that names the work directory."""


def find(work: Path) -> set[ProcessRef]:
    """Bubblewrap at work on the sandbox with this work directory, and whoever has the directory among their mounts."""
    mounted = _as_mounted(work)
    everyone = (ProcessRef.of(pid) for pid in each_process())
    return {process for process in everyone if process and (_makes(process.pid, work) or _has(process.pid, mounted))}


def _makes(pid: int, work: Path) -> bool:
    """It is in the environment, which others cannot read; earlier versions had it on the command line."""
    if f"{MAKING}={work}".encode(errors="surrogateescape") in _read(f"/proc/{pid}/environ").split(b"\0"):
        return True
    words = _read(f"/proc/{pid}/cmdline").split(b"\0")
    return b"--as-pid-1" in words and os.fsencode(work) in words


def _has(pid: int, mounted: tuple[bytes, bytes] | None) -> bool:
    if mounted is None:
        return False
    lines = _read(f"/proc/{pid}/mountinfo").splitlines()
    return any(tuple(line.split(b" ", 4)[2:4]) == mounted for line in lines)


def _as_mounted(path: Path) -> tuple[bytes, bytes] | None:
    """The device and the path within it, as a mount table shows them, where paths begin at the file system."""
    wanted = _escaped(os.fsencode(os.path.realpath(path)))
    best: tuple[int, bytes, bytes] | None = None
    for line in _read("/proc/self/mountinfo").splitlines():
        _, _, device, root, point, _ = line.split(b" ", 5)
        prefix = point.rstrip(b"/")
        # Of two mounts on one directory the later one is seen.
        if wanted.startswith(prefix + b"/") and (best is None or len(prefix) >= best[0]):
            best = (len(prefix), device, root.rstrip(b"/") + wanted[len(prefix) :])
    return (best[1], best[2]) if best else None


def _escaped(path: bytes) -> bytes:
    return re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % found[0][0], path)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
