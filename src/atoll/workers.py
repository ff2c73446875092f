"""Threads for work that blocks: a bounded number for each kind of work, and a fair share of them for each account.

asyncio's default pool has a few threads for everything, so some unresponsive registries or large comparisons would
block all other callers. Here each kind of work has its own threads, an account holds at most its share of them, and
waiting accounts take turns. The account is taken from the context (`account`); a server sets it for each request.
Without an account, as in a program of one user, only the number of threads is limited.

A thread cannot be killed. Long work gets a `Cancellation`, which it must check between its steps. A thread that
computes also slows down all others of its process, so it pauses repeatedly while other accounts are active.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import enum
import functools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from atoll.cancellation import finish_or_stop

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
account: contextvars.ContextVar[str] = contextvars.ContextVar("account", default="")
"""The account for which the current work is done. Work without an account ("") may use all threads."""


_WORK_S = 0.001
_REST = 3.0
_MAX_REST_S = 0.05
_PORTION = 8


def others_are_active(who: str) -> bool:
    """Return whether other accounts currently use the process. A server replaces this function."""
    return False


async def in_portions(work: Callable[[S], T], each: Sequence[S]) -> list[T]:
    """Call `work` for each item in this thread. Between portions of items, the event loop can run other tasks."""
    done: list[T] = []
    for item in each:
        if done and len(done) % _PORTION == 0:
            await asyncio.sleep(0)
        done.append(work(item))
    return done


class Kind(enum.Enum):
    """A kind of work, with its number of threads and how many of them one account may hold."""

    ENGINE = (32, 8)
    """Steps of a life cycle: mounts, control groups, records, removal of files."""
    IMAGE = (64, 4)
    """Pulls and builds of images, which mostly wait for other machines and programs."""
    TRANSFER = (24, 4)
    """Copies of files and trees into and out of sandboxes, export and import of snapshots."""
    COMPARISON = (4, 1)
    """Differences of two states. This only computes, so it slows down the event loop."""
    IDENTITY = (4, 4)
    """Requests for the keys of an identity provider, made before the account is known."""


ENGINE, IMAGE, TRANSFER, COMPARISON, IDENTITY = Kind


class Cancellation:
    """Tells work in a thread whether to continue. While other accounts are active, `check` makes the thread rest three
    milliseconds for each that it computes."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._started = time.monotonic()
        self._rested_at: float | None = None
        self.rested_s = 0.0

    def cancel(self) -> None:
        self._cancelled.set()

    def check(self) -> None:
        """Rest if necessary. Raises WorkCancelledError if the work was cancelled."""
        used = time.thread_time()
        if self._rested_at is None:
            self._rested_at = used
        elif used - self._rested_at > _WORK_S:
            if (who := account.get()) and others_are_active(who):
                self._rest(min(_REST * (used - self._rested_at), _MAX_REST_S))
            self._rested_at = used
        if self._cancelled.is_set():
            raise WorkCancelledError

    def _rest(self, seconds: float) -> None:
        began = time.monotonic()
        self._cancelled.wait(seconds)
        self.rested_s += time.monotonic() - began

    @property
    def elapsed_s(self) -> float:
        """How long the work has been running without its rests, for work with a limited time."""
        return time.monotonic() - self._started - self.rested_s


class WorkCancelledError(Exception):
    """Unwinds the thread of cancelled work. It never reaches a caller."""


