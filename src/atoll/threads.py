"""A thread pool whose idle threads end, unlike those of `concurrent.futures`, which stay forever.

The thread that was busy last gets the next job, so that superfluous threads become idle. The caller limits their
number. A program that exits waits for running jobs.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]
IDLE_S = 5.0


class Threads:
    def __init__(self, name: str, idle_s: float = IDLE_S) -> None:
        self._name, self._idle_s = name, idle_s
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job]] = []
        """The queue of each idle thread, from which it takes its next job."""
        self._running: set[Future[Any]] = set()
        self._made = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run a function in a thread. Raises RuntimeError if no thread can be started."""
        future: Future[T] = Future()
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
            if jobs is None:
                self._start((future, work))
            self._running.add(future)
        if jobs is not None:
            jobs.put((future, work))
        return future

    def _start(self, job: _Job) -> None:
        if not self._made:
            atexit.register(self._finish)
        self._made += 1
        threading.Thread(target=self._run, args=(job,), name=f"{self._name}_{self._made}", daemon=True).start()

    def _run(self, job: _Job) -> None:
        own: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        while True:
            _do(*job)
            with self._lock:
                self._running.discard(job[0])
                self._idle.append(own)
            del job  # do not keep the objects of a finished job alive
            try:
                job = own.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    if own in self._idle:
                        self._idle.remove(own)
                        return
                job = own.get()  # `submit` has chosen this thread just now

    def _finish(self) -> None:
        wait(list(self._running))


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
