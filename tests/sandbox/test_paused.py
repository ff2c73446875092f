"""A sandbox that is paused, stopped or silent answers every call with its reason, and does nothing of it later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from atoll import AgentUnreachableError, AsyncSandbox, SandboxGoneError, SandboxPausedError
from atoll.engines import registry
from atoll.settings import Settings
from sandbox.calling import CALLS, expect

PROMPT_S = 4.0


@pytest.fixture(scope="session", params=["native", pytest.param("oci", marks=pytest.mark.again)])
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


@pytest.mark.parametrize("connected", [True, False])
async def test_every_call_of_a_paused_sandbox_says_so_at_once(pausable: AsyncSandbox, connected: bool) -> None:
    await pausable.run_command("true")
    other = await AsyncSandbox.attach(
        pausable.id, engine=await pausable.access.engine(), settings=pausable.access.choice.settings
    )
    await pausable.pause()
    if connected:
        connection = pausable.access.guest.current_connection()
        assert connection is not None
        connection._wire.heard -= 5  # nothing was heard for some time
    sandbox = pausable if connected else other
    await asyncio.gather(*(expect(name, sandbox, SandboxPausedError, PROMPT_S) for name in CALLS))
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
    monkeypatch.setattr("atoll.guest.connection._SILENT_S", 0.5)
    await pausable.access.guest.aclose()

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
    record = (await sandbox.access.engine())._records.read(sandbox.id)  # type: ignore[attr-defined]
    os.kill(record.init.pid, signal.SIGSTOP)
    yield sandbox
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.init.pid, signal.SIGCONT)


async def test_every_call_of_a_silent_sandbox_is_answered(
    stopped: AsyncSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("atoll.guest.connection._PATIENCE_S", (0.2, 0.5))
    connection = stopped.access.guest.current_connection()
    assert connection is not None
    connection._wire.heard -= 5
    await asyncio.gather(*(expect(name, stopped, AgentUnreachableError, PROMPT_S) for name in CALLS))


async def test_every_call_of_a_dead_sandbox_is_told_why(stopped: AsyncSandbox) -> None:
    record = (await stopped.access.engine())._records.read(stopped.id)  # type: ignore[attr-defined]
    os.kill(record.init.pid, signal.SIGKILL)
    await asyncio.gather(*(expect(name, stopped, SandboxGoneError, 2 * PROMPT_S) for name in CALLS))
