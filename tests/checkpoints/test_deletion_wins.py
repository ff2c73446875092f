"""A sandbox that is deleted while something else is done to it: nothing of it is left, and whoever did that is told."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.errors import SandboxError, SandboxGoneError
from atoll.model import State
from atoll.settings import Settings
from checkpoints.conftest import MakeSandbox
from leftovers import leftovers

_OPERATIONS: dict[str, Callable[[LinuxEngine, Any], Awaitable[object]]] = {
    "restart": lambda engine, handle: engine.rollback(handle, None),
    "rollback": lambda engine, handle: engine.rollback(handle, "one"),
    "checkpoint": lambda engine, handle: engine.checkpoint(handle),
    "pause": lambda engine, handle: engine.pause(handle),
    "resume": lambda engine, handle: engine.resume(handle),
    "snapshot": lambda engine, handle: engine.snapshot(handle, f"s{os.urandom(6).hex()}"),
    "diff": lambda engine, handle: engine.diff(handle, "one"),
}


@pytest.mark.parametrize(
    "engine", ["native", *(pytest.param(name, marks=pytest.mark.slow) for name in ("runc", "runsc"))], indirect=True
)
@pytest.mark.parametrize("what", _OPERATIONS)
async def test_whatever_is_done_meanwhile(
    engine: LinuxEngine, sandbox_on: MakeSandbox, settings: Settings, what: str
) -> None:
    """The delete comes at moments that are spread over the whole of the operation."""
    rounds = 3
    for number in range(rounds):
        sandbox = await sandbox_on(engine).create()
        await sandbox.checkpoint("one")
        handle = sandbox.access.handle()
        await sandbox.detach()
        doing = asyncio.ensure_future(_OPERATIONS[what](engine, handle))
        await asyncio.sleep(0.1 * number / rounds * random.random())
        async with asyncio.timeout(30):
            await engine.delete(handle)
            outcome = (await asyncio.gather(doing, return_exceptions=True))[0]
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, SandboxGoneError), repr(outcome)
            assert "has been deleted" in str(outcome)
        assert (await engine.inspect(handle)).state is State.MISSING
        assert leftovers(settings) == []


async def test_one_that_could_not_be_started_again_is_kept(
    native: LinuxEngine, sandbox_on: MakeSandbox, settings: Settings
) -> None:
    """Its files are still there, so nobody collects it, and it can go back once what was missing is there."""
    volume = settings.data_dir.parent / "volume"
    volume.mkdir()
    os.chown(volume, 1000, 1000)
    sandbox = await sandbox_on(native, volumes={str(volume): "/data"}).create()
    await sandbox.write_file("file", "kept")
    checkpoint = await sandbox.checkpoint()
    volume.rmdir()
    with pytest.raises(SandboxError):
        await sandbox.rollback(checkpoint)
    assert await native.gc() == []
    assert [handle.sandbox_id for handle in await native.list()] == [sandbox.id]
    volume.mkdir()
    os.chown(volume, 1000, 1000)
    await sandbox.rollback(checkpoint)
    assert await sandbox.read_file("file") == "kept"
    await sandbox.cleanup()
