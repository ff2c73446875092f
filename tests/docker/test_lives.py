"""Changes of a container's life exclude one another, deleting wins, and what a dead process asked for is collected."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from atoll.engines.docker.engine import DockerEngine
from atoll.errors import SandboxGoneError
from atoll.model import Handle, SandboxSpec, State
from atoll.settings import Settings
from docker import private_engine

_OPERATIONS: dict[str, Callable[[DockerEngine, Handle], Awaitable[object]]] = {
    "restart": lambda engine, handle: engine.rollback(handle, None),
    "checkpoint": lambda engine, handle: engine.checkpoint(handle),
    "pause": lambda engine, handle: engine.pause(handle),
    "fork": lambda engine, handle: engine.fork(handle, [f"{handle.sandbox_id}-fork"]),
}
_MAKER = """
import asyncio, sys, time
from pathlib import Path
from atoll.engines.docker.api import image_pull
from atoll.engines.docker.engine import DockerEngine
from atoll.engines.docker.container_maker import maker_label
from atoll.model import SandboxSpec
from atoll.settings import Settings

async def main():
    engine = DockerEngine(Settings(Path(sys.argv[1]), Path(sys.argv[2])))
    spec, who = SandboxSpec(image=sys.argv[3]), engine._who("late")
    image = await image_pull.ensure(engine._http, spec.image)
    await engine._containers.make(who.container, await engine._body(who, spec, image, time.time(), maker_label()))
    print("made", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def spec() -> SandboxSpec:
    return SandboxSpec(image=private_engine.BUSYBOX)


@pytest.mark.parametrize(
    "what", ["restart", "fork", *(pytest.param(what, marks=pytest.mark.slow) for what in ("checkpoint", "pause"))]
)
async def test_a_deletion_wins(engine: DockerEngine, settings: Settings, what: str) -> None:
    other = DockerEngine(settings, private_engine.where())
    for number in range(2):
        handle = await engine.create(f"one-{number}", spec())
        doing = asyncio.ensure_future(_OPERATIONS[what](other, handle))
        await asyncio.sleep(0.2 * number)
        async with asyncio.timeout(60):
            await engine.delete(handle)
            outcome: Any = (await asyncio.gather(doing, return_exceptions=True))[0]
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, SandboxGoneError), repr(outcome)
            assert "has been deleted" in str(outcome)
        elif what == "fork":
            await engine.delete(outcome[0])
        assert (await engine.inspect(handle)).state is State.MISSING
        assert await engine.list() == []
        assert await engine._commits.all("checkpoint") == []
        assert await engine._commits.all("origin") == []
        assert list(settings.run_dir.glob("docker/*")) == []


async def test_changes_of_one_life_come_one_after_another(engine: DockerEngine, settings: Settings) -> None:
    handle = await engine.create("one", spec())
    other = DockerEngine(settings, private_engine.where())
    await asyncio.gather(*(each.rollback(handle, None) for each in (engine, other, engine)))
    assert (await engine.inspect(handle)).state is State.RUNNING
    assert len(await engine._containers.labelled(f"atoll.installation={settings.installation_id()}")) == 1
    await engine.delete(handle)


async def test_what_a_dead_process_asked_for_is_collected(engine: DockerEngine, settings: Settings) -> None:
    """The container of one that was killed before it could start it; that of one that lives is left alone."""
    maker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _MAKER, str(settings.data_dir), str(settings.run_dir), private_engine.BUSYBOX),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert maker.stdout is not None
        assert await maker.stdout.readline() == b"made\n"
        assert await engine.gc() == []
        assert [handle.sandbox_id for handle in await engine.list()] == ["late"]
    finally:
        maker.kill()
        await maker.communicate()
    living = await engine.create("living", spec())
    assert len(await engine.gc()) == 1
    assert [handle.sandbox_id for handle in await engine.list()] == ["living"]
    await engine.delete(living)
