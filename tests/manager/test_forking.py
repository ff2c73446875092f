"""A manager forks its sandboxes: each is a member like any other, and all of them are there or none."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from atoll.engines.linux.native_engine import NativeEngine
from atoll.errors import CheckpointNotFoundError, ConflictError, LimitReachedError, UnsupportedError
from atoll.manager import SandboxManager
from atoll.model import Capability, Cause, State
from atoll.settings import Settings
from needs import missing

MOST = 5


@pytest.fixture
def settings() -> Iterator[Settings]:
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
    folder.chmod(0o755)
    yield Settings(folder / "data", folder / "run")
    shutil.rmtree(folder)


@pytest.fixture
async def native(settings: Settings) -> AsyncIterator[NativeEngine]:
    engine = NativeEngine(settings)
    if os.geteuid() != 0 or Capability.CHECKPOINTS not in (await engine.describe()).capabilities:
        missing("needs root and btrfs-progs")
    yield engine
    assert await engine.list() == []
    assert engine.layout.layers.list_saved() == []
    await engine.aclose()


@pytest.fixture
async def keeping(native: NativeEngine, settings: Settings) -> AsyncIterator[SandboxManager]:
    async with SandboxManager(MOST, engine=native, settings=settings, at_exit="delete") as manager:
        yield manager


async def test_forks_are_members(keeping: SandboxManager, native: NativeEngine) -> None:
    source = await keeping.create_sandbox(owner="ann", labels={"a": "b"}, env={"VARIABLE": "v"}, name="first")
    sandbox = await keeping.get_sandbox(source)
    await sandbox.write_file("file", "one")
    await sandbox.checkpoint("here")
    await sandbox.write_file("file", "two")
    ids = await keeping.fork_sandbox(source, 2, names=["x", "y"], labels=[{"n": "1"}, {"n": "2"}], key="k")
    assert await keeping.fork_sandbox(source, 2, names=["x", "y"], labels=[{"n": "1"}, {"n": "2"}], key="k") == ids
    with pytest.raises(ConflictError):
        await keeping.fork_sandbox(source, 2, "here", names=["x", "y"], labels=[{"n": "1"}, {"n": "2"}], key="k")
    with pytest.raises(ConflictError):
        await keeping.fork_sandbox(source, 1, names=["first"])
    (by_itself,) = await sandbox.fork(1, "here")
    assert await by_itself.read_file("file") == "one"
    for number, id in enumerate(ids, 1):
        fork = await keeping.get_sandbox(id)
        assert await fork.read_file("file") == "two"
        assert (await fork.exec("echo $VARIABLE")).stdout == "v\n"
        record = await keeping.describe(id)
        assert (record.owner, record.state) == ("ann", State.RUNNING)
        assert record.labels == {"a": "b", "n": str(number)}
    names = {handle.sandbox_id: handle.spec.labels.get("atoll.name") for handle in await native.list()}
    assert [names[id] for id in (source, *ids)] == ["first", "x", "y"]


async def test_there_is_room_for_all_or_for_none(keeping: SandboxManager, native: NativeEngine) -> None:
    source = await keeping.create_sandbox()
    answers = await asyncio.gather(
        *(keeping.fork_sandbox(source, 2) for _ in range(4)), keeping.fork_sandbox(source, 6), return_exceptions=True
    )
    made = [each for each in answers if isinstance(each, list)]
    assert [len(each) for each in made] == [2, 2]
    assert all(isinstance(each, LimitReachedError) for each in answers if each not in made)
    assert len(await native.list()) == len(await keeping.list_sandboxes()) == MOST


async def test_a_fork_that_fails_or_is_given_up_leaves_nothing(keeping: SandboxManager, native: NativeEngine) -> None:
    source = await keeping.create_sandbox()
    with pytest.raises(CheckpointNotFoundError):
        await keeping.fork_sandbox(source, 2, "never")
    with pytest.raises(UnsupportedError):
        await keeping.fork_sandbox(source, 2, memory=True)
    with pytest.raises(ValueError, match="one entry for each fork"):
        await keeping.fork_sandbox(source, 2, names=["x"])
    for pause_s in (0.0, 0.005, 0.02, 0.05):
        task = asyncio.ensure_future(keeping.fork_sandbox(source, 3, names=["x", "y", "z"]))
        await asyncio.sleep(pause_s)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            for id in task.result():
                await keeping.delete_sandbox(id)
        assert [record.id for record in await keeping.list_sandboxes()] == [source]
        assert [handle.sandbox_id for handle in await native.list()] == [source]
    assert (await (await keeping.get_sandbox(source)).exec("true")).success


async def test_what_was_being_forked_at_a_crash_is_undone(native: NativeEngine, settings: Settings) -> None:
    first = SandboxManager(MOST, engine=native, settings=settings)
    source = await first.create_sandbox()
    reached, go_on = asyncio.Event(), asyncio.Event()
    fork = native.fork

    async def stuck(*args: object, **options: object) -> object:
        made = await fork(*args, **options)  # type: ignore[arg-type]
        reached.set()
        await go_on.wait()
        return made

    native.fork = stuck  # type: ignore[assignment, method-assign]
    forking = asyncio.ensure_future(first.fork_sandbox(source, 2))
    await reached.wait()
    native.fork = fork  # type: ignore[method-assign]
    assert len(await native.list()) == 3
    # As a crash leaves it: the journal says what was begun, and nobody goes on with it.
    wiring = await first._open()
    wiring._directory.close()
    async with SandboxManager(MOST, engine=native, settings=settings, at_exit="delete") as second:
        assert [record.id for record in await second.list_sandboxes()] == [source]
        assert [handle.sandbox_id for handle in await native.list()] == [source]
        ended = await second.list_sandboxes(ended=True)
        assert [record.cause for record in ended] == [Cause.LOST, Cause.LOST]
        forking.cancel()
        go_on.set()
        await asyncio.wait({forking})
