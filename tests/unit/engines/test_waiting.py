from __future__ import annotations

import asyncio
import os

import pytest

from atoll.engines.local.waiting import Deadline, finish, readable


async def test_only_what_is_ready_is_told() -> None:
    quiet, _quiet = os.pipe()
    busy, writing = os.pipe()
    os.write(writing, b"x")
    try:
        assert await readable({quiet, busy}, Deadline.after(10)) == {busy}
        assert await readable({quiet}, Deadline.after(0)) == set()
    finally:
        for fd in (quiet, _quiet, busy, writing):
            os.close(fd)


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
