"""Limits that are changed while a sandbox runs: really, all or none, and for the rest of its life."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from atoll import AsyncSandbox
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.native_engine import NativeEngine
from atoll.errors import EngineError, SandboxGoneError, SandboxResourceError, SpecError, UnsupportedError
from atoll.model import Cause, Limits, State
from atoll.settings import Settings
from needs import need

MIB = 1 << 20
TAKE = ["python3", "-c", "import sys; bytearray(int(sys.argv[1]) << 20)"]


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    """One for all: to make a pool takes longer than most of these tests."""
    need("root")
    folder = Path(tempfile.mkdtemp(prefix="al-", dir="/tmp"))
    folder.chmod(0o755)
    yield Settings(folder / "data", folder / "run")
    shutil.rmtree(folder)


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[LinuxEngine]:
    made = NativeEngine(settings)
    yield made
    for handle in await made.list():
        await made.delete(handle)
    await made.gc()
    await made.aclose()


@pytest.fixture
async def box(engine: LinuxEngine) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(engine=engine, memory="64m", pids=40, cpus=1, disk="32m") as made:
        yield made


def record_of(engine: LinuxEngine, box: AsyncSandbox) -> Record:
    found = engine.layout.records.read(box.id)
    assert found is not None
    return found


def in_force(engine: LinuxEngine, box: AsyncSandbox) -> tuple[int, int]:
    """The memory and the processes that the kernel allows."""
    group = engine.layout.group(box.id)
    v2 = engine.layout.hierarchy.mode == "v2"
    memory, pids = group.directory("memory"), group.directory("pids")
    assert memory is not None
    assert pids is not None
    name = "memory.max" if v2 else "memory.limit_in_bytes"
    return int((memory / name).read_text()), int((pids / "pids.max").read_text())


async def test_what_is_given_changes_and_the_rest_stays(engine: LinuxEngine, box: AsyncSandbox) -> None:
    assert (await box.exec([*TAKE, "100"], timeout=20)).cause is Cause.OUT_OF_MEMORY
    found = await box.set_limits(memory="200m")
    assert (found.limits.memory_bytes, found.limits.pids, found.limits.disk_bytes) == (200 * MIB, 40, 32 * MIB)
    assert found == await box.info()
    assert (await box.exec([*TAKE, "100"], timeout=20)).success
    assert (await box.exec("head -c 48m /dev/zero >file", timeout=20)).cause is Cause.DISK_FULL
    await box.remove("file")
    await box.exec("sync", timeout=20)
    await box.set_limits(disk="80m", pids=20)
    assert (await box.exec("head -c 48m /dev/zero >file", timeout=20)).success
    assert in_force(engine, box) == (200 * MIB, 20)
    assert record_of(engine, box).limits_before is None


async def test_less_than_is_in_use_is_refused_and_changes_nothing(engine: LinuxEngine, box: AsyncSandbox) -> None:
    await box.exec("head -c 20m /dev/urandom >file && sync", timeout=20)
    hold = "import time; kept = bytearray(30 << 20); print('ready', flush=True); time.sleep(1000)"
    command = await box.start(["python3", "-c", hold])
    async for piece in command:
        if b"ready" in piece.data:
            break
    for wanted in ({"memory": "20m"}, {"disk": "10m"}, {"pids": 2}):
        with pytest.raises(SandboxResourceError, match="more than the new limit") as refused:
            await box.set_limits(cpus=2, **wanted)
        assert refused.value.hint
        assert in_force(engine, box) == (64 * MIB, 40)
        assert record_of(engine, box).spec.limits.cpus == 1
    assert (await box.exec("echo on", timeout=10)).stdout == "on\n"


async def test_what_cannot_be_changed_is_named(box: AsyncSandbox, engine: LinuxEngine) -> None:
    (handle,) = await engine.list()
    with pytest.raises(UnsupportedError, match="cannot change inodes, open_files") as refused:
        await engine.set_limits(handle, Limits(open_files=100, inodes=200, pids=20))
    assert "memory_bytes" in (refused.value.hint or "")
    assert in_force(engine, box)[1] == 40
    with pytest.raises(SpecError, match="no limit is named"):
        await box.set_limits()


@pytest.mark.parametrize(
    "wanted", [{"cpus": float("nan")}, {"cpus": -1}, {"pids": 10**12}, {"memory": -5}, {"memory": "1k"}, {"disk": ""}]
)
async def test_nonsense_is_refused(box: AsyncSandbox, engine: LinuxEngine, wanted: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        await box.set_limits(**wanted)  # type: ignore[arg-type]
    assert in_force(engine, box) == (64 * MIB, 40)


async def test_a_change_lasts_for_the_life_of_the_sandbox(engine: LinuxEngine, settings: Settings) -> None:
    async with AsyncSandbox(engine=engine, memory="64m", pids=40, disk="64m") as box:
        checkpoint = await box.checkpoint()
        await box.set_limits(memory="200m", pids=60, disk="128m")
        await box.rollback(checkpoint)
        assert in_force(engine, box) == (200 * MIB, 60)
        await box.restart()
        assert in_force(engine, box) == (200 * MIB, 60)
        assert (await box.exec("head -c 96m /dev/zero >file", timeout=20)).success
        await box.remove("file")
        await box.exec("sync", timeout=20)
        (fork,) = await box.fork()
        async with fork:
            assert in_force(engine, fork) == (200 * MIB, 60)
            assert (await fork.info()).limits.disk_bytes == 128 * MIB
        other = NativeEngine(settings)
        (seen,) = [handle for handle in await other.list() if handle.sandbox_id == box.id]
        assert seen.limits().limits.pids == 60
        await other.aclose()


async def test_a_paused_sandbox_can_be_changed(engine: LinuxEngine, box: AsyncSandbox) -> None:
    await box.pause()
    await box.set_limits(memory="200m")
    assert (await box.inspect()).state is State.PAUSED
    await box.resume()
    assert (await box.exec([*TAKE, "100"], timeout=20)).success


async def test_changes_at_once_are_made_one_after_another(engine: LinuxEngine, box: AsyncSandbox) -> None:
    other = await AsyncSandbox.attach(box.id, engine=engine)
    changes = [box.set_limits(memory=f"{size}m") for size in range(100, 110)]
    changes += [other.set_limits(pids=number) for number in range(50, 60)]
    await asyncio.gather(*changes)
    limits = record_of(engine, box).spec.limits
    assert in_force(engine, box) == (limits.memory_bytes, limits.pids)
    assert limits.memory_bytes in [size * MIB for size in range(100, 110)]
    assert limits.pids in range(50, 60)
    await other.detach()


async def test_a_change_that_fails_half_way_changes_nothing(
    engine: LinuxEngine, box: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of the files that are written is refused: those before it get their former values back."""
    put = Group._put

    def failing(group: Group, values: list[tuple[str, str, str]]) -> None:
        put(group, [each for each in values if each[0] != "pids"])
        if ("pids", "pids.max", "50") in values:
            raise OSError(22, "refused")
        put(group, [each for each in values if each[0] == "pids"])

    monkeypatch.setattr(Group, "_put", failing)
    with pytest.raises(EngineError, match="cannot be set"):
        await box.set_limits(memory="200m", pids=50, disk="64m")
    assert in_force(engine, box) == (64 * MIB, 40)
    assert record_of(engine, box).spec.limits == box.spec.limits
    assert (await box.exec("head -c 48m /dev/zero >file", timeout=20)).cause is Cause.DISK_FULL


