"""Pausing without a control group: each process of the sandbox is stopped by a signal from outside.

SIGSTOP cannot be caught, and no process inside can send it to the agent, process 1. But a process that still runs may
continue another one. So the agent is stopped first, because orphans become its children; then all others are stopped
again and again until several checks in a row find no running process. Processes that were already stopped, by a
debugger or a shell, are written down and stay stopped afterwards. That note is written first and removed last. If this
process dies in between, the sandbox counts as paused, and the next process that looks at it stops what still runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

from atoll import durable, workers
from atoll.cancellation import finish
from atoll.engines.host.process_ref import ProcessRef, descendants
from atoll.errors import EngineError
from atoll.waiting import Deadline

_NOTE = "paused.json"
_RETRY_S = 0.002
_QUIET_LOOKS = 3
_STANDS = "TtZXx"


class StoppedProcesses:
    """The processes of one sandbox, whose directory is `home` and whose first process is `init`."""

    def __init__(self, home: Path, init: ProcessRef) -> None:
        self._note = home / _NOTE
        self._init = init

    @property
    def is_noted(self) -> bool:
        return self._note.exists()

    async def stop(self, deadline: Deadline) -> None:
        """Stop all processes inside. May be repeated. Raises EngineError if that fails; then they continue."""
        if not self.is_noted:
            before = [
                (each.pid, each.started)
                for each in await workers.run(workers.ENGINE, self._everybody)
                if not runs(each.pid)
            ]
            durable.write(self._note, json.dumps(before))
        try:
            await self._stop_all(deadline)
        except BaseException:
            await finish(self.let_go())
            raise

    async def let_go(self) -> None:
        """Continue the processes that ran before. May be repeated."""
        if self.is_noted:
            await finish(workers.run(workers.ENGINE, self._continue))
            self._note.unlink(missing_ok=True)

    async def keep(self) -> None:
        """Stop processes that were continued although the sandbox is paused."""
        await self._look()

    async def _look(self) -> bool:
        """Stop every running process. Returns whether there was any.

        A caller who is cancelled waits for the thread: whatever it stopped after they had let go would stay so.
        """
        return await finish(workers.run(workers.ENGINE, self._stop_once))

    async def _stop_all(self, deadline: Deadline) -> None:
        quiet = 0
        while quiet < _QUIET_LOOKS:
            quiet = 0 if await self._look() else quiet + 1
            if quiet < _QUIET_LOOKS and not deadline.left():
                raise EngineError("the sandbox's processes could not be stopped in time")
            await asyncio.sleep(_RETRY_S)

    def _everybody(self) -> list[ProcessRef]:
        """Return all processes of the sandbox, parents before their children."""
        found = [self._init, *(ProcessRef.of(pid) for pid in descendants(self._init.pid))]
        return [each for each in found if each is not None]

    def _stop_once(self) -> bool:
        running = [each for each in self._everybody() if runs(each.pid)]
        for each in running:
            _send(each, signal.SIGSTOP)
        return bool(running)

    def _continue(self) -> None:
        try:
            before = {(int(pid), int(started)) for pid, started in json.loads(self._note.read_text())}
        except (OSError, ValueError):
            before = set()
        # Children first: a shell must not notice that one of its jobs has stopped.
        for each in reversed(self._everybody()):
            if (each.pid, each.started) not in before:
                _send(each, signal.SIGCONT)


def _send(process: ProcessRef, number: signal.Signals) -> None:
    fd = process.open()
    if fd is None:
        return
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def runs(pid: int) -> bool:
    """Return whether any of the process's threads runs or waits for something."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                text = Path(f"/proc/{pid}/task/{task}/stat").read_text(errors="replace")
                if text[text.rindex(")") + 2] not in _STANDS:
                    return True
    return False
