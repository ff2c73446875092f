"""A start that fails, is cancelled or loses its maker leaves nothing that cannot be found and removed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from atoll import agent_binary
from atoll.engines.bubblewrap.engine import BubblewrapEngine
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.process_tree import process_tree_engine as local_engine
from atoll.errors import AgentUnreachableError, EngineError, EngineUnavailableError
from atoll.model import Cause, SandboxSpec, State
from atoll.settings import Settings
from atoll.waiting import Deadline
from inside import run
from needs import needs


def pretend_bubblewrap(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "bin").mkdir()
    program = folder / "bin/bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")


async def test_a_missing_bubblewrap_says_what_to_install(
    engine: BubblewrapEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EngineUnavailableError, match="apt-get install bubblewrap") as caught:
        await engine.create("no", SandboxSpec())
    assert caught.value.code == "engine_unavailable"


async def test_a_missing_agent_says_how_to_make_it(engine: BubblewrapEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_binary, "__file__", "/nonexistent/agent_binary.py")
    with pytest.raises(EngineUnavailableError, match="make agent"):
        await engine.create("no", SandboxSpec())


async def test_what_a_broken_bubblewrap_says_is_passed_on(
    engine: BubblewrapEngine, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bubblewrap(open_folder, monkeypatch, r"printf 'no \033[31mluck' >&2; exit 7")
    with pytest.raises(EngineError, match=r"ended with status 7 \(no  \[31mluck\)"):
        await engine.create("no", SandboxSpec())


async def test_a_work_directory_that_cannot_be_made_is_an_error(engine: BubblewrapEngine, open_folder: Path) -> None:
    volume = {"host": str(open_folder / "in"), "path": "/in", "read_only": True}
    (open_folder / "in").mkdir()
    with pytest.raises(EngineError, match="Read-only file system"):
        await engine.create("no", SandboxSpec.of(volumes=[volume, {**volume, "path": "/in/deeper"}]))


async def test_a_start_that_hangs_ends_at_the_deadline(
    engine: BubblewrapEngine, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bubblewrap(open_folder, monkeypatch, "exec sleep 1000")
    monkeypatch.setattr(local_engine, "_CREATE_S", 0.2)
    with pytest.raises(AgentUnreachableError, match="did not answer in time"):
        await engine.create("no", SandboxSpec())


async def test_a_cancelled_start_leaves_nothing(
    engine: BubblewrapEngine, settings: Settings, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bubblewrap(open_folder, monkeypatch, "exec sleep 1000")
    task = asyncio.create_task(engine.create("no", SandboxSpec()))
    while not settings.socket_path("process", "no").exists():  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (await engine.inspect((await engine.list())[0])).state is State.STARTING
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_a_real_start_at_any_moment_leaves_nothing(engine: BubblewrapEngine) -> None:
    for number in range(20):
        task = asyncio.create_task(engine.create(f"n{number}", SandboxSpec()))
        await asyncio.sleep(number * 0.0006)
        task.cancel()
        for outcome in await asyncio.gather(task, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                await engine.delete(outcome)


@needs("root")
async def test_a_data_directory_that_is_closed_to_sandboxes_says_so(open_folder: Path) -> None:
    (open_folder / "closed").mkdir(mode=0o700)
    engine = BubblewrapEngine(Settings(open_folder / "closed/data", open_folder / "run"))
    with pytest.raises(EngineUnavailableError, match=r"may not pass through '.*/closed'"):
        await engine.create("no", SandboxSpec())
    assert await engine.list() == []


def _die_while(settings: Settings, moment: str) -> None:
    """A process of ours makes a sandbox and is killed at that moment."""
    program = f"""
        import asyncio, os
        from pathlib import Path
        from atoll.engines.process_tree import process_tree_engine as engine, launch
        from atoll.engines.bubblewrap.engine import BubblewrapEngine
        from atoll.model import SandboxSpec
        from atoll.settings import Settings

        def die(*_, **__):
            os.kill(os.getpid(), 9)

        {moment}
        asyncio.run(BubblewrapEngine(Settings(Path({str(settings.data_dir)!r}), Path({str(settings.run_dir)!r}))).create("left", SandboxSpec()))
        die()
    """  # noqa: E501
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], stderr=subprocess.PIPE, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr


async def test_a_sandbox_survives_our_death_and_is_found_again(engine: BubblewrapEngine, settings: Settings) -> None:
    _die_while(settings, "")
    (handle,) = await engine.list()
    assert handle.sandbox_id == "left"
    assert (await engine.inspect(handle)).state is State.RUNNING
    assert await run(engine, handle, "echo alive") == "alive\n"
    await engine.delete(handle)


@pytest.mark.parametrize(
    "moment",
    [
        "launch.listen = die",
        "launch.spawn = die",
        "launch.knock = die",
        "spawn = launch.spawn; launch.spawn = lambda *a, **k: (spawn(*a, **k), die())",
        "engine.start = die",
    ],
)
async def test_one_that_was_being_made_when_we_died_is_found_and_removed(
    engine: BubblewrapEngine, settings: Settings, moment: str
) -> None:
    _die_while(settings, moment)
    (handle,) = await engine.list()
    seen = await engine.inspect(handle)
    assert (seen.state, seen.cause) == (State.STOPPED, Cause.LOST)
    await engine.delete(handle)
    assert await engine.list() == []


async def test_without_a_record_it_is_still_found_and_removed(engine: BubblewrapEngine) -> None:
    handle = await engine.create("damaged", SandboxSpec())
    (engine._records.home("damaged") / "record.json").write_text("{")
    (found,) = await engine.list()
    assert found.details.keys() == {"damaged"}
    assert (await engine.inspect(handle)).state is State.STOPPED
    await engine.delete(found)
    assert await engine.list() == []


async def test_the_same_name_in_another_installation_is_another_sandbox(
    engine: BubblewrapEngine, open_folder: Path
) -> None:
    other = BubblewrapEngine(Settings(open_folder / "other data", open_folder / "other run"))
    handle, neighbour = [await each.create("same", SandboxSpec()) for each in (engine, other)]
    assert len(engine._find_processes("same")) == len(other._find_processes("same")) == 2
    (engine._records.home("same") / "record.json").unlink()
    await engine.delete(handle)
    assert (await other.inspect(neighbour)).state is State.RUNNING
    await other.delete(neighbour)


async def test_a_reused_process_number_is_never_signalled(engine: BubblewrapEngine) -> None:
    bystander = subprocess.Popen(["sleep", "1000"])  # noqa: ASYNC220
    try:
        handle = await engine.create("x", SandboxSpec())
        record = engine._records.read("x")
        real = ProcessRef.of(bystander.pid)
        assert record is not None
        assert record.init is not None
        assert real is not None
        await engine._kill("x", record, record.processes(), Deadline.after(5))
        reused = ProcessRef(real.pid, record.init.started)
        engine._records.write(record.model_copy(update={"init": reused, "monitor": reused}))
        assert (await engine.inspect(handle)).state is State.STOPPED
        await engine.delete(handle)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


async def test_after_a_restart_of_the_machine_it_is_stopped_and_nothing_is_signalled(engine: BubblewrapEngine) -> None:
    handle = await engine.create("x", SandboxSpec())
    record = engine._records.read("x")
    assert record is not None
    await engine._kill("x", record, record.processes(), Deadline.after(5))
    me = ProcessRef.of(os.getpid())
    engine._records.write(record.model_copy(update={"boot_id": "earlier", "init": me, "monitor": me}))
    seen = await engine.inspect(handle)
    assert (seen.state, seen.cause, seen.reason) == (State.STOPPED, Cause.HOST, "the machine was restarted")
    await engine.delete(handle)


@pytest.mark.parametrize("damaged", [False, True])
async def test_no_zombie_is_left(engine: BubblewrapEngine, damaged: bool) -> None:
    handle = await engine.create("x", SandboxSpec())
    record = engine._records.read("x")
    assert record is not None
    if damaged:
        (engine._records.home("x") / "record.json").unlink()
    await engine.delete(handle)
    assert record.monitor is not None
    assert ProcessRef.of(record.monitor.pid) is None
