"""What the labels of an image start in sandboxes made from it, and how a spec sets that aside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.engines.contract import Building
from atoll.engines.linux.engine import LinuxEngine
from atoll.errors import SpecError, StartError
from atoll.images import ImageConfig
from atoll.model import SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from checkpoints.conftest import MakeSandbox, bare_image

START = '[{"name": "up", "command": "touch /workspace/up; exec sleep 1000"}]'
READY = '{"command": "test -e /workspace/up", "timeout": 30}'
USR = ["/usr:/usr:ro"]
KEY = "ab" * 32


@pytest.fixture
async def image(native: LinuxEngine, sandbox_on: MakeSandbox, tmp_path: Path) -> AsyncIterator[str]:
    """An image that starts something, and whose user may become root."""
    assert isinstance(native, Building)
    accounts = "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n"
    async with sandbox_on(native, image=bare_image(tmp_path / "bare.tar", {"etc/passwd": accounts})) as sandbox:
        await native.save_step(sandbox.access.handle(), KEY)
    labels = {"atoll.start": START, "atoll.ready": READY, "atoll.sudo": "true"}
    await native.commit_step(KEY, "starting", ImageConfig(labels=labels))
    await native.commit_step(KEY, "broken", ImageConfig(labels={"atoll.start": '[{"nome": 1}]'}))
    await native.commit_step(KEY, "deep", ImageConfig(labels={"atoll.ready": "[" * 20_000}))
    await native.commit_step(KEY, "failing", ImageConfig(labels={"atoll.start": '[["/no/such/program"]]'}))
    yield "starting"
    await native.prune_steps()


async def test_the_labels_of_an_image_say_what_starts(native: LinuxEngine, sandbox_on: MakeSandbox, image: str) -> None:
    async with sandbox_on(native, image=image, volumes=USR) as sandbox:
        assert await sandbox.exists("up")
        assert [(each.name, each.state) for each in await sandbox.start_commands()] == [("up", "running")]
        assert (await sandbox.exec("/run/atoll/sudo id -u", user="user")).stdout == "0\n"
        await sandbox.rollback(await sandbox.checkpoint())
        assert [each.state for each in await sandbox.start_commands()] == ["running"]
        again = await AsyncSandbox.attach(sandbox.id, engine=native)
        assert [each.state for each in await again.start_commands()] == ["running"]
        await again.detach()


async def test_a_spec_sets_the_labels_aside(native: LinuxEngine, sandbox_on: MakeSandbox, image: str) -> None:
    async with sandbox_on(native, image=image, volumes=USR, start=[], sudo=False) as sandbox:
        assert not await sandbox.exists("up")
        assert await sandbox.start_commands() == []
        assert not await sandbox.exists("/run/atoll")


async def test_a_build_starts_nothing(native: LinuxEngine, image: str) -> None:
    spec = SandboxSpec.of(image=image, volumes=USR, labels={"atoll.build": "1"})
    async with AsyncSandbox(spec, engine=native) as sandbox:
        assert not await sandbox.exists("up")


async def test_labels_that_are_wrong_are_an_error_and_leave_nothing(
    native: LinuxEngine, sandbox_on: MakeSandbox, image: str
) -> None:
    for name in ("broken", "deep"):
        with pytest.raises(SpecError, match=r"the label 'atoll.(start|ready)' of the image is invalid") as caught:
            await sandbox_on(native, image=name, volumes=USR).create()
        assert "start=[]" in (caught.value.hint or "")
    with pytest.raises(StartError, match="could not be started"):
        await sandbox_on(native, image="failing", volumes=USR).create()
    assert await native.list() == []
    async with sandbox_on(native, image="broken", volumes=USR, start=[]) as sandbox:
        assert (await sandbox.exec("true")).success


async def test_a_program_that_died_in_the_middle_of_a_rollback_is_completed_by_the_next(
    native: LinuxEngine, sandbox_on: MakeSandbox, image: str
) -> None:
    async with sandbox_on(native, image=image, volumes=USR) as sandbox:
        saved = await sandbox.checkpoint()
        await native.rollback(sandbox.access.handle(), saved.id)  # and nothing after it
        another = await AsyncSandbox.attach(sandbox.id, engine=native)
        assert [each.state for each in await another.start_commands()] == ["running"]
        assert (await another.exec("/run/atoll/sudo id -u", user="user")).stdout == "0\n"
        await another.detach()
