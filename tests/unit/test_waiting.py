"""Everyone who waits is woken, nobody twice, and nobody waits longer than the deadline."""

import asyncio
import os

from atoll.waiting import Deadline, EventSignal, happens_within, readable


async def test_all_who_wait_are_woken_and_who_comes_later_waits_for_the_next_time() -> None:
    signal = EventSignal()
    signal.notify()  # nobody waits: nothing is kept
    waiting = [asyncio.create_task(signal.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    signal.notify("what", "a callback", "gets")
    later = asyncio.create_task(signal.wait())
    await asyncio.gather(*waiting)
    assert not later.done()
    signal.notify()
    await later


async def test_nothing_is_missed_between_looking_and_waiting() -> None:
    signal = EventSignal()
    upcoming = signal.next
    signal.notify()
    assert await happens_within(upcoming, 0.0)
    assert not await happens_within(signal.next, 0.0)


async def test_one_who_gives_up_disturbs_nobody() -> None:
    signal = EventSignal()
    one, other = (asyncio.create_task(signal.wait()) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    signal.notify()
    await other
    assert one.cancelled() or one.cancelling()


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
