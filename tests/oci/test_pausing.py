"""Pausing with each runtime's own means, and what a maker that died in the middle of it leaves."""

from __future__ import annotations

import pytest

from atoll.engines.linux.oci_engine import OciEngine
from atoll.model import SandboxSpec, State
from atoll.settings import Settings
from oci.benches import EACH_RUNTIME
from oci.conftest import NeedRuntime, empty


@pytest.mark.parametrize("runtime", EACH_RUNTIME)
async def test_another_process_resumes_what_one_paused(
    runtime: str, settings: Settings, need_runtime: NeedRuntime
) -> None:
    need_runtime(runtime)
    engine, other = OciEngine(settings, runtime), OciEngine(settings)
    handle = await engine.create("a", SandboxSpec())
    await engine.pause(handle)
    assert (await other.inspect(handle)).state is State.PAUSED
    assert engine.layout.group("a").is_frozen() == (runtime != "runsc")
    await other.resume(handle)
    assert (await engine.inspect(handle)).state is State.RUNNING
    await other.aclose()
    await empty(engine)


async def test_a_pause_that_never_came_about_can_be_ended(settings: Settings, need_runtime: NeedRuntime) -> None:
    """Noted by a process that died before it could tell the runtime."""
    need_runtime("runsc")
    engine = OciEngine(settings, "runsc")
    handle = await engine.create("a", SandboxSpec())
    (engine.layout.run("a") / "paused").touch()
    await engine.resume(handle)
    assert (await engine.inspect(handle)).state is State.RUNNING
    await empty(engine)
