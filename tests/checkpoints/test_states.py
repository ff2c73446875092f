"""Checkpoints, rollback, forks and snapshots do what they say."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from atoll import AsyncSandbox, CheckpointNotFoundError, Sandbox, SpecError, Undo, UnsupportedError
from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.states.state_storage import StateStorage
from atoll.errors import ConflictError, ImageNotFoundError, SandboxError
from atoll.model import Capability, State
from atoll.settings import Settings
from atoll.waiting import Deadline
from checkpoints.conftest import MakeSandbox

LOOK = "find . /etc -type f -printf '%p %m %u %s\\n' -o -printf '%p %m %u %l\\n' | sort"


async def test_rollback_brings_files_back_and_ends_processes(engine: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(engine) as sandbox:
        await sandbox.write_file("kept", "one")
        await sandbox.exec("mkdir -p d/e; echo x >d/e/f; chmod 600 d/e/f; ln -s f d/e/l; rm /etc/passwd")
        before = await sandbox.exec(LOOK)
        checkpoint = await sandbox.checkpoint("first")
        await sandbox.write_file("kept", "two")
        await sandbox.exec("rm -r d; echo >new; echo root >/etc/passwd; chmod 777 .")
        running = await sandbox.start("while :; do date >>busy; sleep 0.01; done")
        identity = sandbox.id
        await sandbox.rollback(checkpoint)
        assert (await sandbox.exec(LOOK)).stdout == before.stdout
        assert (await sandbox.exec("cat d/e/l")).stdout == "x\n"
        assert sandbox.id == identity
        with pytest.raises((SandboxError, FileNotFoundError)):
            await sandbox.command(running.id)
        assert (await sandbox.inspect()).state is State.RUNNING
        # And on it goes, from there, also back to the same one again.
        await sandbox.write_file("kept", "three")
        await sandbox.rollback("first")
        assert await sandbox.read_file("kept") == "one"


async def test_a_tree_of_checkpoints(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native) as sandbox:
        one = await sandbox.checkpoint("one")
        two = await sandbox.checkpoint("two")
        await sandbox.rollback(one)
        other = await sandbox.checkpoint("other")
        listed = {each.name: each.parent for each in await sandbox.checkpoints()}
        assert listed == {"one": None, "two": one.id, "other": one.id}
        await sandbox.delete_checkpoint(one)
        await sandbox.delete_checkpoint(one)
        await sandbox.rollback(two)
        await sandbox.rollback(other)
        with pytest.raises(CheckpointNotFoundError):
            await sandbox.rollback(one)


async def test_a_checkpoint_of_one_that_writes_at_full_speed(engine: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    """Each is one moment: a file that is written after another is never newer in it."""
    async with sandbox_on(engine) as sandbox:
        line = "i=0; while :; do i=$((i+1)); echo $i >a.n; mv a.n a; echo $i >b.n; mv b.n b; done"
        await sandbox.start(line)
        await sandbox.exec("while [ ! -e b ]; do sleep 0.01; done", timeout=20)
        made = [await sandbox.checkpoint() for _ in range(5)]
        for checkpoint in made:
            await sandbox.rollback(checkpoint)
            first, second = int(await sandbox.read_file("a")), int(await sandbox.read_file("b"))
            assert first - second in (0, 1)


async def test_forks_are_apart(engine: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(engine) as sandbox:
        await sandbox.exec("echo common >file; echo 0123456789abcdef0123456789abcdef >/etc/machine-id")
        await sandbox.exec("mkdir -p /etc/ssh; echo secret >/etc/ssh/ssh_host_rsa_key")
        forks = await sandbox.fork(3)
        try:
            await sandbox.write_file("file", "parent")
            for number, fork in enumerate(forks):
                assert await fork.read_file("file") == "common\n"
                await fork.write_file("file", f"{number}")
            assert [await fork.read_file("file") for fork in forks] == ["0", "1", "2"]
            assert await sandbox.read_file("file") == "parent"
            ids = {await each.read_file("/etc/machine-id") for each in (sandbox, *forks)}
            assert len(ids) == 4
            assert not await forks[0].exists("/etc/ssh/ssh_host_rsa_key")
            assert await sandbox.exists("/etc/ssh/ssh_host_rsa_key")
            # Each can go back to where it began, also when its parent is gone.
            await sandbox.cleanup()
            await forks[1].restart()
            assert await forks[1].read_file("file") == "common\n"
        finally:
            for fork in forks:
                await fork.cleanup()


async def test_a_fork_that_fails_leaves_nothing(
    native: LinuxEngine, sandbox_on: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sandbox_on(native) as sandbox:
        launch, count = native._construction.launch, 0

        async def third_fails(*arguments: object) -> object:
            nonlocal count
            count += 1
            if count == 3:
                raise OSError(28, "No space left on device")
            return await launch(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(native._construction, "launch", third_fails)
        with pytest.raises(SandboxError, match="No space left"):
            await sandbox.fork(4)
        assert [handle.sandbox_id for handle in await native.list()] == [sandbox.id]
        assert await sandbox.checkpoints() == []


async def test_forks_whose_caller_is_cancelled_at_the_last_moment_are_gone(
    native: LinuxEngine, sandbox_on: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sandbox_on(native) as sandbox:
        begun, go, release = threading.Event(), threading.Event(), StateStorage.release

        def slowly(self: StateStorage, saved_id: str) -> None:
            begun.set()
            go.wait(30)
            release(self, saved_id)

        monkeypatch.setattr(StateStorage, "release", slowly)
        forking = asyncio.create_task(sandbox.fork(2))
        await asyncio.to_thread(begun.wait, 30)
        forking.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await forking
        assert [handle.sandbox_id for handle in await native.list()] == [sandbox.id]


async def test_restart_goes_back_to_the_beginning(engine: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(engine) as sandbox:
        await sandbox.exec("echo x >file; rm /etc/hosts")
        await sandbox.restart()
        assert not await sandbox.exists("file")
        assert await sandbox.exists("/etc/hosts")


async def test_a_snapshot_outlives_its_sandbox(engine: LinuxEngine, sandbox_on: MakeSandbox, tmp_path: Path) -> None:
    async with sandbox_on(engine, env={"TOKEN": "secret"}) as sandbox:
        await sandbox.exec("mkdir d; echo one >d/file; ln d/file hard; ln -s d/file soft; rm -r /etc/skel /etc/passwd")
        await sandbox.exec("rm -rf /etc/alternatives; mkdir /etc/alternatives; echo mine >/etc/alternatives/only")
        await sandbox.snapshot("mine")
        with pytest.raises(ConflictError, match="already a snapshot"):
            await sandbox.snapshot("mine")
    file = tmp_path / "mine.snapshot"
    await engine.export_snapshot("mine", file)
    assert b"secret" not in file.read_bytes().partition(b"\n")[0]
    await engine.import_snapshot(file, "taken-in")
    for name in ("mine", "taken-in"):
        async with sandbox_on(engine, image=f"snapshot:{name}") as sandbox:
            seen = await sandbox.exec(
                "cat d/file hard soft; stat -c %h hard; ls /etc/passwd /etc/skel 2>/dev/null | wc -l;"
                "ls /etc/alternatives; echo $TOKEN"
            )
            assert seen.stdout == "one\none\none\n2\n0\nonly\n\n", name
            await sandbox.write_file("d/file", "two")
    assert {each.name for each in await engine.snapshots()} == {"mine", "taken-in"}
    await engine.delete_snapshot("mine")
    with pytest.raises(ImageNotFoundError, match="no snapshot 'mine'"):
        await sandbox_on(engine, image="snapshot:mine").create()
    async with sandbox_on(engine, image="snapshot:taken-in") as sandbox:
        assert await sandbox.read_file("d/file") == "one\n"


async def test_what_changed(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native) as sandbox:
        await sandbox.exec("mkdir a; echo one >a/text; printf '\\0' >a/binary; echo >same; ln -s x link")
        old = await sandbox.checkpoint()
        await sandbox.exec("echo two >>a/text; printf '\\0\\0' >a/binary; touch same; ln -sf y link; chmod 700 a")
        await sandbox.exec("mkdir b; echo >b/new; rm /etc/hosts; rm -r /etc/skel; echo >>/etc/profile; mkfifo pipe")
        new = await sandbox.checkpoint()
        await sandbox.exec("rm -r a b")
        seen = {change.path: change for change in await sandbox.diff(old, new, text=True)}
        assert {path: change.kind.value for path, change in seen.items()} == {
            "/etc/hosts": "removed",
            "/etc/skel": "removed",
            "/etc/profile": "changed",
            "/workspace/a": "changed",
            "/workspace/a/binary": "changed",
            "/workspace/a/text": "changed",
            "/workspace/b": "added",
            "/workspace/b/new": "added",
            "/workspace/link": "changed",
            "/workspace/pipe": "added",
        }
        assert (
            seen["/workspace/a/text"].text
            == "--- a/workspace/a/text\n+++ b/workspace/a/text\n@@ -1 +1,2 @@\n one\n+two\n"
        )
        assert seen["/workspace/a/binary"].text is None
        assert [str(change) for change in await sandbox.diff(new)] == ["R /workspace/a", "R /workspace/b"]
        assert await sandbox.diff(new, new) == []


async def test_undo(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native, undo=Undo(keep=3)) as sandbox:
        for number in range(5):
            await sandbox.exec(f"echo {number} >file")
        assert len(await sandbox.checkpoints()) == 3
        assert (await sandbox.undo()).made_by == "before: echo 4 >file"
        assert await sandbox.read_file("file") == "3\n"
        await sandbox.undo(2)
        assert await sandbox.read_file("file") == "1\n"
        with pytest.raises(CheckpointNotFoundError, match="only 0 commands"):
            await sandbox.undo()


async def test_undo_only_of_what_is_risky(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native, undo=Undo(risky=lambda line: line.startswith("rm "))) as sandbox:
        await sandbox.exec("echo x >file")
        await sandbox.run_command("rm file")
        await sandbox.undo()
        assert await sandbox.read_file("file") == "x\n"


async def test_going_back_is_no_way_around_the_disk_limit(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native, disk="64m") as sandbox:
        assert (await sandbox.exec("head -c 40m /dev/urandom >a")).success
        checkpoint = await sandbox.checkpoint()
        await sandbox.rollback(checkpoint)
        assert not (await sandbox.exec("head -c 40m /dev/urandom >b")).success
        used = (await sandbox.stats()).disk_bytes
        assert used is not None
        assert used >= 40 << 20
        (fork,) = await sandbox.fork(1, checkpoint)
        assert not (await fork.exec("head -c 40m /dev/urandom >b")).success
        await fork.cleanup()


async def test_one_that_has_ended_can_go_back(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native, memory="64m") as sandbox:
        await sandbox.write_file("file", "kept")
        checkpoint = await sandbox.checkpoint()
        await native.layout.group(sandbox.id).kill(Deadline.after(10))
        assert (await sandbox.inspect()).state is State.STOPPED
        await sandbox.rollback(checkpoint)
        assert await sandbox.read_file("file") == "kept"


async def test_states_of_another_sandbox_are_not_there(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native) as one, sandbox_on(native) as other:
        checkpoint = await one.checkpoint()
        with pytest.raises(CheckpointNotFoundError):
            await other.rollback(checkpoint)
        with pytest.raises(CheckpointNotFoundError):
            await other.diff(checkpoint)
        for bad in ("", "../x", "x" * 24, "\0"):
            with pytest.raises(CheckpointNotFoundError):
                await one.rollback(bad)
        for bad in ("", "a/b/c", "../x", "/x", "x" * 64):
            with pytest.raises(SpecError):
                await one.snapshot(bad)
        assert (await one.exec("true")).success


async def test_an_engine_without_the_power_refuses(settings: Settings) -> None:
    async with AsyncSandbox(engine="bubblewrap", settings=settings) as sandbox:
        for call in (sandbox.checkpoint(), sandbox.fork(), sandbox.snapshot("x"), sandbox.restart()):
            with pytest.raises(UnsupportedError, match="cannot save the state"):
                await call


def test_the_synchronous_twin(native: LinuxEngine, settings: Settings) -> None:
    assert Capability.CHECKPOINTS in asyncio.run(native.describe()).capabilities
    with Sandbox(engine="native", settings=settings) as sandbox:
        sandbox.write_file("file", "one")
        checkpoint = sandbox.checkpoint()
        (fork,) = sandbox.fork()
        with fork:
            assert fork.read_file("file") == "one"
        sandbox.write_file("file", "two")
        sandbox.rollback(checkpoint)
        assert sandbox.read_file("file") == "one"


async def test_a_state_that_forks_need_goes_with_the_last_of_them(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    saved = native.layout.layers.list_saved
    async with sandbox_on(native) as sandbox:
        await sandbox.write_file("file", "then")
        point = await sandbox.checkpoint("point")
        forks = [*await sandbox.fork(2, point), *await sandbox.fork(1)]
        assert len(saved()) == 2
        await sandbox.delete_checkpoint(point)
        assert await sandbox.checkpoints() == []
        with pytest.raises(CheckpointNotFoundError):
            await sandbox.fork(1, point)
        assert await native.gc() == []
        await sandbox.cleanup()
        for fork in forks:
            await fork.write_file("file", "now")
            await fork.restart()
            assert await fork.read_file("file") == "then"
        await forks[2].cleanup()
        assert saved() == [point.id]
        await forks[0].cleanup()
        assert saved() == [point.id]
        await forks[1].cleanup()
        assert saved() == []
        assert sorted(os.listdir(native.layout.data / "saved")) == []


async def test_deleting_and_forking_at_once(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    """Whoever is first: the fork is whole, or it is refused and nothing is left."""
    async with sandbox_on(native) as sandbox:
        await sandbox.write_file("file", "then")
        for _ in range(5):
            point = await sandbox.checkpoint()
            forked, _ = await asyncio.gather(
                sandbox.fork(2, point), sandbox.delete_checkpoint(point), return_exceptions=True
            )
            if isinstance(forked, BaseException):
                assert isinstance(forked, CheckpointNotFoundError), forked
                continue
            for fork in forked:
                await fork.restart()
                assert await fork.read_file("file") == "then"
                await fork.cleanup()
        assert native.layout.layers.list_saved() == []


async def test_a_sandbox_that_nobody_wrote_to_is_compared(engine: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(engine) as sandbox:
        untouched = await sandbox.checkpoint()
        assert await sandbox.diff(untouched) == []
        assert await sandbox.diff(untouched, await sandbox.checkpoint(), text=True) == []
        await sandbox.write_file("/root/file", "text")
        assert "A /root/file" in [str(change) for change in await sandbox.diff(untouched)]
