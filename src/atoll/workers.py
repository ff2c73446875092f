"""Threads for work that blocks: a bounded number for each kind of work, and a fair share of them for each account.

asyncio's own pool has a handful of threads for everything, so a few silent registries or large comparisons would keep
every other caller waiting. Here each kind has threads of its own, an account holds at most its share of them, and
accounts that wait take turns. Whose work it is comes from the context (`account`); a server sets it for each request.
Without an account, as in a program of one user, only the number of threads is bounded.

A thread cannot be killed. Work that may take long gets a `Cancellation`, which it has to look at between two steps. A
thread that computes also slows down all others of its process: while other accounts are active, it rests in between.
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
"""Whose work this is. Empty: nobody's in particular, which has no share but may use all threads."""


_WORK_S = 0.001
_REST = 3.0
_MAX_REST_S = 0.05
_PORTION = 8


def others_are_active(who: str) -> bool:
    """Whether somebody else than this account uses the process. A server puts its own answer here."""
    return False


async def in_portions(work: Callable[[S], T], each: Sequence[S]) -> list[T]:
    """`work` for each of many, in this thread. Between two portions the event loop serves others."""
    done: list[T] = []
    for item in each:
        if done and len(done) % _PORTION == 0:
            await asyncio.sleep(0)
        done.append(work(item))
    return done


class Kind(enum.Enum):
    """A kind of work: how many threads there are for it, and how many of them one account may hold."""

    ENGINE = (32, 8)
    """Steps of a life cycle: mounts, control groups, records, removal of files."""
    IMAGE = (64, 4)
    """Pulls and builds of images, which mostly wait for other machines and programs."""
    TRANSFER = (24, 4)
    """Files and trees on their way in and out, snapshots as files."""
    COMPARISON = (4, 1)
    """Differences of two states: pure computing, which slows the event loop down."""
    IDENTITY = (4, 4)
    """Keys of an identity provider. No account is known by then."""


ENGINE, IMAGE, TRANSFER, COMPARISON, IDENTITY = Kind


class Cancellation:
    """Whether work that runs in a thread should go on. For every millisecond that it computes it rests three, while
    other accounts are active."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._started = time.monotonic()
        self._rested_at: float | None = None
        self.rested_s = 0.0

    def cancel(self) -> None:
        self._cancelled.set()

    def check(self) -> None:
        """Raise WorkCancelledError if nobody waits for the result any more."""
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
        """For work with a budget of time: how long it has been running, without its rests."""
        return time.monotonic() - self._started - self.rested_s


class WorkCancelledError(Exception):
    """Unwinds a thread whose caller was cancelled. Never raised to a caller."""


class Shares:
    """A number of slots: an account holds at most `share` of them, and accounts that wait take turns.

    Safe for any number of threads and event loops.
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
        """Returns the account to release it for: the owner, or the account of the context."""
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
            self.release(who)  # it was granted in the same moment
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
        """The account that has waited longest since its last turn comes first."""
        while True:
            who = next((each for each in self._waiting if self._is_free(each)), None)
            if who is None:
                return
            queue = self._waiting.pop(who)
            future = queue.popleft()
            if queue:
                self._waiting[who] = queue  # behind all others
            try:
                future.get_loop().call_soon_threadsafe(_wake, future)
            except RuntimeError:  # its loop is closed: nobody waits there any more
                continue
            self._take(who)


_Job = tuple["Future[Any]", Callable[[], Any]]
IDLE_S = 5.0


class Threads:
    """Threads that end when there is nothing to do for them, unlike those of `concurrent.futures`, which stay for ever.

    The thread that was busy last gets the next work, so that the others become idle and end. The caller limits their
    number. A program that ends waits for what is running.
    """

    def __init__(self, name: str, idle_s: float = IDLE_S) -> None:
        self._name, self._idle_s = name, idle_s
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Job]] = []
        """The queue of each waiting thread, from which it takes its next job."""
        self._running: set[Future[Any]] = set()
        self._made = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Raises RuntimeError if no thread can be started."""
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
        own: SimpleQueue[_Job] = SimpleQueue()
        while True:
            _run_job(*job)
            with self._lock:
                self._running.discard(job[0])
                self._idle.append(own)
            del job  # do not keep alive what it refers to
            try:
                job = own.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if own in self._idle:
                        self._idle.remove(own)
                        return
                job = own.get()  # work arrived at this very moment

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
        """For a caller that holds a slot of `shares` already. `done` is called when the thread is free again, whether
        or not somebody still waits for the result."""
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
    """As asyncio.to_thread, with the threads of this kind. Cancelling the caller does not end a call that has begun."""
    return await workers(kind).run(functools.partial(function, *args, **options))


async def run_cancellable(kind: Kind, function: Callable[[Cancellation], T]) -> T:
    """`run` for work that looks at its Cancellation: a cancelled caller goes on when the thread has ended."""
    pool = workers(kind)
    who = await pool.shares.acquire()
    cancellation = Cancellation()
    work = functools.partial(function, cancellation)
    running = pool.run_in_slot(work, lambda: pool.shares.release(who))
    return await finish_or_stop(running, cancellation.cancel)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# Threads do not survive a fork: a child gets its own.
os.register_at_fork(after_in_child=_workers.clear)
