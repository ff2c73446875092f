"""The memory of a ready sandbox is kept, and the next sandboxes of its spec start with everything running."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.errors import SpecError, StartError, UnsupportedError
from atoll.images import ImageConfig
from atoll.manager import PoolSettings, SandboxManager
from atoll.model import SandboxSpec
from atoll.model.spec import OWNER_LABEL
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from checkpoints.conftest import MakeSandbox, emptied, engine_named
from checkpoints.images import make_image

COUNTER = "n=0; while :; do n=$((n+1)); echo $$ $n >/tmp/new; mv /tmp/new /tmp/count; sleep 0.02; done"
SPEC: dict[str, Any] = {
    "isolation": "gvisor",
    "setup": ["echo done >>/root/setup"],
    "start": [{"name": "counter", "command": f"echo begun >>/root/begun; {COUNTER}"}],
    "ready": "test -e /tmp/count",
    "prewarm": "memory",
}
PLAIN: dict[str, Any] = {"isolation": "gvisor", "prewarm": "memory"}


@pytest.fixture
async def gvisor(settings: Settings) -> AsyncIterator[LinuxEngine]:
    engine = engine_named("runsc", settings)
    yield engine
    engine._ready.collect(0)
    await emptied(engine)


def kept(engine: LinuxEngine) -> set[str]:
    """The ids of the states that are kept."""
    return {saved.id for saved in engine._storage.ready.all() if saved.kind == "ready"}


async def first(make: MakeSandbox, engine: LinuxEngine, **spec: Any) -> bool:
    """Make a sandbox and delete it; whether it started from memory."""
    async with make(engine, **spec) as sandbox:
        return sandbox.access.handle().is_prewarmed


@pytest.mark.timeout(120)
async def test_the_next_sandboxes_go_on_from_memory(gvisor: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(gvisor, **SPEC) as one:
        assert not one.access.handle().is_prewarmed
        pid, _ = (await one.exec("cat /tmp/count")).stdout.split()
        await one.exec("echo mine >/root/secret")
    assert len(kept(gvisor)) == 1

    two, three = sandbox_on(gvisor, **SPEC), sandbox_on(gvisor, **SPEC, labels={"a": "b"}, lifetime=600.0)
    async with asyncio.TaskGroup() as both:
        for each in (two, three):
            both.create_task(each.create())
    try:
        for each in (two, three):
            assert each.access.handle().is_prewarmed
            said = (
                await each.exec("cut -d' ' -f1 /tmp/count; cat /root/setup /root/begun; echo $ATOLL_SANDBOX_ID")
            ).stdout
            assert said.split() == [pid, "done", "begun", each.id]
            assert (await each.exec('n=$(cat /tmp/count); while [ "$(cat /tmp/count)" = "$n" ]; do :; done')).success
            assert not await each.exists("/root/secret")
            (state,) = await each.start_commands()
            assert state.state == "running"
        await two.exec("echo x >/root/own")
        assert not await three.exists("/root/own")
        await two.restart()
        assert (await two.exec("cut -d' ' -f1 /tmp/count; cat /root/setup /root/begun")).stdout.split() == [
            pid,
            "done",
            "begun",
        ]
        assert not await two.exists("/root/own")
    finally:
        await two.cleanup()
        await three.cleanup()
    assert len(kept(gvisor)) == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_only_the_same_spec_and_owner_share_memory(gvisor: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    assert not await first(sandbox_on, gvisor, **PLAIN)
    assert await first(sandbox_on, gvisor, **PLAIN)
    assert not await first(sandbox_on, gvisor, **PLAIN, env={"A": "b"})
    for owner in ("ann", "bob"):
        spec = SandboxSpec.of(**PLAIN).model_copy(update={"labels": {OWNER_LABEL: owner}})
        for again in (False, True):
            async with AsyncSandbox(spec, engine=gvisor, settings=gvisor.layout.settings) as sandbox:
                assert sandbox.access.handle().is_prewarmed is again
    assert len(kept(gvisor)) == 4


@pytest.mark.timeout(120)
async def test_a_changed_image_makes_a_new_state(gvisor: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    make_image(gvisor.images)
    spec = {**PLAIN, "image": "small"}
    assert [await first(sandbox_on, gvisor, **spec) for _ in range(2)] == [False, True]
    await gvisor.images.remove("small")
    make_image(gvisor.images, config=ImageConfig(env={"NEW": "yes"}))
    assert not await first(sandbox_on, gvisor, **spec)
    async with sandbox_on(gvisor, **spec) as one, sandbox_on(gvisor, **spec) as two:
        said = [(await each.exec("cat /etc/machine-id; echo $NEW $ATOLL_SANDBOX_ID")).stdout for each in (one, two)]
        assert [each.access.handle().is_prewarmed for each in (one, two)] == [True, True]
        assert len({text.split()[0] for text in said}) == 2
        assert [text.split()[1:] for text in said] == [["yes", one.id], ["yes", two.id]]
    gvisor._ready.collect(0)
    await gvisor.gc()
    assert not [lease for lease in gvisor.images.store.leases() if lease.startswith("saved-")]


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_what_cannot_be_restored_is_made_anew(
    gvisor: LinuxEngine, sandbox_on: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    await first(sandbox_on, gvisor, **PLAIN)
    (bad,) = kept(gvisor)
    for file in gvisor.layout.memory(bad).iterdir():
        if file.name.endswith(".img"):
            file.write_bytes(b"damaged")
    assert not await first(sandbox_on, gvisor, **PLAIN)
    (good,) = kept(gvisor)
    assert good != bad
    assert await first(sandbox_on, gvisor, **PLAIN)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_memory_that_is_not_ready_any_more_is_not_kept(gvisor: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    once = "test ! -e /root/ran && touch /root/ran"
    spec = {**PLAIN, "ready": {"command": once, "timeout_s": 1.0}}
    assert not await first(sandbox_on, gvisor, **spec)
    assert len(kept(gvisor)) == 1
    with pytest.raises(StartError):
        await first(sandbox_on, gvisor, **spec)
    assert kept(gvisor) == set()
    assert not await first(sandbox_on, gvisor, **spec)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_few_states_are_kept_and_the_last_used_ones(gvisor: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    for number in range(4):
        await first(sandbox_on, gvisor, **PLAIN, env={"N": str(number)})
    assert await first(sandbox_on, gvisor, **PLAIN, env={"N": "0"})
    async with sandbox_on(gvisor, **PLAIN, env={"N": "1"}) as sandbox:
        assert sandbox.access.handle().is_prewarmed
        gvisor._ready.collect(0)
        assert kept(gvisor) == set()
        assert len(gvisor.layout.layers.list_saved()) == 1
        await sandbox.restart()
        assert (await sandbox.exec("echo $N")).stdout == "1\n"
    assert gvisor.layout.layers.list_saved() == []
    for number in range(4):
        await first(sandbox_on, gvisor, **PLAIN, env={"N": str(number)})
    assert await first(sandbox_on, gvisor, **PLAIN, env={"N": "0"})
    await first(sandbox_on, gvisor, **PLAIN, env={"N": "4"})
    assert len(kept(gvisor)) == 4
    assert await first(sandbox_on, gvisor, **PLAIN, env={"N": "0"})
    assert not await first(sandbox_on, gvisor, **PLAIN, env={"N": "1"})


_MAKER = """
import asyncio, sys, time
from pathlib import Path
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.states.ready_states import ReadyStates
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings

