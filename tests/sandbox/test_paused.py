"""A sandbox that is paused, stopped or silent answers every call with its reason, and does nothing of it later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from atoll import AgentUnreachableError, AsyncSandbox, SandboxGoneError, SandboxPausedError
from atoll.engines import registry
from atoll.settings import Settings

PROMPT_S = 4.0
Call = Callable[[AsyncSandbox], Awaitable[Any]]


async def _walk(sandbox: AsyncSandbox) -> None:
    async for _ in sandbox.walk():
        pass


async def _read_stream(sandbox: AsyncSandbox) -> None:
    async for _ in sandbox.read_stream("kept"):
        pass


async def _watch(sandbox: AsyncSandbox) -> None:
    async with sandbox.watch():
        pass


CALLS: dict[str, Call] = {
    "exec": lambda sandbox: sandbox.exec("touch done-exec", timeout=2),
    "start": lambda sandbox: sandbox.start("touch done-start"),
    "run_command": lambda sandbox: sandbox.run_command("touch done-shell", timeout=2),
    "command": lambda sandbox: sandbox.command("nobody"),
    "commands": lambda sandbox: sandbox.commands(),
    "open_terminal": lambda sandbox: sandbox.open_terminal("touch done-terminal"),
    "read_file": lambda sandbox: sandbox.read_file("kept"),
    "read_stream": _read_stream,
    "write_file": lambda sandbox: sandbox.write_file("done-write", "x"),
    "write_stream": lambda sandbox: sandbox.write_stream("done-stream", [b"x"] * 3),
    "append_file": lambda sandbox: sandbox.append_file("done-append", "x"),
    "list_files": lambda sandbox: sandbox.list_files(),
    "walk": _walk,
    "stat": lambda sandbox: sandbox.stat("kept"),
    "exists": lambda sandbox: sandbox.exists("kept"),
    "make_dir": lambda sandbox: sandbox.make_dir("done-dir"),
    "move": lambda sandbox: sandbox.move("kept", "done-move"),
    "remove": lambda sandbox: sandbox.remove("kept"),
    "chmod": lambda sandbox: sandbox.chmod("kept", 0o600),
    "watch": _watch,
    "copy_to": lambda sandbox: sandbox.copy_to("/etc/hostname", "done-copy"),
    "copy_from": lambda sandbox: sandbox.copy_from("kept", "/tmp/never"),
    "connect_port": lambda sandbox: sandbox.connect_port(80),
    "connect_socket": lambda sandbox: sandbox.connect_socket("/run/x"),
}


@pytest.fixture(scope="session", params=["native", "oci"])
def pausing_engine(
    request: pytest.FixtureRequest, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> str:
    need_engine(request.param, session_settings)
    return str(request.param)


@pytest.fixture
async def pausable(pausing_engine: str, session_settings: Settings) -> AsyncIterator[AsyncSandbox]:
    engine = registry.get(pausing_engine, session_settings)
    async with AsyncSandbox(engine=engine, settings=session_settings) as sandbox:
        await sandbox.write_file("kept", "x")
        yield sandbox
        await sandbox.resume()
    await engine.aclose()


async def _expect(name: str, sandbox: AsyncSandbox, kind: type[Exception], limit_s: float) -> None:
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s + 10):
            await CALLS[name](sandbox)
    except kind:
        took = time.monotonic() - started
        assert took < limit_s, f"{name} took {took:.1f} s"
        return
    except Exception as error:
        raise AssertionError(f"{name} raised {error!r}") from error
    raise AssertionError(f"{name} succeeded")


@pytest.mark.parametrize("connected", [True, False])
async def test_every_call_of_a_paused_sandbox_says_so_at_once(pausable: AsyncSandbox, connected: bool) -> None:
    await pausable.run_command("true")
    other = await AsyncSandbox.attach(pausable.id, engine=await pausable._the_engine(), settings=pausable._settings)
    await pausable.pause()
    if connected:
        channel = pausable._guest.current_channel()
        assert channel is not None
        channel._wire.heard -= 5  # nothing was heard for some time
    sandbox = pausable if connected else other
    await asyncio.gather(*(_expect(name, sandbox, SandboxPausedError, PROMPT_S) for name in CALLS))
    await pausable.resume()
    assert [info.path for info in await pausable.list_files()] == ["kept"]
    assert (await pausable.run_command("echo on")) == "on"
    await other.detach()


async def test_a_command_that_is_caught_by_a_pause_is_answered_at_its_own_deadline(pausable: AsyncSandbox) -> None:
    running = asyncio.ensure_future(pausable.exec("touch started; sleep 60", timeout=2))
    shell = asyncio.ensure_future(pausable.run_command("x=1; touch typed; sleep 60", timeout=2))
    async with asyncio.timeout(20):
        while not (await pausable.exists("started") and await pausable.exists("typed")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await pausable.pause()
    started = time.monotonic()
    for task in (running, shell):
        with pytest.raises(SandboxPausedError):
            await task
    assert time.monotonic() - started < PROMPT_S
    await pausable.resume()
    assert await pausable.run_command("echo $x; echo on", timeout=10) == "1\non"


async def test_a_file_that_is_caught_by_a_pause_is_answered(
    pausable: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.guest.channel._SILENT_S", 0.5)
    await pausable._guest.aclose()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"
        await pausable.pause()
        yield b"x" * (8 << 20)  # more than can be on its way

    with pytest.raises(SandboxPausedError):
        async with asyncio.timeout(10):
            await pausable.write_stream("half", pieces())
    await pausable.resume()
    assert not await pausable.exists("half")


@pytest.fixture
async def stopped(sandbox: AsyncSandbox) -> AsyncIterator[AsyncSandbox]:
    """Its agent does not answer any more, though it lives."""
    await sandbox.write_file("kept", "x")
    record = (await sandbox._the_engine())._records.read(sandbox.id)  # type: ignore[attr-defined]
    os.kill(record.init.pid, signal.SIGSTOP)
    yield sandbox
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.init.pid, signal.SIGCONT)


async def test_every_call_of_a_silent_sandbox_is_answered(
    stopped: AsyncSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("atoll.guest.answering._PATIENCE_S", (0.2, 0.5))
    channel = stopped._guest.current_channel()
    assert channel is not None
    channel._wire.heard -= 5
    await asyncio.gather(*(_expect(name, stopped, AgentUnreachableError, PROMPT_S) for name in CALLS))


async def test_every_call_of_a_dead_sandbox_is_told_why(stopped: AsyncSandbox) -> None:
    record = (await stopped._the_engine())._records.read(stopped.id)  # type: ignore[attr-defined]
    os.kill(record.init.pid, signal.SIGKILL)
    await asyncio.gather(*(_expect(name, stopped, SandboxGoneError, 2 * PROMPT_S) for name in CALLS))
