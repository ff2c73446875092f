"""Doing several transfers of one image at once.

The thread of a pull or push does one transfer after another itself, so it never waits for anybody. Threads that help it
come from a number that the whole process shares, of which one account has at most a part; where none is free, the image
merely takes longer.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from atoll import workers
from atoll.archive.work import Work

AT_ONCE = 4
"""The most transfers of one image at once."""
_HELPERS = 24
_SHARE = 6
_lock = threading.Lock()
_held: Counter[str] = Counter()

Task = Callable[[Work], None]


def run_all(tasks: Sequence[Task], work: Work) -> None:
    """Carry out all tasks. The first failure cancels the others and is raised when they have ended."""
    waiting = deque(tasks)
    failures: list[BaseException] = []
    helpers: list[threading.Thread] = []
    account = workers.account.get()
    with work.part() as part:

        def carry_out() -> None:
            while not failures:
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                try:
                    task(part)
                except BaseException as error:  # handed to the caller's thread
                    failures.append(error)
                    part.cancel()

        def help_out() -> None:
            try:
                carry_out()
            finally:
                _give_back(account)

        for _ in range(min(AT_ONCE, len(tasks)) - 1):
            if not _take(account):
                break
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(help_out,), daemon=True, name="atoll-transfer")
            try:
                thread.start()
            except RuntimeError:  # no more threads
                _give_back(account)
                break
            helpers.append(thread)
        carry_out()
        for thread in helpers:
            thread.join()
    work.check()
    if failures:
        raise failures[0]


def _take(account: str) -> bool:
    with _lock:
        if _held.total() >= _HELPERS or (account and _held[account] >= _SHARE):
            return False
        _held[account] += 1
        return True


def _give_back(account: str) -> None:
    with _lock:
        _held[account] -= 1
        if not _held[account]:
            del _held[account]
