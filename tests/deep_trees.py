"""Trees that are deeper than any path."""

from __future__ import annotations

import os
from pathlib import Path


def make_deep(top: Path, levels: int, name: bytes = b"d") -> None:
    """So many directories in one another, below one that is there."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
