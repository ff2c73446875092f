"""The control groups above containers: none is left when the last container is gone, whatever happened to it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from atoll.engines.docker.engine import DockerEngine
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.engines.linux.native_engine import NativeEngine
from atoll.errors import SandboxError
from atoll.model import SandboxSpec, State
from atoll.settings import Settings
from atoll.waiting import Deadline
from docker import private_engine
from needs import not_applicable

SPEC = SandboxSpec(image=private_engine.BUSYBOX)
_KILLED = """
import asyncio, sys
from pathlib import Path
from atoll.engines.docker.api import facts
from atoll.engines.docker.engine import DockerEngine
from atoll.settings import Settings

async def main():
    engine = DockerEngine(Settings(Path(sys.argv[1]), Path(sys.argv[2])))
    async with engine._accounts.claimed():
        assert engine._accounts.parent(await facts.learn(engine._http), "somebody")
        print("made", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
async def engine(engine: DockerEngine) -> DockerEngine:
    if not await engine.shared_ceilings():
        not_applicable("this Docker engine makes control groups elsewhere")
    return engine


def left(settings: Settings) -> list[str]:
    """All groups of this installation, in every hierarchy."""
    top = Group(Hierarchy.find(), f"/atoll-{settings.installation_id()[:12]}")
    return [str(directory) for directory in top.directories() if directory.exists()]


async def test_a_deletion_waits_for_what_still_dies_there(engine: DockerEngine, settings: Settings) -> None:
    """The Docker engine does not: it reports the container as removed."""
    handle = await engine.create("one", SPEC)
    container = str((await engine.container("one"))["Id"])
    (group,) = Hierarchy.find().controllers["pids"].glob(f"atoll-*/@*/{container}")
    dying = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        (group / "cgroup.procs").write_text(str(dying.pid))
        deleting = asyncio.ensure_future(engine.delete(handle))
        async with asyncio.timeout(60):
            while (await engine.inspect(handle)).state is not State.MISSING:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert group.exists()
    finally:
        dying.kill()
        await dying.wait()
    await deleting
    assert left(settings) == []


async def test_one_that_stands_still_unknown_to_the_engine_is_deleted(engine: DockerEngine, settings: Settings) -> None:
    """As when the engine died while it paused it: a process that is frozen does not die before it goes on."""
    handle = await engine.create("one", SPEC)
    container = str((await engine.container("one"))["Id"])
    (directory,) = Hierarchy.find().controllers["freezer"].glob(f"atoll-*/@*/{container}")
    group = Group(Hierarchy.find(), "/" + "/".join(directory.parts[-3:]))
    await group.freeze(Deadline.after(10))
    try:
        assert (await engine.inspect(handle)).state is State.RUNNING
        async with asyncio.timeout(40):
            await engine.delete(handle)
    finally:
        group.thaw()
    assert left(settings) == []


async def test_one_that_cannot_be_made_leaves_none(engine: DockerEngine, settings: Settings) -> None:
    with pytest.raises(SandboxError):
        await engine.create("one", SandboxSpec(image=private_engine.BUSYBOX, work_dir="/bin/busybox/x"))
    assert left(settings) == []


async def test_none_is_left_of_a_process_that_was_killed(engine: DockerEngine, settings: Settings) -> None:
    """As long as it lives, nobody takes away what it is about to use."""
    maker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _KILLED, str(settings.data_dir), str(settings.run_dir)), stdout=asyncio.subprocess.PIPE
    )
    native = NativeEngine(settings)
    try:
        assert maker.stdout is not None
        assert await maker.stdout.readline() == b"made\n"
        for each in (engine, native):
            await each.gc(shared=False)
        assert left(settings)
    finally:
        maker.kill()
        await maker.communicate()
    await engine.gc(shared=False)
    assert left(settings) == []
    await native.aclose()


async def test_other_engines_of_the_installation_leave_containers_alone(
    engine: DockerEngine, settings: Settings
) -> None:
    handle, native = await engine.create("one", SPEC), NativeEngine(settings)
    assert await native.gc() == []
    await native.aclose()
    assert (await engine.inspect(handle)).state is State.RUNNING
    await engine.delete(handle)
    assert left(settings) == []
