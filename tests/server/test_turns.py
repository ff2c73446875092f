"""The time of the event loop, shared by accounts."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from atoll.server.middleware.turns import (
    ACTIVE_S,
    BYTE_S,
    CREDIT_S,
    MAX_DEBT_S,
    PART,
    BodyWeight,
    Turns,
    take_turns,
    turns_of,
)
from atoll.store import Store
from atoll.workers import account

PATIENCE_S = 30


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shared() -> tuple[Turns, Clock]:
    """Ann and Mallory are both active, and Mallory has used up what she may."""
    clock = Clock()
    turns = Turns(asyncio.get_running_loop(), clock)
    assert turns.wait("ann") is None
    assert turns.wait("mallory") is None
    assert turns.is_shared
    turns.spend("ann", CREDIT_S / 2)
    turns.spend("mallory", 10.0)
    return turns, clock


async def granted(*futures: asyncio.Future[None] | None) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for future in futures:
            assert future is not None
            await future


def start(who: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    context = contextvars.copy_context()
    context.run(account.set, who)
    return asyncio.get_running_loop().create_task(work, context=context)


async def test_an_account_alone_never_waits() -> None:
    turns = Turns(asyncio.get_running_loop(), Clock())
    for _ in range(100):
        assert turns.wait("mallory") is None
        turns.spend("mallory", 1.0)
    assert not turns.is_shared


async def test_who_used_more_than_others_waits_and_they_do_not() -> None:
    turns, _ = shared()
    assert turns.wait("mallory") is not None
    assert turns.wait("ann") is None
    turns.spend("ann", 5 * CREDIT_S)
    assert turns.wait("ann") is None, "she is in debt too, but far less than another"


async def test_what_was_used_is_paid_by_time_and_no_debt_is_without_bound() -> None:
    turns, clock = shared()
    first, second = turns.wait("mallory"), turns.wait("mallory")
    assert first is not None
    assert second is not None
    paid_at = clock.now + MAX_DEBT_S / PART
    while clock.now < paid_at:
        await asyncio.sleep(0)
        assert not first.done()
        clock.now += ACTIVE_S / 3
        turns.wait("ann")  # still there, and still served
        turns.wait("mallory")
    await granted(first)
    turns.spend("mallory", 10.0)
    await asyncio.sleep(0)
    assert not second.done(), "one after another"


async def test_as_soon_as_others_are_gone_everything_goes_on() -> None:
    turns, clock = shared()
    waiting = [turns.wait("mallory") for _ in range(20)]
    clock.now += ACTIVE_S
    await granted(*waiting)
    assert turns.wait("mallory") is None


async def test_one_that_vanished_while_it_waited_leaves_nothing() -> None:
    turns, clock = shared()
    gone, next_one = turns.wait("mallory"), turns.wait("mallory")
    assert gone is not None
    gone.cancel()
    clock.now += ACTIVE_S
    await granted(next_one)
    assert not turns.usages["mallory"].waiting
    assert turns.usages["mallory"].timer is None


async def test_a_cancelled_task_ends_while_it_waits_for_its_turn() -> None:
    loop = asyncio.get_running_loop()
    turns, ended = take_turns(loop), []
    turns._clock = clock = Clock()

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            raise AssertionError("it never has its turn")
        finally:
            ended.append(account.get())

    try:
        turns.wait("ann")
        turns.wait("mallory")
        turns.spend("mallory", 10.0)
        task = start("mallory", work())
        async with asyncio.timeout(PATIENCE_S):
            while not turns.usages["mallory"].waiting:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()
        assert ended == ["mallory"]
        clock.now += ACTIVE_S
    finally:
        loop.set_task_factory(None)


async def _result() -> str:
    await asyncio.sleep(0)
    return "done"


async def _failure() -> str:
    try:
        await asyncio.get_running_loop().run_in_executor(None, int, "x")
    except ValueError:
        return "failed"
    return "not failed"


async def _late() -> str:
    try:
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()
    except TimeoutError:
        return "late"
    return "not late"


@pytest.mark.parametrize(("work", "result"), [(_result, "done"), (_failure, "failed"), (_late, "late")])
async def test_results_errors_and_timeouts_pass(work: Callable[[], Coroutine[Any, Any, str]], result: str) -> None:
    loop = asyncio.get_running_loop()
    take_turns(loop)
    try:
        found: Awaitable[str] = start("ann", work())
        assert await asyncio.wait_for(found, PATIENCE_S) == result
    finally:
        loop.set_task_factory(None)


async def test_many_long_steps_of_one_do_not_come_between_the_steps_of_another() -> None:
    loop = asyncio.get_running_loop()
    taken, over = 0, False

    async def heavy() -> None:
        nonlocal taken
        while not over:
            taken += 1
            time.sleep(0.002)  # noqa: ASYNC251 - a step that takes long
            await asyncio.sleep(0)

    async def light() -> int:
        await asyncio.sleep(0)
        before = taken
        for _ in range(100):
            await asyncio.sleep(0)
        return taken - before

    take_turns(loop)
    try:
        tasks = [start("mallory", heavy()) for _ in range(8)]
        between = await asyncio.wait_for(start("ann", light()), PATIENCE_S)
        over = True
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    finally:
        loop.set_task_factory(None)
    assert between < 400, "without turns there are 800"


async def test_a_transaction_waits_for_no_turn(tmp_path: Path) -> None:
    store = Store.at(tmp_path / "atoll.db")
    await store.open()
    try:
        account.set("mallory")
        async with store._begin():
            assert account.get() == ""
        assert account.get() == "mallory"
    finally:
        account.set("")
        await store.aclose()


@pytest.mark.parametrize("direction", ["in", "out"])
async def test_the_bytes_of_bodies_count(direction: str) -> None:
    """They are received and sent outside of all tasks."""
    loop, size = asyncio.get_running_loop(), 1 << 20
    turns = turns_of[loop] = Turns(loop, Clock())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if direction == "in":
            await receive()
        else:
            await send({"type": "http.response.body", "body": bytes(size)})

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(size)}

    async def send(message: Message) -> None:
        pass

    async def ask() -> None:
        await BodyWeight(app)({"type": "http"}, receive, send)

    await start("mallory", ask())
    assert turns.usages == {}, "she is alone"
    turns.wait("ann")
    turns.wait("mallory")
    await start("mallory", ask())
    assert turns.usages["mallory"].balance == CREDIT_S - size * BYTE_S


async def test_what_a_task_did_before_its_account_was_known_is_charged_to_it() -> None:
    """A request is read, routed and its key is looked up before anybody knows whose it is."""
    loop = asyncio.get_running_loop()
    turns = take_turns(loop)
    turns._clock = clock = Clock()
    spent: list[tuple[str, float]] = []
    turns.spend = lambda who, seconds: spent.append((who, seconds))  # type: ignore[method-assign]

    async def request() -> None:
        time.sleep(0.02)  # noqa: ASYNC251
        await asyncio.sleep(0)
        account.set("mallory")

    try:
        turns.wait("ann")
        turns.wait("mallory")
        assert turns.is_shared, clock.now
        await start("", request())
    finally:
        loop.set_task_factory(None)
    assert [who for who, _ in spent] == ["mallory"]
    assert spent[0][1] >= 0.02
