"""Starts a sandbox's processes, up to an agent that answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.host.agent_socket import knock, listen
from atoll.engines.host.deadline import Deadline, readable
from atoll.engines.host.process_ref import ProcessRef, reap, spawn
from atoll.errors import AgentUnreachableError, EngineError, EngineUnavailableError
from atoll.printable import printable

_ERROR_TEXT = 4096


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a sandbox. `init` returns the sandbox's first process, once the agent answers."""

    argv: Sequence[str]
    env: Mapping[str, str]
    fds: Sequence[int]
    init: Callable[[ProcessRef], ProcessRef | None]
    session: bool = True
    """Whether the program must be put into a session of its own; otherwise it does that itself."""


@dataclass(frozen=True, slots=True)
class Started:
    monitor: ProcessRef
    init: ProcessRef


async def start(
    prepare: Callable[[int, ExitStack], Launch],
    socket_path: Path,
    deadline: Deadline,
    on_spawn: Callable[[ProcessRef], None],
) -> Started:
    """Start the program that `prepare` describes (given the number of the listening socket) and wait for its agent.

    `on_spawn` receives the process as soon as it exists, so that a later failure can end it.
    """
    with ExitStack() as resources:
        errors, errors_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        resources.callback(os.close, errors)
        # The inherited ends are closed here right after the start: when the program dies, no process may hold them
        # open.
        with ExitStack() as inherited:
            inherited.callback(os.close, errors_in)
            listener = inherited.enter_context(listen(socket_path))
            launch = prepare(listener.fileno(), resources)
            monitor = _spawn(launch, listener.fileno(), errors_in)
            on_spawn(monitor)
        pidfd = os.pidfd_open(monitor.pid)
        resources.callback(os.close, pidfd)
        try:
            answered = await knock(socket_path, pidfd, deadline)
        except TimeoutError:
            raise AgentUnreachableError(
                f"the agent of the new sandbox did not answer in time{_said(errors)}",
                hint="The machine may be overloaded.",
            ) from None
        init = launch.init(monitor) if answered else None
        if init is None:
            await readable({pidfd}, Deadline.after(1))
            raise EngineError(
                f"the sandbox ended while it was being made: {launch.argv[0]} {_ending(monitor.pid)}{_said(errors)}",
                hint="'atoll doctor' checks what is needed on this machine.",
            )
        return Started(monitor, init)


def _spawn(launch: Launch, listener: int, stderr: int) -> ProcessRef:
    try:
        pid = spawn(
            launch.argv, env=launch.env, pass_fds=[listener, *launch.fds], stderr=stderr, session=launch.session
        )
    except (FileNotFoundError, PermissionError) as error:
        raise EngineUnavailableError(f"cannot run '{launch.argv[0]}': {error.strerror}") from error
    # A child of this process stays, at least as a zombie, until it is reaped.
    monitor = ProcessRef.of(pid)
    assert monitor is not None
    return monitor


def _ending(pid: int) -> str:
    status = reap(pid)
    if status is None:
        return "did not start it"
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _said(errors: int) -> str:
    """Return what was written to stderr so far, made printable, because it may come from inside the sandbox."""
    try:
        text = printable(os.read(errors, _ERROR_TEXT), instead=" ")
    except BlockingIOError:
        return ""
    return f" ({text})" if text else ""
