"""What sandboxes left behind on this machine, which should be nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.engines.host.cgroups.account_groups import ACCOUNT
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.engines.host.process_ref import each_process
from atoll.settings import Settings

if TYPE_CHECKING:
    from atoll.engines.linux.engine import LinuxEngine

_SHARED = (".base", ".users")
_OF_SANDBOXES = (
    *("*/.users/*", "*/.base/.*", "oci/sandboxes/*", "oci/ids/*", "oci/*/.*.*", "layers/*", "pool/layers/*"),
    "builds/drafts/*",  # beside it are caches
)
_NOT_OF_ENGINES = ("oci", "images", "layers", "pool", "manager", "openhands", "builds")
"""Directories beside those of the engines `process` and `unsafe-none`, whose every entry is a sandbox."""


def leftovers(settings: Settings) -> list[str]:
    """Every file, socket, control group, mount and process that belongs to a sandbox of these settings."""
    homes = [path for path in settings.data_dir.glob("*/*") if path.parent.name not in _NOT_OF_ENGINES]
    found = [path for path in homes if path.name not in _SHARED]
    for pattern in _OF_SANDBOXES:
        found += settings.data_dir.glob(pattern)
    found += settings.run_dir.glob("*/*")
    marker = os.fsencode(settings.data_dir)
    processes = [f"process {pid}" for pid in each_process() if pid != os.getpid() and _names(pid, marker)]
    return [*map(str, found), *_groups(settings), *processes]


def left_behind(engine: LinuxEngine) -> list[str]:
    """Mounts, control groups and files that only a sandbox of this engine has."""
    places = engine.layout
    found = [str(path) for name in ("ids", "sandboxes") for path in (places.data / name).glob("*")]
    found += [str(path) for path in (places.settings.run_dir / "oci").glob("*")]
    found += [str(path.parent) for path in places.group("x").directories() if path.parent.exists()]
    marker = str(places.settings.data_dir)
    return found + [line for line in Path("/proc/self/mounts").read_text().splitlines() if marker in line]


async def emptied(engine: LinuxEngine) -> None:
    """Delete all sandboxes of the engine, and close it."""
    for handle in await engine.list():
        await engine.delete(handle)
    await engine.gc()
    await engine.aclose()


def _groups(settings: Settings) -> list[str]:
    """Those of single sandboxes; the ones around them, of accounts and of all, go when the engine is closed."""
    name = settings.data_dir / "installation-id"
    if not name.exists():
        return []
    around = Group(Hierarchy.find(), f"/atoll-{name.read_text()[:12]}")
    found = [path for group in around.directories() for path in (*group.glob("*/"), *group.glob(f"{ACCOUNT}*/*/"))]
    return sorted(str(path) for path in found if not path.name.startswith(ACCOUNT))


def _names(pid: int, marker: bytes) -> bool:
    """In its arguments, or mounted in a place of its own: what the host has mounted, everybody sees."""
    try:
        if marker in Path(f"/proc/{pid}/cmdline").read_bytes():
            return True
        if os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt"):
            return False
        return any(marker in line.split()[3] for line in Path(f"/proc/{pid}/mountinfo").read_bytes().splitlines())
    except OSError:
        return False
