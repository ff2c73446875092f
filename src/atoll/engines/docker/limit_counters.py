"""How often a container's limits were hit, by the kernel's own counters: its control group, seen from this machine."""

from __future__ import annotations

from pathlib import Path

from atoll.engines.contract import LimitEvents
from atoll.engines.docker.connect.agent_streams import Target

_GROUPS = Path("/sys/fs/cgroup")


def read(target: Target) -> LimitEvents | None:
    """None if its groups cannot be seen from here, or it has ended."""
    try:
        lines = Path(f"/proc/{target.pid}/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return None
    memory, pids = _group(lines, "memory"), _group(lines, "pids")
    if memory is None or target.container_id not in str(memory):  # the number may be another process's by now
        return None
    for name in ("memory.events", "memory.oom_control"):  # of version 2, of version 1
        if (kills := _counter(memory / name, "oom_kill")) is not None:
            refused = _counter(pids / "pids.events", "max") if pids is not None else None
            return LimitEvents(oom_kills=kills, pids_refused=refused or 0)
    return None


def _group(lines: list[str], controller: str) -> Path | None:
    """The directory of that controller, by lines of `NUMBER:CONTROLLERS:PATH`; version 2 names none."""
    unified = None
    for line in lines:
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return _GROUPS / controller / path.lstrip("/")
        if not names:
            unified = _GROUPS / path.lstrip("/")
    return unified


def _counter(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    pairs = (line.split() for line in lines)
    return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == name), None)
