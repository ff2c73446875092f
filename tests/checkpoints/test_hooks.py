"""Hooks of an image run as root, before anybody gets the sandbox, after each way in which it can begin anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.errors import StartError
from atoll.model import SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from checkpoints.conftest import MakeSandbox, bare_image

FOLDER = "/etc/atoll/hooks"
NOTES = f"""#!/bin/sh
echo "$ATOLL_HOOK $ATOLL_SANDBOX_ID $(id -u) $(pwd) ${{0##*/}}" >> /etc/notes
test ! -e {FOLDER}/fails || {{ echo "cannot reconnect" >&2; exit 6; }}
"""
ALL = ("created", "forked", "restored", "rolled-back")


@pytest.fixture
def image(tmp_path: Path) -> str:
    """An image with all hooks. The programs of this machine are put into it by a volume."""
    return bare_image(tmp_path / "hooks.tar", {f"etc/atoll/hooks/{name}": NOTES for name in ALL})


async def notes(sandbox: AsyncSandbox) -> list[str]:
    return (await sandbox.read_file("/etc/notes")).splitlines()


def note(hook: str, sandbox: AsyncSandbox) -> str:
    return f"{hook} {sandbox.id} 0 / {hook}"


@pytest.mark.timeout(120)
async def test_each_hook_runs_when_its_time_has_come(engine: LinuxEngine, sandbox_on: MakeSandbox, image: str) -> None:
    options: dict[str, Any] = {"image": image, "volumes": ["/usr:/usr:ro"]}
    async with sandbox_on(engine, **options, setup=["tail -1 /etc/notes > /etc/before-setup"]) as sandbox:
        created = note("created", sandbox)
        assert await notes(sandbox) == [created]
        assert (await sandbox.read_file("/etc/before-setup")).strip() == created
        await sandbox.rollback(await sandbox.checkpoint())
        assert await notes(sandbox) == [created, note("rolled-back", sandbox)]
        (fork,) = await sandbox.fork()
        async with fork:
            assert (await notes(fork))[2:] == [note("forked", fork)]
        await sandbox.snapshot("with-hooks")
        async with sandbox_on(engine, image="snapshot:with-hooks", volumes=["/usr:/usr:ro"]) as another:
            assert (await notes(another))[2:] == [note("forked", another)]
        await sandbox.restart()
        assert await notes(sandbox) == [note("rolled-back", sandbox)]


@pytest.mark.timeout(120)
async def test_what_wakes_from_the_disk_has_a_hook_too(
    engine: LinuxEngine, sandbox_on: MakeSandbox, image: str
) -> None:
    async with sandbox_on(engine, image=image, volumes=["/usr:/usr:ro"]) as sandbox:
        if engine._launchers.isolation != "gvisor":
            await sandbox.pause()
            await sandbox.resume()
            assert await notes(sandbox) == [note("created", sandbox)], "in memory nothing begins anew"
            return
        await sandbox.pause(memory="disk")
        await sandbox.resume()
        assert await notes(sandbox) == [note("created", sandbox), note("restored", sandbox)]
        saved = await sandbox.checkpoint(memory=True)
        (fork,) = await sandbox.fork(checkpoint=saved)
        async with fork:
            assert (await notes(fork))[2:] == [note("forked", fork)]


async def test_a_hook_that_fails(native: LinuxEngine, sandbox_on: MakeSandbox, image: str) -> None:
    """A creation fails with it, and leaves nothing. After a rollback the sandbox goes on."""
    options: dict[str, Any] = {"image": image, "volumes": ["/usr:/usr:ro"]}
    async with sandbox_on(native, **options, start=[{"name": "up", "command": "sleep 1000"}]) as sandbox:
        await sandbox.write_file(f"{FOLDER}/fails", "")
        saved = await sandbox.checkpoint()
        with pytest.raises(StartError, match="'rolled-back' of its image ended with exit code 6: cannot reconnect"):
            await sandbox.rollback(saved)
        assert (await sandbox.exec("true")).success
        assert [each.state for each in await sandbox.start_commands()] == ["running"]
        with pytest.raises(StartError, match="'forked' of its image ended with exit code 6") as caught:
            await sandbox.fork(2)
        assert "cannot reconnect" in caught.value.output
        assert [handle.sandbox_id for handle in await native.list()] == [sandbox.id]


async def test_a_hook_that_cannot_be_executed(native: LinuxEngine, sandbox_on: MakeSandbox, image: str) -> None:
    async with sandbox_on(native, image=image, volumes=["/usr:/usr:ro"]) as sandbox:
        await sandbox.write_file(f"{FOLDER}/rolled-back", "#!/no/such/interpreter\n")
        saved = await sandbox.checkpoint()
        with pytest.raises(StartError, match="exit code 126"):
            await sandbox.rollback(saved)
        await sandbox.remove(f"{FOLDER}/rolled-back")
        await sandbox.rollback(await sandbox.checkpoint())


async def test_builds_run_no_hooks(native: LinuxEngine, image: str) -> None:
    spec = SandboxSpec.of(image=image, volumes=["/usr:/usr:ro"], labels={"atoll.build": "1"})
    async with AsyncSandbox(spec, engine=native) as sandbox:
        assert not await sandbox.exists("/etc/notes")
