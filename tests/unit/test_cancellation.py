"""What must come to its end does, however often its caller is cancelled."""

import asyncio

import pytest

from atoll.cancellation import ended, finish, finish_or_stop, until_first


async def test_work_is_finished_before_a_cancellation_is_seen() -> None:
    go, done = asyncio.Event(), []

    async def work() -> None:
        await go.wait()
        done.append(True)

    task = asyncio.create_task(finish(work()))
    for _ in range(3):  # however often it is cancelled
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]


async def test_the_result_or_error_of_finished_work_is_passed_on() -> None:
    async def fail() -> None:
        raise KeyError("reason")

    assert await finish(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(KeyError, match="reason"):
        await finish(fail())


async def test_a_failure_of_work_whose_caller_was_cancelled_is_dropped() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError("failed")

    caller = asyncio.create_task(finish(fail()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_work_is_asked_to_stop_and_waited_for() -> None:
    asked = asyncio.Event()
    steps = []

    async def work() -> None:
        await asked.wait()
        await asyncio.sleep(0)
        steps.append("stopped")
        raise OSError("nobody hears this")

    def stop() -> None:
        steps.append("asked")
        asked.set()

    caller = asyncio.create_task(finish_or_stop(work(), stop))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert steps == ["asked", "stopped"]


async def test_the_end_of_a_task_is_waited_for_however_often_one_is_cancelled() -> None:
    task = asyncio.create_task(asyncio.Event().wait())
    waiting = asyncio.create_task(ended(task))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    task.cancel()
    await waiting


async def test_the_first_to_end_ends_all() -> None:
    steps = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ConnectionResetError

    await until_first(endless(), endless(), asyncio.sleep(0))
    assert steps == ["cleaned up"] * 2
    with pytest.raises(ConnectionResetError):
        await until_first(endless(), fail())
    await until_first(endless(), fail(), expected=(OSError,))
