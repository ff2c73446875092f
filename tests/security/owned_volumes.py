"""Volumes that belong to an ordinary user of the host, and what a sandbox left on them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

OWNER, GROUP = 4321, 5432
MAPPED = pytest.mark.parametrize("target", ["native", "runc", "runsc"], indirect=True)
SUPERVISED = pytest.mark.parametrize("target", ["native", "runc"], indirect=True)


def special(folder: Path) -> list[str]:
    """What must not lie on the host, in words."""
    found = []
    for path in [folder, *folder.rglob("*")]:
        info = path.lstat()
        if stat.S_ISREG(info.st_mode) and info.st_mode & (stat.S_ISUID | stat.S_ISGID):
            found.append(f"{path.name}: {info.st_mode:o} of {info.st_uid}")
        if info.st_uid == 0 or info.st_gid == 0:
            found.append(f"{path.name} belongs to {info.st_uid}:{info.st_gid}")
        if not path.is_symlink() and "security.capability" in os.listxattr(path):
            found.append(f"{path.name} has capabilities")
    return found


def volume_of(place: Path, owner: int = OWNER, group: int = GROUP) -> Path:
    path = place / "volume"
    path.mkdir()
    os.chown(path, owner, group)
    path.chmod(0o777)
    return path