def stuck(*_):
    print("saving", flush=True)
    time.sleep(1000)

async def main():
    settings = Settings(Path(sys.argv[1]), Path(sys.argv[2]))
    engine = OciEngine(settings, "runsc")
    if sys.argv[3] == "files":
        type(engine.layout.layers).save = stuck
    else:
        ReadyStates._write = stuck
    await AsyncSandbox(engine=engine, settings=settings, isolation="gvisor", prewarm="memory").create()

asyncio.run(main())
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("moment", ["files", pytest.param("record", marks=pytest.mark.slow)])
async def test_a_saver_that_is_killed_leaves_nothing(
    gvisor: LinuxEngine, sandbox_on: MakeSandbox, settings: Settings, moment: str
) -> None:
    words = [sys.executable, "-c", _MAKER, str(settings.data_dir), str(settings.run_dir), moment]
    maker = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert maker.stdout is not None
    assert await maker.stdout.readline() == b"saving\n"
    assert len(list(gvisor.layout.memory("x").parent.iterdir())) == 1
    maker.kill()
    await maker.communicate()
    assert kept(gvisor) == set()
    await gvisor.gc()
    assert list(gvisor.layout.memory("x").parent.iterdir()) == []
    assert gvisor.layout.layers.list_saved() == []
    (left,) = await gvisor.list()
    found = await AsyncSandbox.attach(left.sandbox_id, engine=gvisor, settings=settings)
    assert (await found.exec("true", timeout=20)).success
    await found.cleanup()
    assert [await first(sandbox_on, gvisor, **PLAIN) for _ in range(2)] == [False, True]


async def prewarmed(engine: LinuxEngine, ids: Sequence[str]) -> list[bool]:
    handles = {handle.sandbox_id: handle for handle in await engine.list()}
    return [handles[each].is_prewarmed for each in ids]


async def until_a_spare_is_prewarmed(engine: LinuxEngine) -> None:
    for _ in range(600):
        if any(handle.is_prewarmed for handle in await engine.list()):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("no spare started from memory")


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_manager_and_its_pools_start_from_memory(gvisor: LinuxEngine, settings: Settings) -> None:
    spec = SandboxSpec.of(**SPEC)
    manager = SandboxManager(engine=gvisor, settings=settings, pools=[PoolSettings(spec, size=2, parallel=1)])
    await manager.start()
    try:
        await until_a_spare_is_prewarmed(gvisor)
        ann = [await manager.create_sandbox(SPEC, owner="ann", env={"MINE": "1"}) for _ in range(2)]
        bob = await manager.create_sandbox(SPEC, owner="bob", env={"MINE": "1"})
        assert await prewarmed(gvisor, [*ann, bob]) == [False, True, False]
        sandbox = await manager.get_sandbox(ann[1])
        assert (await sandbox.exec("cat /root/begun; echo $ATOLL_SANDBOX_ID")).stdout.split() == ["begun", ann[1]]
    finally:
        await manager.cleanup()


async def test_what_cannot_be_prewarmed_is_refused(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    with pytest.raises(UnsupportedError, match="memory") as refused:
        await sandbox_on(native, prewarm="memory").create()
    assert "gvisor" in (refused.value.hint or "")
    with pytest.raises(SpecError, match="volumes"):
        SandboxSpec.of(**PLAIN, volumes=["data:/data"])
    with pytest.raises(SpecError, match="prewarm"):
        SandboxSpec.of(prewarm="disk")


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_snapshot_of_another_time_makes_a_new_state(gvisor: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    for content in ("one", "two"):
        async with sandbox_on(gvisor) as source:
            await source.exec(f"echo {content} >/root/file")
            await source.snapshot("base")
        for again in (False, True):
            async with sandbox_on(gvisor, **PLAIN, image="snapshot:base") as sandbox:
                assert sandbox.access.handle().is_prewarmed is again
                assert (await sandbox.exec("cat /root/file")).stdout == f"{content}\n"
        await gvisor.delete_snapshot("base")
