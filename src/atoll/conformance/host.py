"""What the host can see of a sandbox: its processes, mounts and files."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.settings import Settings


def processes(text: str) -> list[int]:
    """Return the processes of the host that mention this text in their command line, environment, mounts or control
    groups.

    Only processes that this user may inspect are found. This process is left out, and so are dead ones that wait for
    another parent to reap them.
    """
    wanted = os.fsencode(text)
    return [pid for pid in _pids() if any(wanted in _read(pid, name) for name in _speaking(pid))]


def _speaking(pid: int) -> tuple[str, ...]:
    """Return the files in /proc that say something about this process.

    The mounts do not count if they are those of the whole machine. Checks kill the processes that they find, and a
    mount in the host's own namespace would make that all processes.
    """
    own = _link("self") == _link(str(pid))
    return ("cmdline", "environ", "cgroup") if own else ("cmdline", "environ", "mountinfo", "cgroup")


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/{name}/ns/mnt")
    except OSError:
        return ""


def processes_with_relatives(text: str) -> list[int]:
    """Return the same as `processes`, with all processes that they started and all above them in the sandbox, which may
    hide what they are."""
    found = set(processes(text))
    parents = {pid: _parent(pid) for pid in _pids()}
    while more := {parents[pid] for pid in found if pid in parents and _is_nested(parents[pid])} - found:
        found |= more
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _is_nested(pid: int) -> bool:
    """Return whether the process is in a PID namespace below this one: then it has a process id in each."""
    lines = _read(pid, "status").splitlines()
    return any(line.startswith(b"NSpid:") and len(line.split()) > 2 for line in lines)


def traces(settings: Settings, sandbox_id: str) -> list[str]:
    """Return everything on the host that still mentions a sandbox."""
    found = [f"process {pid}: {_read(pid, 'cmdline')[:200]!r}" for pid in processes(sandbox_id)]
    found += [f"mount {line}" for line in _mounts() if sandbox_id in line]
    for directory in (settings.data_dir, settings.run_dir):
        for folder, folders, files in os.walk(directory):
            found += [f"{folder}/{name}" for name in (*folders, *files) if sandbox_id in name]
    return found


def _pids() -> list[int]:
    found = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in found if pid != os.getpid() and not _is_dead(pid)]


def _is_dead(pid: int) -> bool:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return len(fields) < 2 or (fields[0] == b"Z" and int(fields[1]) != os.getpid())


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0
