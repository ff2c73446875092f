"""Processes of this machine: identified safely even if process ids are reused, started, reaped and killed."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.model import Stats
from atoll.waiting import Deadline, readable

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@functools.cache
def boot_id() -> str:
    """Return the id of the current boot. Process ids of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, from the state on; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process, identified by its start time as well, because its process id may be reused."""

    pid: int
    started: int
    """The start time in clock ticks since the machine started."""

    @classmethod
    def of(cls, pid: int) -> ProcessRef | None:
        fields = _stat_fields(pid)
        return cls(pid, int(fields[19])) if fields else None

    def is_alive(self) -> bool:
        """Whether the process is alive. A zombie is not."""
        fields = _stat_fields(self.pid)
        return fields is not None and int(fields[19]) == self.started and fields[0] not in "ZX"

    def age_s(self) -> float:
        """How long ago the process was started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / _TICKS_PER_SECOND

    def open(self) -> int | None:
        """Return a pidfd that certainly refers to this process; None if it is gone."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return None
        if self.is_alive():
            return fd
        os.close(fd)
        return None


def this_process() -> ProcessRef:
    return _known(os.getpid())


@functools.lru_cache(maxsize=1)
def _known(pid: int) -> ProcessRef:
    found = ProcessRef.of(pid)
    assert found is not None
    return found


# --- children of this process: started and reaped without tying them to an event loop ------------

_lock = threading.Lock()
_children: dict[int, int | None] = {}
"""Exit statuses by process id; None while the child runs."""


def spawn(argv: Sequence[str], *, env: Mapping[str, str], pass_fds: Iterable[int], stderr: int, session: bool) -> int:
    """Start a program that outlives this process, with no descriptors but the given ones. Raises OSError.

    The options of `subprocess` are limited to those with which it borrows this process's memory (vfork) instead of
    copying it (fork).
    """
    # The program may outlive this process. It is reaped here, and not by the Popen object, which would emit a warning
    # when it is collected.
    process = subprocess.Popen(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=tuple(pass_fds),
        start_new_session=session,
    )
    process.returncode = 0
    with _lock:
        _children[process.pid] = None
    return process.pid


def reap(pid: int) -> int | None:
    """Return the exit status (negative: the signal) of a child that has ended; None if it runs or is no child."""
    with _lock:
        if pid not in _children:
            return None
        if _children[pid] is None:
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # another part of this program waited for it
                del _children[pid]
                return None
            if done:
                _children[pid] = os.waitstatus_to_exitcode(status)
        return _children[pid]


def forget(pids: Iterable[int]) -> None:
    """Forget these children. Their status will not be needed again."""
    for pid in pids:
        reap(pid)
        with _lock:
            _children.pop(pid, None)


def ended_children() -> list[int]:
    """Return all children that have ended, for cases where it is not known which sandbox a child belonged to."""
    return [pid for pid in list(_children) if reap(pid) is not None]


# --- trees ------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """Return all processes below this one, parents before children."""
    found: list[int] = []
    pending = [pid]
    while pending:
        current = pending.pop()
        with suppress(OSError):
            for task in os.listdir(f"/proc/{current}/task"):
                with suppress(OSError):
                    children = [int(word) for word in Path(f"/proc/{current}/task/{task}/children").read_text().split()]
                    found.extend(children)
                    pending.extend(children)
    return found


def usage(pid: int) -> Stats:
    """Return what this process and all processes below it use."""
    memory, ticks, alive = 0, 0, 0
    for current in [pid, *descendants(pid)]:
        fields = _stat_fields(current)
        if fields is None:
            continue
        alive += 1
        # User and system time of the process and of the children that it has waited for.
        ticks += sum(int(field) for field in fields[11:15])
        with suppress(OSError):
            for line in Path(f"/proc/{current}/status").read_text(errors="replace").splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    memory += int(line.split()[1]) * 1024
    return Stats(memory_bytes=memory, cpu_s=ticks / _TICKS_PER_SECOND, pids=alive)


def each_process() -> Iterator[int]:
    """Yield the ids of all processes of this machine."""
    with os.scandir("/proc") as entries:
        yield from [int(entry.name) for entry in entries if entry.name.isdecimal()]


# --- ending ------------------------------------------------------------------------------------------


async def kill(processes: Iterable[ProcessRef], deadline: Deadline) -> bool:
    """SIGKILL all processes and wait until they are gone. Returns False if some are left at the deadline."""
    return await _end(processes, deadline, signal.SIGKILL)


async def kill_all(find: Callable[[], set[ProcessRef]], deadline: Deadline) -> bool:
    """Kill what `find` returns until it finds nothing more: a later look finds what was just being forked. False: some
    were not gone in time."""
    while found := {process for process in find() if process.is_alive()}:
        if not await kill(found, deadline):
            return False
    return True


async def wait(processes: Iterable[ProcessRef], deadline: Deadline) -> bool:
    """Wait until all processes are gone. Returns False if some are left at the deadline."""
    return await _end(processes, deadline, None)


async def _end(processes: Iterable[ProcessRef], deadline: Deadline, number: signal.Signals | None) -> bool:
    fds = [fd for process in processes if (fd := process.open()) is not None]
    try:
        if number is not None:
            for fd in fds:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
        waiting = set(fds)
        while waiting:
            ready = await readable(waiting, deadline)
            if not ready:
                return False
            waiting -= ready
        return True
    finally:
        for fd in fds:
            os.close(fd)