async def test_a_cancelled_caller_leaves_record_and_kernel_in_agreement(engine: LinuxEngine, box: AsyncSandbox) -> None:
    for size in range(70, 90):
        task = asyncio.create_task(box.set_limits(memory=f"{size}m"))
        for _ in range(size - 70):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        found = record_of(engine, box)
        assert found.limits_before is None
        assert in_force(engine, box)[0] == found.limits.memory_bytes


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from atoll import AsyncSandbox
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.linux.native_engine import NativeEngine
from atoll.settings import Settings

put = Group._put
def dying(group, values):
    put(group, values[: int(sys.argv[4])])
    os.kill(os.getpid(), signal.SIGKILL)
Group._put = dying

async def main():
    engine = NativeEngine(Settings(Path(sys.argv[1]), Path(sys.argv[2])))
    box = await AsyncSandbox.attach(sys.argv[3], engine=engine)
    await box.set_limits(memory="200m", pids=50, disk="64m")
asyncio.run(main())
"""


@pytest.mark.parametrize("written", [0, 2])
async def test_a_change_whose_process_is_killed_is_completed(
    engine: LinuxEngine, box: AsyncSandbox, settings: Settings, written: int
) -> None:
    arguments = [str(settings.data_dir), str(settings.run_dir), box.id, str(written)]
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert record_of(engine, box).limits_before is not None
    assert (await box.inspect()).state is State.RUNNING
    assert record_of(engine, box).limits_before is None
    assert in_force(engine, box) == (200 * MIB, 50)
    assert record_of(engine, box).limits.memory_bytes == 200 * MIB
    assert (await box.exec("head -c 48m /dev/zero >file", timeout=20)).success


async def test_one_that_is_deleted_meanwhile_is_gone(engine: LinuxEngine) -> None:
    box = await AsyncSandbox(engine=engine, memory="64m").create()
    outcomes = await asyncio.gather(
        *(box.set_limits(memory=f"{size}m") for size in range(70, 80)), box.cleanup(), return_exceptions=True
    )
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException) or isinstance(outcome, SandboxGoneError), outcome
    assert await engine.list() == []
    assert not os.path.lexists(engine.layout.records.home(box.id))
