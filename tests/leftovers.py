"""What sandboxes left behind on this machine, which should be nothing."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.engines.local.processes import each_process
from atoll.settings import Settings


def leftovers(settings: Settings) -> list[str]:
    """Every file, socket and process that belongs to a sandbox of these settings."""
    sandboxes = [str(path) for path in settings.data_dir.glob("*/*") if path.name not in (".base", ".users")]
    users = [str(path) for path in settings.data_dir.glob("*/.users/*")]
    drafts = [str(path) for path in settings.data_dir.glob("*/.base/.*")]
    sockets = [str(path) for path in settings.run_dir.glob("*/*")]
    marker = os.fsencode(settings.data_dir)
    return sandboxes + users + drafts + sockets + [f"process {pid}" for pid in each_process() if _names(pid, marker)]


def _names(pid: int, marker: bytes) -> bool:
    try:
        return any(marker in Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "mountinfo"))
    except OSError:
        return False
