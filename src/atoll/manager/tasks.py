"""The tasks of a manager, which all belong to one `Tasks` object that can end them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from atoll.cancellation import finish
from atoll.errors import ManagerClosedError, SandboxTimeoutError, SetupError, StartError

T = TypeVar("T")
_UNDO_S = 60.0
"""How long cancelled work may take to undo what it did. Engines have shorter deadlines of their own."""
_log = logging.getLogger(__name__)


class Tasks:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run the work in a task of its own. Use `outcome` to wait for it."""
        task = asyncio.create_task(work, name=f"atoll-{name}")
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def bounded(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        """Return the result of the work. Raises SandboxTimeoutError if it takes longer, even if it ignores being
        cancelled.

        When the caller is cancelled, so is the work, and it has undone what it did before the caller goes on.
        """
        task = self.spawn(work, what)
        try:
            await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            task.cancel()
            await finish(asyncio.wait({task}, timeout=_UNDO_S))
            raise
        if not task.done():
            task.cancel()
            await finish(asyncio.wait({task}, timeout=min(seconds, _UNDO_S)))
            if not task.done() or task.cancelled():
                raise SandboxTimeoutError(f"it took longer than {seconds:g} s to {what}")
        if task.cancelled():
            raise SandboxTimeoutError(f"the attempt to {what} was given up")
        return task.result()

    async def aclose(self, seconds: float) -> list[str]:
        """Cancel all tasks and wait at most this long. Returns the names of tasks that did not end."""
        me = asyncio.current_task()
        tasks = {task for task in self._running if task is not me}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        return [task.get_name() for task in tasks if not task.done()]

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # What a user's own command wrote is not for the log.
            said = type(error).__name__ if isinstance(error, SetupError | StartError) else repr(error)
            _log.debug("%s failed: %s", task.get_name(), said)


async def outcome(task: asyncio.Task[T]) -> T:
    """Return the result of a task that goes on when its caller is cancelled. Raises ManagerClosedError if the task is
    cancelled."""
    await asyncio.wait({task})
    if task.cancelled():
        raise ManagerClosedError("the manager was shut down before it was done", hint="The next manager continues it.")
    return task.result()
