"""What counts as use, and what becomes of a sandbox that nobody uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll import Cause
from atoll.errors import EngineError, SandboxPausedError, UnsupportedError
from atoll.guest.socket_tables import listening, sent_bytes
from atoll.manager import PausedBy, SandboxManager
from atoll.model import Handle, State
from atoll.settings import Settings
from manager.engines import Restless, TroubledEngine
from manager.times import ManualClock
from manager.waiting import until

Make = Callable[..., SandboxManager]
ENGINES = ("native", "oci")
IDLE_S = 10.0


async def _fall_asleep(manager: SandboxManager, clock: ManualClock, id: str) -> None:
    for _ in range(2):
        clock.advance(IDLE_S / 2 + 0.1)
        await manager.cleanup_idle()
    await manager.wait_until(id, State.PAUSED, timeout=10)
    assert (await manager.describe(id)).paused_by is PausedBy.IDLE


@pytest.mark.parametrize("by", ["call", "port", "terminal", "open port"])
async def test_an_idle_sandbox_sleeps_and_is_woken(make_manager: Make, clock: ManualClock, by: str) -> None:
    manager = make_manager(idle_timeout=IDLE_S, on_idle="pause", clock=clock)
    id = await manager.create_sandbox()
    sandbox = await manager.get_sandbox(id)
    await (await sandbox.start(["python3", "-m", "http.server", "8000"])).detach()
    await until_listening(sandbox)
    terminal, stream = await sandbox.open_terminal("cat"), await sandbox.connect_port(8000)
    shown = aiter(terminal)
    await _fall_asleep(manager, clock, id)
    if by == "call":
        assert (await sandbox.exec("echo awake")).stdout == "awake\n"
    elif by == "terminal":
        await terminal.write("hello\n")
        assert b"hello" in await anext(shown)
    else:
        used = stream if by == "open port" else await sandbox.connect_port(8000)
        await used.write(b"GET / HTTP/1.0\r\n\r\n")
        assert (await used.read()).startswith(b"HTTP/1.0 200")
    assert (await manager.describe(id)).state is State.RUNNING
    assert (await manager.describe(id)).paused_by is None


async def until_listening(sandbox: object) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await (await sandbox.connect_port(8000)).aclose()  # type: ignore[attr-defined]
                return
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)


async def test_one_that_was_woken_has_all_its_time_again(make_manager: Make, clock: ManualClock) -> None:
    manager = make_manager(idle_timeout=IDLE_S, on_idle="pause", clock=clock)
    id = await manager.create_sandbox()
    await _fall_asleep(manager, clock, id)
    clock.advance(1000)
    await manager.resume_sandbox(id)
    clock.advance(IDLE_S - 1)
    await manager.cleanup_idle()
    assert (await manager.describe(id)).state is State.RUNNING


@pytest.mark.parametrize("by", [PausedBy.USER, PausedBy.IDLE])
async def test_one_that_sleeps_ends_too(make_manager: Make, clock: ManualClock, by: PausedBy) -> None:
    manager = make_manager(idle_timeout=IDLE_S, on_idle="pause", paused_timeout=100, clock=clock)
    id = await manager.create_sandbox()
    if by is PausedBy.USER:
        await manager.pause_sandbox(id)
    else:
        await _fall_asleep(manager, clock, id)
    clock.advance(99)
    await manager.cleanup_idle()
    assert (await manager.describe(id)).state is State.PAUSED
    clock.advance(2)  # and nobody asks for a sweep
    gone = await manager.wait_until(id, State.MISSING, timeout=10)
    assert (gone.cause, gone.reason) == (Cause.POLICY, "it was paused and nobody used it for 100 s")


async def test_one_that_its_user_paused_is_not_woken_though_it_slept_before(
    make_manager: Make, clock: ManualClock
) -> None:
    manager = make_manager(idle_timeout=IDLE_S, on_idle="pause", clock=clock)
    id = await manager.create_sandbox()
    await _fall_asleep(manager, clock, id)
    await manager.pause_sandbox(id)
    with pytest.raises(SandboxPausedError, match="Resume it"):
        await (await manager.get_sandbox(id)).read_file("/etc/passwd")


async def test_a_silent_build_is_not_ended_in_the_middle(make_manager: Make, clock: ManualClock) -> None:
    manager = make_manager(idle_timeout=IDLE_S, clock=clock)
    busy, waiting = await manager.create_sandbox(), await manager.create_sandbox()
    for id, line in ((busy, "while :; do :; done"), (waiting, "sleep 1000")):
        await (await (await manager.get_sandbox(id)).start(line)).detach()
    for _ in range(3):
        clock.advance(IDLE_S / 2 + 0.1)
        await manager.cleanup_idle()
        before = (await (await manager.get_sandbox(busy)).stats()).cpu_s or 0
        async with asyncio.timeout(20):
            while ((await (await manager.get_sandbox(busy)).stats()).cpu_s or 0) < before + 0.1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        clock.advance(IDLE_S / 2 + 0.1)
        await manager.cleanup_idle()
    assert [record.id for record in await manager.list_sandboxes()] == [busy]


async def test_a_service_keeps_its_sandbox_and_a_server_that_nobody_named_does_not(
    make_manager: Make, clock: ManualClock
) -> None:
    manager = make_manager(idle_timeout=IDLE_S, clock=clock)
    kept, other = await manager.create_sandbox(services=[8000]), await manager.create_sandbox()
    for id in (kept, other):
        sandbox = await manager.get_sandbox(id)
        await (await sandbox.start(["python3", "-m", "http.server", "8000"])).detach()
        await until_listening(sandbox)
    for _ in range(4):
        clock.advance(IDLE_S / 2 + 0.1)
        await manager.cleanup_idle()
    assert [record.id for record in await manager.list_sandboxes()] == [kept]


async def test_a_lease_is_a_use_until_it_is_over_and_outlives_the_manager(
    make_manager: Make, clock: ManualClock
) -> None:
    first = make_manager(idle_timeout=IDLE_S, clock=clock)
    id = await first.create_sandbox(lifetime=1000)
    await (await first.get_sandbox(id)).keep_alive(100)
    await first.cleanup(keep=True)
    manager = make_manager(idle_timeout=IDLE_S, clock=clock)
    await manager.start()
    record = await manager.keep_alive(id, 50)  # a shorter one takes nothing away
    assert record.leased_now == clock.now() + 100
    clock.advance(100)
    await manager.cleanup_idle()
    assert len(await manager.list_sandboxes()) == 1
    assert (await manager.keep_alive(id, 5000)).leased_until == record.expires_at
    for _ in range(2):
        clock.advance(1000)
        await manager.cleanup_idle()
    assert await manager.list_sandboxes() == []
    for wrong in (0, -1, 86401, float("nan")):
        with pytest.raises(ValueError, match="a lease must be"):
            await manager.keep_alive(id, wrong)


async def test_each_sandbox_can_have_rules_of_its_own(
    make_manager: Make, clock: ManualClock, settings: Settings, folder: Path
) -> None:
    manager = make_manager(idle_timeout=1000, clock=clock)
    id = await manager.create_sandbox(idle_timeout=IDLE_S, on_idle="pause")
    await _fall_asleep(manager, clock, id)
    other = make_manager(engine=Restless(settings), state_dir=folder / "other")
    with pytest.raises(UnsupportedError, match="cannot pause"):
        await other.create_sandbox(on_idle="pause")


async def test_a_thousand_idle_sandboxes_are_looked_at_only_when_it_matters(
    make_manager: Make, clock: ManualClock, engine: object
) -> None:
    manager = make_manager(idle_timeout=1000, cleanup_interval=10_000, clock=clock)
    await manager.create_sandbox()
    before = engine.calls["inspect"]  # type: ignore[attr-defined]
    for _ in range(49):
        clock.advance(10)
        await asyncio.sleep(0)
    wiring = manager._wiring
    assert wiring is not None
    [member] = wiring.context.members
    assert member.background is None
    assert engine.calls["inspect"] == before  # type: ignore[attr-defined]
    clock.advance(20)
    await until(lambda: member.background)


@pytest.mark.parametrize("sleeps", [True, False])
async def test_one_whose_pause_failed_is_woken_all_the_same(
    make_manager: Make, clock: ManualClock, engine: TroubledEngine, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    pause = engine.pause

    async def fail(handle: Handle) -> None:
        if sleeps:
            await pause(handle)
        raise EngineError("it took too long")

    manager = make_manager(idle_timeout=IDLE_S, on_idle="pause", clock=clock)
    id = await manager.create_sandbox()
    monkeypatch.setattr(engine, "pause", fail)
    for _ in range(2):
        clock.advance(IDLE_S / 2 + 0.1)
        await manager.cleanup_idle()
    record = await manager.describe(id)
    assert (record.state, record.paused_by) == ((State.PAUSED, PausedBy.IDLE) if sleeps else (State.RUNNING, None))
    assert (await (await manager.get_sandbox(id)).exec("echo awake")).stdout == "awake\n"


@pytest.mark.parametrize("sleeps", [True, False])
async def test_one_that_an_engine_without_an_answer_pauses_later_is_woken(
    make_manager: Make, clock: ManualClock, engine: TroubledEngine, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    """Nobody asked for that pause, so nobody should have to end it."""

    async def fall_silent(handle: Handle) -> None:
        engine.failing.add("inspect")
        raise EngineError("it does not answer")

    manager = make_manager(idle_timeout=IDLE_S, on_idle="pause", clock=clock)
    id = await manager.create_sandbox()
    sandbox, [handle] = await manager.get_sandbox(id), await engine.list()
    monkeypatch.setattr(engine, "pause", fall_silent)
    for _ in range(2):
        clock.advance(IDLE_S / 2 + 0.1)
        await manager.cleanup_idle()
    await manager.wait_until(id, State.ERROR, timeout=10)
    if sleeps:
        await type(engine)(engine.settings).pause(handle)
    engine.heal()
    assert (await sandbox.exec("echo awake")).stdout == "awake\n"
    record = await manager.describe(id)
    assert (record.state, record.paused_by) == (State.RUNNING, None)


async def test_whoever_comes_while_it_is_about_to_sleep_on_the_disk_is_not_cut_off(
    make_manager: Make, clock: ManualClock, engine: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(idle_timeout=IDLE_S, on_idle="disk", clock=clock)
    sandbox = await manager.get_sandbox(id := await manager.create_sandbox())
    running: list[asyncio.Task[object]] = []

    async def let_go_of_all(drop_connections: bool) -> None:
        running.append(asyncio.create_task(sandbox.exec("sleep 0.5; echo done")))
        await until(lambda: sandbox.supervisor.usage.active)

    async def hibernate(handle: object) -> None:
        pytest.fail("somebody uses it")

    monkeypatch.setattr(sandbox, "let_go_of_all", let_go_of_all)
    monkeypatch.setattr(engine, "hibernate", hibernate)
    for _ in range(2):
        clock.advance(IDLE_S / 2 + 0.1)
        await manager.cleanup_idle()
    assert (await running[0]).stdout == "done\n"  # type: ignore[attr-defined]
    assert (await manager.describe(id)).state is State.RUNNING


async def test_one_that_cannot_move_to_the_disk_is_tried_once_in_each_sleep(
    make_manager: Make, clock: ManualClock, engine: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    async def refuse(handle: object) -> None:
        tries.append(handle)
        raise UnsupportedError("its memory cannot be saved")

    monkeypatch.setattr(engine, "hibernate", refuse)
    manager = make_manager(disk_timeout=5, paused_timeout=100, clock=clock)
    id = await manager.create_sandbox()

    async def sleep() -> None:
        tries.clear()
        await manager.pause_sandbox(id)
        clock.advance(6)
        await until(lambda: tries)
        await asyncio.sleep(0.2)
        await manager.cleanup_idle()
        assert len(tries) == 1

    await sleep()
    await manager.resume_sandbox(id)
    await sleep()
    clock.advance(100)
    await manager.wait_until(id, State.MISSING, timeout=10)


async def test_a_lease_of_another_boot_ends_when_it_was_to_end(make_manager: Make, clock: ManualClock) -> None:
    clock.advance(1_000_000)
    first = make_manager(idle_timeout=IDLE_S, clock=clock)
    id = await first.create_sandbox()
    await first.keep_alive(id, 100)
    await first.cleanup(keep=True)
    # Engines elsewhere keep their sandboxes while the machine of the manager starts again.
    clock.boot_id, clock._now, clock.jump = "second boot", 10.0, 1_001_000.0
    manager = make_manager(idle_timeout=IDLE_S, clock=clock)
    await manager.start()
    [record] = await manager.list_sandboxes()
    assert record.leased_now is not None
    assert record.leased_now == pytest.approx(100, abs=0.1)


def test_the_tables_of_a_sandbox_are_read_as_hostile_input() -> None:
    devices = "Inter-| Receive\n face |bytes\n    lo: 9 9 0 0 0 0 0 0 77 1 0 0 0 0 0 0\n"
    devices += "  eth0: 1 1 0 0 0 0 0 0 1234 1 0 0 0 0 0 0\neth1:5\neth2: x\n" + "e" * 500 + ": " + "9 " * 16
    assert sent_bytes(devices) == 1234
    listens = "  sl  local\n   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n   1: 0100007F:1F91 0:0 01\nx\n"
    assert listening(listens) == {8080}
