"""Our process is killed in the middle: nothing partial is listed, nothing leaks, and the sandbox is as it was or as it
should become."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import pytest

from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.model import State
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from checkpoints.conftest import emptied, engine_named
from checkpoints.test_memory import COUNTER, counting


def times(few: int, many: int) -> list[Any]:
    return [
        pytest.param(few, marks=pytest.mark.timeout(180)),
        pytest.param(many, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ]


_MAKER = """
import asyncio, random, sys
from pathlib import Path
from atoll.engines.linux.native_engine import NativeEngine
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings

async def main():
    settings = Settings(Path(sys.argv[1]), Path(sys.argv[2]))
    engine = NativeEngine(settings)
    sandbox = await AsyncSandbox.attach(sys.argv[3], engine=engine, settings=settings)
    dice = random.Random(sys.argv[4])
    print("up", flush=True)
    while True:
        what = dice.choice(["rollback", "checkpoint", "fork", "snapshot"])
        if what == "rollback":
            await sandbox.rollback(dice.choice(["one", "two"]))
        elif what == "checkpoint":
            await sandbox.checkpoint("more")
        elif what == "fork":
            await sandbox.fork(2, "one")
        else:
            await sandbox.snapshot(f"s{dice.randrange(1 << 40)}")

asyncio.run(main())
"""


@pytest.mark.parametrize("kills", times(6, 100))
async def test_killed_at_any_moment(settings: Settings, kills: int) -> None:
    engine = engine_named("native", settings)
    dice = random.Random()
    sandbox = await AsyncSandbox(engine=engine, settings=settings).create()
    for name in ("one", "two"):
        await sandbox.exec(f"echo {name} >file; head -c 100000 /dev/urandom >{name}; sha256sum {name} >sum")
        await sandbox.checkpoint(name)
    await sandbox.detach()
    await engine.aclose()
    for number in range(kills):
        maker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _MAKER, str(settings.data_dir), str(settings.run_dir), sandbox.id, str(number)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert maker.stdout is not None
        assert await maker.stdout.readline() == b"up\n"
        await asyncio.sleep(dice.uniform(0.0, 0.5))
        maker.kill()
        await maker.communicate()

        engine = NativeEngine(settings)
        await engine.gc()
        found = await AsyncSandbox.attach(sandbox.id, engine=engine, settings=settings)
        seen = await found.exec("sha256sum -c sum && cat file", timeout=20)
        assert seen.success, seen
        assert {"one", "two"} <= {each.name for each in await found.checkpoints()}
        for checkpoint in await found.checkpoints():
            if checkpoint.name == "more":
                await found.delete_checkpoint(checkpoint)
        for snapshot in await engine.snapshots():
            async with AsyncSandbox(image=f"snapshot:{snapshot.name}", engine=engine, settings=settings) as other:
                assert (await other.exec("sha256sum -c sum", timeout=20)).success
            await engine.delete_snapshot(snapshot.name)
        for handle in await engine.list():
            if handle.sandbox_id != sandbox.id:
                await engine.delete(handle)
        await found.detach()
        layers = engine.layout.layers
        assert layers.list() == [sandbox.id]
        assert len(layers.list_saved()) == 2
        await engine.aclose()
    await emptied(NativeEngine(settings))


_IMPORTER = """
import sys
from pathlib import Path
from atoll.engines.linux.native_engine import NativeEngine
from atoll.settings import Settings

def fill(layer):
    (layer / "upper" / "file").write_text("half")
    print("up", flush=True)
    sys.stdin.read()

engine = NativeEngine(Settings(Path(sys.argv[1]), Path(sys.argv[2])))
with engine._storage.new_id() as saved_id:
    engine.layout.layers.make_saved(saved_id, fill)
"""


async def test_what_an_import_had_unpacked_is_removed_once_it_was_killed(settings: Settings) -> None:
    engine = engine_named("native", settings)
    sandbox = await AsyncSandbox(engine=engine, settings=settings).create()
    with engine.layout.layers.looking(sandbox.id, saved=False) as layer:
        saved = layer.parent.parent / "saved"
    maker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _IMPORTER, str(settings.data_dir), str(settings.run_dir)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert maker.stdout is not None
    assert await maker.stdout.readline() == b"up\n"
    await engine.gc()
    assert [path.read_text() for path in saved.glob("*/upper/file")] == ["half"], "it is still being made"
    maker.kill()
    await maker.communicate()
    await engine.gc()
    assert list(saved.iterdir()) == []
    await sandbox.cleanup()
    await emptied(engine)


_SAVER = """
import asyncio, sys
from pathlib import Path
from atoll.engines.linux.oci_engine import OciEngine
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings

async def main():
    settings = Settings(Path(sys.argv[1]), Path(sys.argv[2]))
    engine = OciEngine(settings, "runsc")
    sandbox = await AsyncSandbox.attach(sys.argv[3], engine=engine, settings=settings)
    print("up", flush=True)
    while True:
        if sys.argv[4] == "sleep":
            await sandbox.pause(memory="disk")
            await sandbox.resume()
        else:
            await sandbox.checkpoint("more", memory=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("kills", times(4, 30))
async def test_killed_while_the_memory_is_saved_it_goes_on(settings: Settings, kills: int) -> None:
    """Also when the sandbox was held still just then, or was falling asleep."""
    engine = engine_named("runsc", settings)
    dice = random.Random()
    sandbox = await AsyncSandbox(engine=engine, settings=settings, isolation="gvisor").create()
    await sandbox.start(["python3", "-c", COUNTER])
    number = 1
    await counting(sandbox, number)
    await sandbox.detach()
    await engine.aclose()
    held = 0
    for turn in range(kills):
        maker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _SAVER, str(settings.data_dir), str(settings.run_dir), sandbox.id),
            "sleep" if turn % 2 else "save",
            stdout=asyncio.subprocess.PIPE,
        )
        assert maker.stdout is not None
        assert await maker.stdout.readline() == b"up\n"
        await asyncio.sleep(dice.uniform(0.05, 0.8))
        maker.kill()
        await maker.communicate()

        engine = OciEngine(settings, "runsc")
        held += engine._standstill.is_abandoned(sandbox.id)
        found = await AsyncSandbox.attach(sandbox.id, engine=engine, settings=settings)
        seen = await found.inspect()
        if seen.state is State.PAUSED:
            assert (turn % 2, seen.reason) == (1, "its memory is on the disk")  # as it was asked for
            await found.resume()
        number += 1
        assert (await counting(found, number)).split()[0] == str(number)
        assert (await found.inspect()).state is State.RUNNING
        await engine.gc()
        for checkpoint in await found.checkpoints():
            await found.delete_checkpoint(checkpoint)
        await found.detach()
        assert engine.layout.layers.list_saved() == []
        await engine.aclose()
    print(f"{held} of {kills} in the middle")
    await emptied(OciEngine(settings, "runsc"))
