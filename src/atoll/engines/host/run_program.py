"""Run a program to its end, within a deadline and with no descriptors but the given ones."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from atoll.engines.host import process_ref
from atoll.engines.host.deadline import Deadline, readable
from atoll.engines.host.process_ref import ProcessRef
from atoll.errors import EngineError, EngineUnavailableError
from atoll.printable import printable

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/nonexistent"}
_FIRST_FREE = 64
_MAX_STDERR = 4096


@dataclass(frozen=True, slots=True)
class Finished:
    status: int
    """The exit status; negative for death by a signal."""
    said: str
    """What the program wrote to the reporting pipe, made printable."""


def spawn(argv: Sequence[str], fds: Sequence[int], stdio: Sequence[int] | None = None) -> int:
    """Start a program with `fds` as descriptors 3, 4, … and a fixed environment, in a session of its own.

    Uses posix_spawn, which borrows this process's memory instead of copying it. Raises OSError.
    """
    with ExitStack() as copies:
        null = nothing()
        copies.callback(os.close, null)
        actions: list[tuple[int, int, int]] = []
        for number, fd in enumerate((*(stdio or (null, null, null)), *fds)):
            # First each descriptor is moved out of the way, so that no copy replaces one that is still needed.
            copy = _duplicate(fd)
            copies.callback(os.close, copy)
            actions.append((os.POSIX_SPAWN_DUP2, copy, number))
        return os.posix_spawn(argv[0], list(argv), _ENVIRONMENT, file_actions=actions, setsid=True)


def nothing() -> int:
    """Return a pipe that no other process has, as standard streams. /dev/null is unsuitable: OCI runtimes make the
    sandbox's user the owner of their standard streams, and that device node belongs to the whole machine."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        return os.open(f"/proc/self/fd/{read}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(read)
        os.close(write)


def _duplicate(fd: int) -> int:
    return int(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE))


async def run(
    argv: Sequence[str],
    fds: Sequence[int],
    deadline: Deadline,
    *,
    stdio: Sequence[int] | None = None,
    report: bool = False,
    what: str = "",
) -> Finished:
    """Run a program to its end. With `report` its last descriptor is a pipe for the reason of a failure.

    All its processes are dead afterwards, except those it put into another session before it ended successfully. Raises
    EngineError when the deadline passes.
    """
    with ExitStack() as resources:
        pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        resources.callback(os.close, pipe[0])
        try:
            pid = spawn(argv, [*fds, pipe[1]] if report else fds, stdio)
        except OSError as error:
            raise EngineUnavailableError(f"cannot run '{argv[0]}': {error.strerror}") from error
        finally:
            os.close(pipe[1])
        pidfd = os.pidfd_open(pid)
        resources.callback(os.close, pidfd)
        ended = False
        try:
            ended = bool(await readable({pidfd}, deadline))
        finally:
            if not ended:
                _kill_tree(pid)
            status = reap(pid)
        if not ended:
            raise EngineError(f"{what or argv[0]} did not end in time", hint="The machine may be overloaded.")
        return Finished(status, _said(pipe[0]))


def reap(pid: int) -> int:
    """Return the exit status of a child that has ended or has just been killed."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # another part of this program waited for it
        return -signal.SIGKILL


def _kill_tree(pid: int) -> None:
    family = {ref for member in process_ref.descendants(pid) if (ref := ProcessRef.of(member)) is not None}
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for member in family:
        fd = member.open()
        if fd is not None:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)


def _said(fd: int) -> str:
    try:
        return printable(os.read(fd, _MAX_STDERR), instead=" ")
    except OSError:
        return ""
