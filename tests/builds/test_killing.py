"""A builder that is killed at any moment leaves nothing that is used by half, and the next build goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.builds import sweep
from atoll.builds.labels import BUILDER, build_labels, is_abandoned
from atoll.model import SandboxSpec
from builds.small_root import BASE, Workshop

DOCKERFILE = f"""FROM {BASE} AS one
RUN head -c 300000 /dev/urandom > /a && cp /a /a2
WORKDIR /deep/er
RUN cp /a b
FROM {BASE}
COPY --from=one /a /a2 /deep /
COPY files /files/
ADD archive.tar /archive/
RUN --mount=type=cache,target=/cache --mount=type=secret,id=key cat /run/secrets/key > /dev/null; cp /a /cache/
RUN cmp /a /a2 && cmp /a /er/b && echo done > /done
CMD ["x"]
"""
KINDS = ("step", "done")
CHECK = """cmp /a /a2 && cmp /a /er/b && cat /done && ls /files | wc -l && ls /archive/files | wc -l
ls -A /run /cache 2>/dev/null | grep -v :"""
PROGRAM = """
import asyncio, sys
from pathlib import Path
from atoll.builds import Builder, BuildRequest
from atoll.engines.linux.native_engine import NativeEngine
from atoll.images import Images
from atoll.settings import Settings

async def main():
    settings = Settings.load()
    engine = NativeEngine(settings)
    request = BuildRequest(Path(sys.argv[1]), name="killed", no_cache=True, secrets={"key": b"do-not-tell"})
    print("ready", flush=True)
    on_event = lambda event: print(event.kind, event.step, flush=True)
    await Builder(engine, Images(settings.data_dir), settings).build(request, on_event)
    print("finished", flush=True)

asyncio.run(main())
"""


def fill(context: Path) -> None:
    (context / "Dockerfile").write_text(DOCKERFILE)
    (context / "files").mkdir()
    for number in range(50):
        (context / "files" / str(number)).write_text(str(number) * 100)
    subprocess.run(["tar", "cf", "archive.tar", "files"], cwd=context, check=True)


def killed_at(workshop: Workshop, point: str, seconds: float = 0.0) -> bool:
    """Build in another program and kill it a while after it has reached this point. Returns whether it was at work."""
    places = {"ATOLL_DATA_DIR": str(workshop.settings.data_dir), "ATOLL_RUN_DIR": str(workshop.settings.run_dir)}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(workshop.context)],
        env={**os.environ, **places},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    with program.stdout:
        while (line := program.stdout.readline().strip()) != point:
            assert line, "the build ended before that"
        time.sleep(seconds)
        running = program.poll() is None
        program.send_signal(signal.SIGKILL)
        program.wait()
    return running


async def check(workshop: Workshop) -> None:
    """Build once more and check that the image is whole, and that nothing is left of the builds that were killed."""
    built = await workshop.build(DOCKERFILE, name="killed", secrets={"key": b"do-not-tell"})
    assert await workshop.look(built, CHECK) == "done\n50\n50\n"
    await sweep(workshop.engine)
    await workshop.engine.gc()
    assert [handle for handle in await workshop.engine.list() if BUILDER in handle.spec.labels] == []
    await workshop.images.verify("killed")


async def test_a_killed_build_leaves_nothing_that_is_used(workshop: Workshop) -> None:
    fill(workshop.context)
    assert killed_at(workshop, "step 5")
    await check(workshop)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["ready", "plan 0", *(f"{what} {step}" for step in range(1, 8) for what in KINDS)])
async def test_a_build_that_is_killed_at_any_step_leaves_nothing_that_is_used(workshop: Workshop, point: str) -> None:
    fill(workshop.context)
    assert killed_at(workshop, point)
    await check(workshop)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_build_that_is_killed_again_and_again_leaves_nothing_that_is_used(workshop: Workshop) -> None:
    fill(workshop.context)
    chance = random.Random(os.urandom(8))
    killed = sum([killed_at(workshop, "ready", chance.uniform(0, 1.5)) for _ in range(60)])
    await check(workshop)
    assert killed > 0


async def test_only_sandboxes_of_dead_builders_are_swept(workshop: Workshop) -> None:
    ours = build_labels("ours", "")
    dead = {**ours, BUILDER: ours[BUILDER].replace(f"{os.getpid()}-", f"{os.getpid()}-1", 1)}
    for sandbox_id, labels in (("mine", ours), ("dead", dead), ("other", {})):
        await workshop.engine.create(sandbox_id, SandboxSpec(image=BASE, labels=labels))
    assert await sweep(workshop.engine) == ["dead"]
    for handle in await workshop.engine.list():
        await workshop.engine.delete(handle)


def test_what_is_no_builder_is_never_abandoned() -> None:
    assert not is_abandoned("")
    assert not is_abandoned("1-2")
    assert not is_abandoned(build_labels("ours", "")[BUILDER])
