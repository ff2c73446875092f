"""Checkpoints, rollback, forks and snapshots with what a Docker engine has: commits and exports."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll import AsyncSandbox, CheckpointNotFoundError, UnsupportedError
from atoll.engines.checkpointing import Checkpointing
from atoll.engines.docker.engine import DockerEngine
from atoll.errors import ConflictError, EngineError, ImageError, SnapshotNotFoundError
from atoll.model import SandboxSpec, State
from atoll.settings import Settings
from docker import private_engine
from docker.private_engine import BUSYBOX, DEBIAN


@pytest.fixture
async def kept(engine: DockerEngine) -> AsyncIterator[DockerEngine]:
    """Nothing of what was saved is left in the end."""
    assert isinstance(engine, Checkpointing)
    engine._settings.data_dir.mkdir(parents=True, exist_ok=True)
    yield engine
    for handle in await engine.list():
        await engine.delete(handle)
    for snapshot in await engine.snapshots():
        await engine.delete_snapshot(snapshot.name)
    assert ours(engine) == []
    assert list(engine._settings.data_dir.glob("atoll-diff-*")) == []


@pytest.mark.parametrize("way", ["fork", "create"])
async def test_what_a_state_became_is_gone_if_its_caller_is_cancelled_at_the_last_moment(
    kept: DockerEngine, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    async with sandbox_on(kept) as sandbox:
        await sandbox.snapshot("last")
        begun, go, sweep = asyncio.Event(), asyncio.Event(), kept._sweep

        async def slowly() -> None:
            begun.set()
            await go.wait()
            await sweep()

        monkeypatch.setattr(kept, "_sweep", slowly)
        other = sandbox_on(kept, image="snapshot:last")
        making = asyncio.ensure_future(sandbox.fork(2) if way == "fork" else other.create())
        await begun.wait()
        making.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert [handle.sandbox_id for handle in await kept.list()] == [sandbox.id]


async def test_what_cannot_be_swept_now_does_not_fail_what_was_done(
    kept: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse() -> None:
        raise EngineError("no image can be removed now")

    async with sandbox_on(kept) as sandbox:
        with monkeypatch.context() as patched:
            patched.setattr(kept, "_sweep", refuse)
            (fork,) = await sandbox.fork(1)
        assert (await fork.exec("echo on")).stdout == "on\n"
        await fork.cleanup()


def ours(engine: DockerEngine) -> list[str]:
    """Images and containers of this installation."""
    prefix = f"atoll-{engine._settings.installation_id()[:8]}"
    names = private_engine.docker("images", "-a", "--format", "{{.Repository}}:{{.Tag}}").split()
    names += private_engine.docker("ps", "-a", "--format", "{{.Names}}").split()
    return [name for name in names if name.startswith(prefix)]


def sandbox_on(engine: DockerEngine, **spec: object) -> AsyncSandbox:
    return AsyncSandbox(**{"engine": engine, "settings": engine._settings, "image": DEBIAN, **spec})  # type: ignore[arg-type]


async def test_going_back(kept: DockerEngine) -> None:
    async with sandbox_on(kept, env={"TOKEN": "t"}) as sandbox:
        await sandbox.exec("echo one >file; rm /etc/hostname; mkdir empty")
        first = await sandbox.checkpoint("first")
        await sandbox.start("sleep 1000")
        await sandbox.exec("echo two >file; rmdir empty; echo new >new")
        second = await sandbox.checkpoint()
        assert second.parent == first.id
        changes = [str(change) for change in await sandbox.diff(first, second) if "/workspace/" in change.path]
        assert changes == ["R /workspace/empty", "C /workspace/file", "A /workspace/new"]
        told = {change.path: change.text for change in await sandbox.diff("first", text=True)}
        assert "-one\n+two\n" in (told["/workspace/file"] or "")
        await sandbox.rollback(first)
        seen = await sandbox.exec("cat file; ls; echo $TOKEN; pgrep sleep")
        assert seen.stdout.split() == ["one", "empty", "file", "t"]
        third = await sandbox.checkpoint()
        assert third.parent == first.id
        assert [each.id for each in await sandbox.checkpoints()] == [first.id, second.id, third.id]
        await sandbox.delete_checkpoint(first)
        await sandbox.delete_checkpoint(first)
        with pytest.raises(CheckpointNotFoundError):
            await sandbox.rollback(first)
        await sandbox.rollback(second)
        assert await sandbox.read_file("file") == "two\n"
        await sandbox.restart()
        assert not await sandbox.exists("file")
        with pytest.raises(UnsupportedError, match="memory"):
            await sandbox.checkpoint(memory=True)
        with pytest.raises(UnsupportedError, match="memory"):
            await sandbox.pause(memory="disk")


async def test_undo(kept: DockerEngine) -> None:
    async with sandbox_on(kept, undo=True) as sandbox:
        await sandbox.exec("echo important >file")
        await sandbox.exec("rm file")
        await sandbox.undo()
        assert await sandbox.read_file("file") == "important\n"


async def test_forks_are_apart(kept: DockerEngine) -> None:
    async with sandbox_on(kept) as sandbox:
        await sandbox.exec(
            "echo common >file; echo 0123456789abcdef0123456789abcdef >/etc/machine-id; mkdir -p /etc/ssh"
        )
        await sandbox.exec("echo secret >/etc/ssh/ssh_host_rsa_key")
        await sandbox.checkpoint("point")
        forks = [*await sandbox.fork(2), *await sandbox.fork(1, "point")]
        try:
            for number, fork in enumerate(forks):
                assert await fork.read_file("file") == "common\n"
                assert await fork.read_file("/etc/ssh/ssh_host_rsa_key") == ""
                await fork.write_file("file", f"{number}")
            assert [await fork.read_file("file") for fork in forks] == ["0", "1", "2"]
            ids = [await each.read_file("/etc/machine-id") for each in (sandbox, *forks)]
            assert len(set(ids)) == 4
            await sandbox.cleanup()  # each can go back to where it began, also when its parent is gone
            for fork, own in zip(forks, ids[1:], strict=True):
                await fork.restart()
                assert await fork.read_file("file") == "common\n"
                assert await fork.read_file("/etc/machine-id") == own
        finally:
            for fork in forks:
                await fork.cleanup()
    assert ours(kept) == []


async def test_snapshots_outlive_and_move(kept: DockerEngine, tmp_path: Path) -> None:
    secret = secrets.token_hex(16)
    async with sandbox_on(kept, env={"TOKEN": secret}) as sandbox:
        await sandbox.exec("echo one >file; ln -s file link; rm -r /etc/skel; chown 1000:1000 file; chmod 640 file")
        made = await sandbox.snapshot("mine")
        assert (made.image, made.source) == (DEBIAN, sandbox.id)
        with pytest.raises(ConflictError):
            await sandbox.snapshot("mine")
    await kept.export_snapshot("mine", tmp_path / "file")
    for image in private_engine.docker("images", "-aq").split():
        assert secret not in private_engine.docker("inspect", image)
    await kept.import_snapshot(tmp_path / "file", "again")
    for name in ("mine", "again"):
        async with sandbox_on(kept, image=f"snapshot:{name}") as copy:
            seen = await copy.exec("cat link; stat -c '%u %a' file; ls -d /etc/skel; echo $TOKEN; command -v python3")
            assert seen.stdout.split() == ["one", "1000", "640", "/usr/bin/python3"], name
            await copy.exec("rm file")
            await copy.restart()
            assert await copy.read_file("file") == "one\n"
    await kept.delete_snapshot("mine")
    with pytest.raises(SnapshotNotFoundError):
        await sandbox_on(kept, image="snapshot:mine").create()
    whole = (tmp_path / "file").read_bytes()
    for number, bad in enumerate((b"", b"nonsense\n", whole[:-1000], whole[:5000] + b"x" + whole[5001:])):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(ImageError):
            await kept.import_snapshot(tmp_path / "bad", f"bad{number}")
    with pytest.raises(ImageError, match="more than"):
        await kept.import_snapshot(tmp_path / "file", "large", most_bytes=1 << 20)
    assert [each.name for each in await kept.snapshots()] == ["again"]


_MAKER = """
import asyncio, sys
from pathlib import Path
from atoll.engines.docker.engine import DockerEngine
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings

async def main():
    settings = Settings(Path(sys.argv[1]), Path(sys.argv[2]))
    sandbox = await AsyncSandbox.attach(sys.argv[3], engine=DockerEngine(settings), settings=settings)
    print("up", flush=True)
    while True:
        await sandbox.rollback("one")
        await sandbox.rollback("two")

asyncio.run(main())
"""


async def test_killed_while_it_goes_back(kept: DockerEngine, settings: Settings) -> None:
    async with sandbox_on(kept) as sandbox:
        for name in ("one", "two"):
            await sandbox.exec(f"echo {name} >file; cp file copy")
            await sandbox.checkpoint(name)
        for number in range(6):
            maker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _MAKER, str(settings.data_dir), str(settings.run_dir), sandbox.id),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "DOCKER_HOST": private_engine.host()},
            )
            assert maker.stdout is not None
            assert await maker.stdout.readline() == b"up\n"
            await asyncio.sleep(0.1 + number * 0.15)
            maker.kill()
            await maker.communicate()
            assert [handle.sandbox_id for handle in await kept.list()] == [sandbox.id]
            found = await AsyncSandbox.attach(sandbox.id, engine=kept, settings=settings)
            assert (await found.inspect()).state is State.RUNNING
            assert (await found.exec("cmp file copy && cat file")).stdout in ("one\n", "two\n")
            assert {each.name for each in await found.checkpoints()} == {"one", "two"}
            await found.detach()


async def test_a_state_in_use_outlives_its_sandbox(kept: DockerEngine, settings: Settings, tmp_path: Path) -> None:
    other = DockerEngine(settings, private_engine.where())
    handle = await kept.create("one", SandboxSpec(image=BUSYBOX))
    async with kept._kept(handle, None) as state:
        await other.delete(handle)
        await kept._write_tree(state, tmp_path / "tree")
    assert ours(kept) == []


@pytest.mark.parametrize("kind", ["checkpoint", "snapshot"])
async def test_a_state_in_use_that_is_deleted_goes_afterwards(
    kept: DockerEngine, settings: Settings, tmp_path: Path, kind: str
) -> None:
    other = DockerEngine(settings, private_engine.where())
    handle = await kept.create("one", SandboxSpec(image=BUSYBOX))
    if kind == "checkpoint":
        await kept.checkpoint(handle, name="point")
        using = kept._kept(handle, "point")
    else:
        await kept.snapshot(handle, "point")
        using = kept._held(lambda: kept._snapshot_named("point"))
    async with using as state:
        await (other.delete_checkpoint(handle, "point") if kind == "checkpoint" else other.delete_snapshot("point"))
        await kept._write_tree(state, tmp_path / "tree")
    assert await kept._commits.all("origin") == []
    await kept.delete(handle)


async def test_a_fork_gets_its_state_whatever_others_remove(kept: DockerEngine, settings: Settings) -> None:
    other = DockerEngine(settings, private_engine.where())
    handle = await kept.create("one", SandboxSpec(image=BUSYBOX))
    forking = asyncio.ensure_future(kept.fork(handle, ["two", "three"]))
    while not forking.done():
        await other._sweep()
    forks = await forking
    assert len(forks) == 2
    for each in (handle, *forks):
        await kept.delete(each)
    assert ours(kept) == []


_USER = """
import asyncio, sys
from pathlib import Path
from atoll.engines.docker.engine import DockerEngine
from atoll.settings import Settings

async def main():
    engine = DockerEngine(Settings(Path(sys.argv[1]), Path(sys.argv[2])))
    (handle,) = await engine.list()
    async with engine._kept(handle, None):
        print("kept", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_what_a_killed_process_used_is_swept(kept: DockerEngine, settings: Settings) -> None:
    handle = await kept.create("one", SandboxSpec(image=BUSYBOX))
    user = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _USER, str(settings.data_dir), str(settings.run_dir)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "DOCKER_HOST": private_engine.host()},
    )
    try:
        assert user.stdout is not None
        assert await user.stdout.readline() == b"kept\n"
        await kept.gc()
        assert len(await kept._commits.all("origin")) == 1
    finally:
        user.kill()
        await user.communicate()
    await kept.gc()
    assert await kept._commits.all("origin") == []
    assert list(settings.run_dir.glob("docker-states/*")) == []
    await kept.delete(handle)
