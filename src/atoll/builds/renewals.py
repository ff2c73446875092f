"""What `--no-cache` leaves behind: steps that were done again have other keys from then on.

A step is never replaced, because sandboxes and images may be in the middle of using it. So a build without the cache
gives the first step of each stage a new key, and writes the difference down for later builds, which then find the new
steps.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from atoll import durable

_KEY = re.compile(r"[0-9a-f]{64}")
_SALT = re.compile(r"[0-9a-f]{32}")
_KEPT_S = 90 * 86400.0


class Renewals:
    """Files in a directory, one for each first step. The methods block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, key: str) -> str:
        """Return what is added to the key of a first step, or "" if nothing is."""
        try:
            text = self._path(key).read_text()
        except FileNotFoundError:
            return ""
        with contextlib.suppress(OSError):
            os.utime(self._path(key))
        return text if _SALT.fullmatch(text) else ""

    def keep(self, key: str, salt: str) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.write(self._path(key), salt, sync=True)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key[:80]!r} is not the key of a step")
        return self._directory / key


def remove_unused(directory: Path) -> None:
    """Remove the files of a directory that were not used in 90 days."""
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _KEPT_S:
                    path.unlink()
