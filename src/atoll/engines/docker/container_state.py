"""The state of a sandbox, according to the Docker engine's description of its container, and how often its limits
were hit, according to the kernel."""

from __future__ import annotations

import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from atoll.engines.docker.connect.agent_streams import Target
from atoll.engines.limit_events import LimitEvents
from atoll.model import Cause, Observation, State, Stats

_SIGNAL_BASE = 128
_KILLED = _SIGNAL_BASE + signal.SIGKILL
_MAKING_S = 120.0
_ENGINE_LOST_IT = 255
_LIFETIME_OVER = 75
MISSING = Observation(State.MISSING, Cause.USER, "it was deleted or never existed")


def observe(container: dict[str, Any]) -> Observation:
    state = container.get("State") or {}
    status = state.get("Status")
    if status == "running":
        return Observation(State.RUNNING)
    if status == "paused":
        return Observation(State.PAUSED)
    if status == "created":
        return _unfinished(container)
    if status in ("restarting", "removing"):
        return Observation(State.STARTING if status == "restarting" else State.STOPPED, reason=f"it is {status}")
    return _ending(container, state)


def _unfinished(container: dict[str, Any]) -> Observation:
    if time.time() - _moment(container.get("Created")) < _MAKING_S:
        return Observation(State.STARTING)
    return Observation(State.STOPPED, Cause.LOST, "the process that was making it died")


def _ending(container: dict[str, Any], state: dict[str, Any]) -> Observation:
    code = int(state.get("ExitCode") or 0)
    if code == _LIFETIME_OVER:  # code inside cannot make the first process exit with this status
        return Observation(State.STOPPED, Cause.TIMEOUT, "its lifetime was over")
    if state.get("OOMKilled") and code == _KILLED:
        limit = (container.get("HostConfig") or {}).get("Memory")
        text = f" of {limit >> 20} MiB" if limit else ""
        return Observation(State.STOPPED, Cause.OUT_OF_MEMORY, f"it used more memory than its limit{text}")
    if code == _ENGINE_LOST_IT or state.get("Error"):
        said = str(state.get("Error") or "the Docker engine lost it, as after a restart of the machine")
        return Observation(State.STOPPED, Cause.HOST, said[:500])
    if code > _SIGNAL_BASE:
        return Observation(State.STOPPED, Cause.KILLED, f"its agent was killed by {_signal_name(code - _SIGNAL_BASE)}")
    return Observation(State.STOPPED, Cause.EXIT, f"its agent ended with exit status {code}")


def usage(answer: dict[str, Any]) -> Stats:
    memory = answer.get("memory_stats") or {}
    details = memory.get("stats") or {}
    cache = int(details.get("total_inactive_file", details.get("inactive_file", 0)))
    used = memory.get("usage")
    return Stats(
        memory_bytes=max(0, int(used) - cache) if used is not None else None,
        cpu_s=int(((answer.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage", 0)) / 1e9,
        pids=(answer.get("pids_stats") or {}).get("current"),
    )


_GROUPS = Path("/sys/fs/cgroup")


def limit_events(target: Target) -> LimitEvents | None:
    """Return how often the container's limits were hit, by the kernel's counters of its control group on this machine.

    None if its control groups cannot be seen from here, or it has ended.
    """
    try:
        lines = Path(f"/proc/{target.pid}/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return None
    memory, pids = _group_of(lines, "memory"), _group_of(lines, "pids")
    if memory is None or target.container_id not in str(memory):  # the process number may have been used again
        return None
    for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
        if (kills := _counter(memory / name, "oom_kill")) is not None:
            refused = _counter(pids / "pids.events", "max") if pids is not None else None
            return LimitEvents(oom_kills=kills, pids_refused=refused or 0)
    return None


def _group_of(lines: list[str], controller: str) -> Path | None:
    """Return the controller's directory from lines of `NUMBER:CONTROLLERS:PATH`; version 2 names no controllers."""
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


def _moment(text: object) -> float:
    """Parse a time. Docker writes nanoseconds, Python reads microseconds."""
    try:
        return datetime.fromisoformat(str(text)[:19] + "+00:00").timestamp()
    except ValueError:
        return 0.0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