class Shares:
    """A number of slots, of which an account holds at most `share`. Waiting accounts take turns.

    It may be used from any number of threads and event loops.
    """

    def __init__(self, slots: int, share: int) -> None:
        self.slots, self.share = slots, share
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._busy = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def slot(self, owner: str | None = None) -> AsyncIterator[None]:
        who = await self.acquire(owner)
        try:
            yield
        finally:
            self.release(who)

    async def acquire(self, owner: str | None = None) -> str:
        """Wait for a slot. Returns the account to pass to `release`: `owner`, or the account of the context."""
        who = account.get() if owner is None else owner
        with self._lock:
            if who not in self._waiting and self._is_free(who):
                self._take(who)
                return who
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(who, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            with self._lock:
                queue = self._waiting.get(who)
                if queue is not None and future in queue:
                    queue.remove(future)
                    if not queue:
                        del self._waiting[who]
                    raise
            self.release(who)  # the slot was granted at the same moment
            raise
        return who

    def release(self, who: str) -> None:
        with self._lock:
            self._held[who] -= 1
            if not self._held[who]:
                del self._held[who]
            self._busy -= 1
            self._grant()

    def held_by(self, who: str) -> int:
        return self._held[who]

    def _is_free(self, who: str) -> bool:
        return self._busy < self.slots and (not who or self._held[who] < self.share)

    def _take(self, who: str) -> None:
        self._held[who] += 1
        self._busy += 1

    def _grant(self) -> None:
        """Give free slots to waiting accounts. The one that has waited longest since its last turn comes first."""
        while True:
            who = next((each for each in self._waiting if self._is_free(each)), None)
            if who is None:
                return
            queue = self._waiting.pop(who)
            future = queue.popleft()
            if queue:
                self._waiting[who] = queue  # now the last of the waiting accounts
            try:
                future.get_loop().call_soon_threadsafe(_wake, future)
            except RuntimeError:  # its event loop is closed, so nothing waits there any more
                continue
            self._take(who)


_Job = tuple["Future[Any]", Callable[[], Any]]
IDLE_S = 5.0


class NoThreadError(RuntimeError):
    """No thread can be started, as while the interpreter is shutting down."""


class Threads:
    """A thread pool whose idle threads end, unlike those of `concurrent.futures`, which stay forever.

    The thread that was busy last gets the next job, so that superfluous threads become idle. The caller limits their
    number. A program that exits waits for running jobs.
    """

    def __init__(self, name: str, idle_s: float = IDLE_S) -> None:
        self._name, self._idle_s = name, idle_s
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Job]] = []
        """The queue of each idle thread, from which it takes its next job."""
        self._running: set[Future[Any]] = set()
        self._made = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run a function in a thread. Raises NoThreadError if no thread can be started."""
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
        try:
            if not self._made:
                atexit.register(self._finish)
            self._made += 1
            threading.Thread(target=self._run, args=(job,), name=f"{self._name}_{self._made}", daemon=True).start()
        except RuntimeError as error:
            raise NoThreadError(str(error)) from error

    def _run(self, job: _Job) -> None:
        own: SimpleQueue[_Job] = SimpleQueue()
        while True:
            _run_job(*job)
            with self._lock:
                self._running.discard(job[0])
                self._idle.append(own)
            del job  # do not keep the objects of a finished job alive
            try:
                job = own.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if own in self._idle:
                        self._idle.remove(own)
                        return
                job = own.get()  # `submit` has chosen this thread just now

    def _finish(self) -> None:
        wait(list(self._running))


def _run_job(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class Workers:
    """The threads of one kind."""

    def __init__(self, kind: Kind) -> None:
        slots, share = kind.value
        self.shares = Shares(slots, share)
        self._threads = Threads(f"atoll-{kind.name.lower()}")

    async def run(self, work: Callable[[], T]) -> T:
        who = await self.shares.acquire()
        return await self.run_in_slot(work, lambda: self.shares.release(who))

    async def run_in_slot(self, work: Callable[[], T], done: Callable[[], None] = lambda: None) -> T:
        """Run work for a caller that already holds a slot of `shares`.

        `done` is called when the thread is free again, even if the caller was cancelled.
        """
        try:
            future = self._threads.submit(functools.partial(contextvars.copy_context().run, work))
        except BaseException:
            done()
            raise
        future.add_done_callback(lambda _: done())
        return await asyncio.wrap_future(future)


_workers: dict[Kind, Workers] = {}


def workers(kind: Kind) -> Workers:
    found = _workers.get(kind)
    return found if found is not None else _workers.setdefault(kind, Workers(kind))


async def run(kind: Kind, function: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T:
    """Run a function in a thread of this kind, like asyncio.to_thread. Cancelling does not end a running function."""
    return await workers(kind).run(functools.partial(function, *args, **options))


async def run_cancellable(kind: Kind, function: Callable[[Cancellation], T]) -> T:
    """Run work that checks its Cancellation. A cancelled caller continues only when the thread has ended."""
    pool = workers(kind)
    who = await pool.shares.acquire()
    cancellation = Cancellation()
    work = functools.partial(function, cancellation)
    running = pool.run_in_slot(work, lambda: pool.shares.release(who))
    return await finish_or_stop(running, cancellation.cancel)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# Threads do not survive a fork, so a child process starts new ones.
os.register_at_fork(after_in_child=_workers.clear)
