"""States of a sandbox's files: saved, rolled back to, compared, forked and named; or refused cleanly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from atoll.conformance.bench import Bench, new_mark
from atoll.conformance.check import check, must, must_equal, refusal
from atoll.conformance.inside import until_running
from atoll.engines.checkpointing import Checkpointing
from atoll.errors import CheckpointNotFoundError, ConflictError, ImageError, UnsupportedError
from atoll.model import Capability

_SAVED = (Capability.CHECKPOINTS,)


@check(without=_SAVED)
async def what_cannot_be_saved_is_refused(bench: Bench) -> None:
    """Without the power every call for it is refused as unsupported, and the sandbox goes on."""
    async with bench.sandbox() as sandbox:
        attempts: tuple[Callable[[], Awaitable[object]], ...] = (
            sandbox.checkpoint,
            sandbox.checkpoints,
            lambda: sandbox.rollback("x"),
            sandbox.restart,
            sandbox.fork,
            lambda: sandbox.snapshot("x"),
            lambda: sandbox.pause(memory="disk"),
        )
        for attempt in attempts:
            await refusal(attempt(), UnsupportedError, "an engine that keeps no states")
        must((await sandbox.exec("true", timeout=10)).success, "the sandbox does not go on")


@check(needs=_SAVED)
async def going_back_restores_files_and_ends_processes(bench: Bench) -> None:
    """After a rollback files are as they were, what was started is gone, and the id is the same."""
    mark = new_mark()
    async with bench.sandbox() as sandbox:
        await sandbox.exec("echo one >file; mkdir d; ln -s file link; chmod 640 file", timeout=10)
        checkpoint = await sandbox.checkpoint("here")
        before, id = (await sandbox.stat("file")).mode, sandbox.id
        await sandbox.start(f"sleep {mark}")
        await until_running(sandbox, mark)
        await sandbox.exec("rm -r d link; echo two >file; echo three >more", timeout=10)
        for target in (checkpoint, "here"):
            await sandbox.rollback(target)
            names = sorted(info.path.rpartition("/")[2] for info in await sandbox.list_files())
            must_equal(names, ["d", "file", "link"], "what is there after going back")
            must_equal(await sandbox.read_file("link"), "one\n", "a file after going back")
            must_equal((await sandbox.stat("file")).mode, before, "the mode of a file after going back")
            must_equal(await sandbox.commands(), [], "commands after going back")
        must_equal((sandbox.id, (await sandbox.inspect()).state.value), (id, "RUNNING"), "the sandbox itself")
        await sandbox.restart()
        must_equal(await sandbox.list_files(), [], "what is there after a restart")


@check(needs=_SAVED)
async def states_are_listed_and_compared(bench: Bench) -> None:
    """Checkpoints are listed with their parents; a difference has what was added, changed and removed."""
    async with bench.sandbox() as sandbox:
        await sandbox.exec("echo a >kept; echo b >changed; echo c >removed", timeout=10)
        first = await sandbox.checkpoint("first")
        await sandbox.exec("echo B >changed; rm removed; echo d >added", timeout=10)
        second = await sandbox.checkpoint()
        listed = [(each.id, each.name, each.parent) for each in await sandbox.checkpoints()]
        must_equal(listed, [(first.id, "first", None), (second.id, "", first.id)], "the list of checkpoints")
        seen = [str(each) for each in await sandbox.diff(first, second) if "/workspace/" in each.path]
        wanted = ["A /workspace/added", "C /workspace/changed", "R /workspace/removed"]
        must_equal(sorted(seen), wanted, "the difference")
        await sandbox.delete_checkpoint(first)
        await sandbox.delete_checkpoint(first)
        await refusal(sandbox.rollback(first), CheckpointNotFoundError, "a checkpoint that was deleted")
        await sandbox.rollback(second)
        must_equal(await sandbox.read_file("added"), "d\n", "a file of a state whose parent was deleted")


@check(needs=_SAVED)
async def forks_are_apart(bench: Bench) -> None:
    """Forks begin alike and then have nothing to do with each other, nor with what they came from."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("file", "common")
        forks = await sandbox.fork(2)
        try:
            for fork in forks:
                must_equal(await fork.read_file("file"), "common", "a file of a fork")
                await fork.write_file("file", fork.id)
            must_equal(await sandbox.read_file("file"), "common", "the file of what they came from")
            must_equal([await fork.read_file("file") for fork in forks], [fork.id for fork in forks], "their files")
            await sandbox.cleanup()
            await forks[0].restart()
            must_equal(await forks[0].read_file("file"), "common", "a fork that began anew after its source was gone")
        finally:
            for fork in forks:
                await fork.cleanup()


@check(needs=_SAVED)
async def snapshots_outlive_their_sandbox(bench: Bench) -> None:
    """A snapshot is there after its sandbox, under one name, and new sandboxes start from it, without variables."""
    name, engine = f"check-{new_mark()}", cast(Checkpointing, bench.engine)
    try:
        async with bench.sandbox(env={"SECRET": "s"}) as sandbox:
            await sandbox.write_file("file", "kept")
            must_equal((await sandbox.snapshot(name)).name, name, "the name of a snapshot")
            await refusal(sandbox.snapshot(name), ConflictError, "a name that is taken")
        must(name in [each.name for each in await engine.snapshots()], "the snapshot is not listed")
        async with bench.sandbox(image=f"snapshot:{name}") as sandbox:
            must_equal(await sandbox.read_file("file"), "kept", "a file of a snapshot")
            must_equal((await sandbox.exec('printf "$SECRET"', timeout=10)).stdout, "", "a variable of another sandbox")
    finally:
        await engine.delete_snapshot(name)
        await engine.delete_snapshot(name)
    await refusal(bench.unmade(image=f"snapshot:{name}").create(), ImageError, "a snapshot that was deleted")


@check(needs=_SAVED)
async def undo_takes_back_commands(bench: Bench) -> None:
    """With `undo` in its spec a sandbox keeps the states before its last commands."""
    async with bench.sandbox(undo={"keep": 2}) as sandbox:
        await sandbox.exec("echo one >file", timeout=10)
        await sandbox.exec("echo two >file", timeout=10)
        await sandbox.exec("rm file", timeout=10)
        await sandbox.undo()
        must_equal(await sandbox.read_file("file"), "two\n", "a file after one command was taken back")
        await sandbox.undo()
        must_equal(await sandbox.read_file("file"), "one\n", "a file after two commands were taken back")
        await refusal(sandbox.undo(), CheckpointNotFoundError, "more commands than are kept")
