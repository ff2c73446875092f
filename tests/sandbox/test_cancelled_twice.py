"""Cancelling the end of a sandbox once more does not leave it behind."""

from __future__ import annotations

import asyncio
import contextlib

from atoll import AsyncSandbox
from atoll.engines.bubblewrap.engine import BubblewrapEngine
from atoll.model import Handle
from atoll.settings import Settings


class HeldEngine(BubblewrapEngine):
    """Begins to delete when it may."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.deleting, self.may_delete = asyncio.Event(), asyncio.Event()

    async def delete(self, handle: Handle) -> None:
        self.deleting.set()
        await self.may_delete.wait()
        await super().delete(handle)


async def test_a_user_who_is_cancelled_twice_leaves_nothing(settings: Settings) -> None:
    engine = HeldEngine(settings)
    began = asyncio.Event()

    async def use() -> None:
        async with AsyncSandbox(engine=engine, settings=settings):
            began.set()
            await asyncio.Event().wait()

    using = asyncio.create_task(use())
    await began.wait()
    using.cancel()
    await engine.deleting.wait()
    using.cancel()
    await asyncio.sleep(0)
    engine.may_delete.set()
    with contextlib.suppress(asyncio.CancelledError):
        await using
    left = await engine.list()
    await engine.aclose()
    assert left == []
