"""Threads are shared fairly: nobody holds more than a share, and who waits takes turns."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from atoll import workers
from atoll.workers import Cancellation, Shares


async def test_one_account_never_holds_more_than_its_share() -> None:
    shares = Shares(4, 2)
    await shares.acquire("mallory")
    await shares.acquire("mallory")
    third = asyncio.ensure_future(shares.acquire("mallory"))
    assert await asyncio.wait_for(shares.acquire("ann"), 5) == "ann"
    assert not third.done()
    shares.release("mallory")
    assert await asyncio.wait_for(third, 5) == "mallory"
    assert shares.held_by("mallory") == 2


async def test_accounts_that_wait_take_turns() -> None:
    shares = Shares(1, 1)
    await shares.acquire("x")
    order: list[str] = []

    async def ask(who: str) -> None:
        async with shares.slot(who):
            order.append(who)

    asked = [asyncio.ensure_future(ask(who)) for who in ["mallory"] * 4 + ["ann", "bob"]]
    await asyncio.sleep(0)
    shares.release("x")
    await asyncio.gather(*asked)
    assert order == ["mallory", "ann", "bob", "mallory", "mallory", "mallory"]


async def test_whoever_stops_waiting_costs_no_slot() -> None:
    shares = Shares(1, 1)
    await shares.acquire("ann")
    waiting = [asyncio.ensure_future(shares.acquire("bob")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    shares.release("ann")  # granted to the second; which is cancelled before it learns of that
    waiting[1].cancel()
    assert await asyncio.wait_for(waiting[2], 5) == "bob"
    shares.release("bob")
    assert await asyncio.wait_for(shares.acquire("ann"), 5) == "ann"
    assert (shares.held_by("ann"), shares.held_by("bob")) == (1, 0)


async def test_a_program_of_one_user_may_use_all_threads() -> None:
    gate, busy = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        busy.release()
        gate.wait(30)

    slots = workers.Kind.TRANSFER.value[0]
    running = [asyncio.ensure_future(workers.run(workers.TRANSFER, work)) for _ in range(slots)]
    try:
        for _ in range(slots):
            assert await asyncio.to_thread(busy.acquire, timeout=10)
    finally:
        gate.set()
        await asyncio.gather(*running)


async def test_the_account_of_the_context_has_only_its_share_of_the_threads() -> None:
    gate, busy = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        busy.release()
        gate.wait(30)

    async def of(who: str) -> None:
        workers.account.set(who)
        await workers.run(workers.TRANSFER, work)

    share = workers.Kind.TRANSFER.value[1]
    running = [asyncio.ensure_future(of("mallory")) for _ in range(100)]
    try:
        for _ in range(share):
            assert await asyncio.to_thread(busy.acquire, timeout=10)
        assert not busy.acquire(blocking=False)
        running.append(asyncio.ensure_future(of("ann")))
        assert await asyncio.to_thread(busy.acquire, timeout=10)
    finally:
        gate.set()
        await asyncio.gather(*running)


async def test_a_slot_is_held_as_long_as_its_thread_is_busy() -> None:
    """Cancelling a caller does not end the thread: it must not make room for one more."""
    gate, busy = threading.Event(), threading.Event()
    shares = workers.workers(workers.IDENTITY).shares

    def work() -> None:
        busy.set()
        gate.wait(30)

    async def of_mallory() -> None:
        workers.account.set("mallory")
        await workers.run(workers.IDENTITY, work)

    running = asyncio.ensure_future(of_mallory())
    assert await asyncio.to_thread(busy.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert shares.held_by("mallory") == 1
    gate.set()
    deadline = time.monotonic() + 10
    while shares.held_by("mallory"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_cancelled_work_ends_before_its_caller_goes_on() -> None:
    began, ended = threading.Event(), threading.Event()

    def work(cancellation: Cancellation) -> None:
        began.set()
        try:
            while True:
                cancellation.check()
                time.sleep(0.001)
        finally:
            ended.set()

    running = asyncio.ensure_future(workers.run_cancellable(workers.COMPARISON, work))
    assert await asyncio.to_thread(began.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


def test_nothing_uses_the_default_pool_of_threads() -> None:
    """It has a handful of threads for everything that everybody does."""
    from pathlib import Path

    import atoll

    source = Path(next(iter(atoll.__path__)))
    allowed = {"conformance"}
    users = [
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if file.relative_to(source).parts[0] not in allowed
        and any(word in file.read_text() for word in ("asyncio.to_thread(", "run_in_executor(None"))
    ]
    assert users == []
