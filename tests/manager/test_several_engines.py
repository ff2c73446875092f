"""One manager, several engines; and what a caller may ask of one."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import atoll
from atoll.compat.openmanus.sandbox_settings import SandboxSettings
from atoll.engines import registry
from atoll.engines.linux.oci_engine import OciEngine
from atoll.errors import EngineError, EngineNotFoundError
from atoll.images import Images
from atoll.manager import SandboxManager
from atoll.manager.recovery import OrphanCollector
from atoll.model import EffectiveLimits, Limits, SandboxSpec, State
from atoll.settings import Settings
from manager.engines import TroubledEngine, TroubledProcess
from manager.times import ManualClock
from needs import not_applicable

Make = Callable[..., SandboxManager]
OTHER = {"native": "bubblewrap", "bubblewrap": "native", "oci": "bubblewrap"}


async def test_each_sandbox_may_have_an_engine_of_its_choice(make_manager: Make, engine: TroubledEngine) -> None:
    manager, other = make_manager(), OTHER[engine.name]
    usual, special = await manager.create_sandbox(), await manager.create_sandbox(engine=other)
    assert (await manager.get_sandbox(usual)).engine_name == engine.name
    assert (await manager.get_sandbox(special)).engine_name == other
    assert [handle.sandbox_id for handle in await engine.list()] == [usual]
    await manager.cleanup(keep=True)
    again = make_manager()
    assert sorted((await again.start()).adopted) == sorted([usual, special])
    for id in (usual, special):
        assert (await (await again.get_sandbox(id)).exec("echo $((6*7))")).stdout == "42\n"


async def test_one_engine_object_serves_all_its_sandboxes(make_manager: Make, engine: TroubledEngine) -> None:
    manager, other = make_manager(), OTHER[engine.name]
    ids = await asyncio.gather(*(manager.create_sandbox(engine=name) for name in (other, other, engine.name, None)))
    one, two, three, four = [await (await manager.get_sandbox(id)).access.engine() for id in ids]
    assert one is two
    assert three is four is engine


async def test_what_is_left_on_an_engine_goes_when_its_last_sandbox_is_gone_too(
    make_manager: Make, engine: TroubledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, other = make_manager(), OTHER[engine.name]
    id = await manager.create_sandbox(engine=other)
    there = await (await manager.get_sandbox(id)).access.engine()
    await manager.delete_sandbox(id)
    listed: list[str] = []

    async def list_() -> list[object]:
        listed.append(there.name)
        return []

    monkeypatch.setattr(there, "list", list_)
    assert manager._wiring is not None
    await OrphanCollector(manager._wiring.context).collect()
    assert set(listed) == {other}, "also by the manager's own look, if that comes now"


async def test_defaults_are_those_of_the_engine_that_has_the_isolation(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def say(self: OciEngine, spec: SandboxSpec) -> EffectiveLimits:
        asked.append(spec.isolation or "")
        return EffectiveLimits(Limits(memory_bytes=1 << 30))

    monkeypatch.setattr(OciEngine, "default_limits", say)
    monkeypatch.setattr(registry, "auto", lambda settings, **_: (TroubledProcess(settings), []))
    async with SandboxManager(engine="auto", settings=settings, state_dir=folder / "other") as manager:
        limits = await manager.default_limits(SandboxSpec(isolation="gvisor"))
    assert (asked, limits.memory_bytes) == (["gvisor"], 1 << 30)


async def test_an_unknown_engine_is_refused_and_nothing_is_left(manager: SandboxManager) -> None:
    with pytest.raises(EngineNotFoundError, match="there is no engine 'nonsense'"):
        await manager.create_sandbox(engine="nonsense", name="mine")
    assert await manager.list_sandboxes() == []
    await manager.create_sandbox(name="mine")


async def test_without_its_journal_a_manager_finds_its_sandboxes_on_all_engines(
    make_manager: Make, engine: TroubledEngine, folder: Path
) -> None:
    first, other = make_manager(), OTHER[engine.name]
    ids = [await first.create_sandbox(lifetime=1000), await first.create_sandbox(engine=other, name="named")]
    await first.cleanup(keep=True)
    for path in (folder / "state").glob("manager.db*"):
        path.unlink()
    second = make_manager()
    assert sorted((await second.start()).adopted) == sorted(ids)
    assert [record.id for record in await second.list_sandboxes(name="named")] == ids[1:]
    assert (await second.describe(ids[0])).lifetime_s == 1000


class AwayEngine(TroubledProcess):
    away = False

    async def _trouble(self, what: str) -> None:
        if self.away and what in ("list", "inspect"):
            raise EngineError("it does not answer")
        await super()._trouble(what)


async def test_an_engine_that_is_away_at_the_start_harms_only_its_own(
    make_manager: Make, engine: TroubledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine.name == "bubblewrap":
        not_applicable("it is the one that is away")
    monkeypatch.setitem(registry._ENGINES, "bubblewrap", f"{__name__}:AwayEngine")
    first = make_manager()
    usual, special = await first.create_sandbox(), await first.create_sandbox(engine="bubblewrap")
    await first.cleanup(keep=True)
    monkeypatch.setattr(AwayEngine, "away", True)
    second = make_manager()
    recovered = await second.start()
    assert (recovered.adopted, recovered.failed) == ([usual], [special])
    assert (await (await second.get_sandbox(usual)).exec("true")).success
    assert (await second.describe(special)).state is State.ERROR
    monkeypatch.setattr(AwayEngine, "away", False)
    assert (await second.describe(special)).state is State.RUNNING
    assert (await (await second.get_sandbox(special)).exec("true")).success


async def test_what_is_to_be_paused_is_not_deleted_because_its_engine_was_away_at_the_start(
    make_manager: Make, engine: TroubledEngine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine.name == "bubblewrap":
        not_applicable("it is the one that is away")
    monkeypatch.setitem(registry._ENGINES, "bubblewrap", f"{__name__}:AwayEngine")
    first = make_manager(clock=clock)
    ids = [await first.create_sandbox(engine="bubblewrap", on_idle="pause") for _ in range(2)]
    await first.cleanup(keep=True)
    monkeypatch.setattr(AwayEngine, "away", True)
    second = make_manager(idle_timeout=10, max_sandboxes=2, at_cap="pause", clock=clock)
    await second.start()
    monkeypatch.setattr(AwayEngine, "away", False)
    assert [(await second.describe(id)).state for id in ids] == [State.RUNNING] * 2
    await second.create_sandbox()
    states = [(await second.describe(id)).state for id in ids]
    assert sorted(states) == [State.PAUSED, State.RUNNING], "one made room for the third"
    awake = ids[states.index(State.RUNNING)]
    for _ in range(2):
        clock.advance(5.1)
        await second.cleanup_idle()
    await second.wait_until(awake, State.PAUSED, timeout=10)


async def test_an_image_is_made_ahead_of_the_first_sandbox(
    manager: SandboxManager, engine: TroubledEngine, settings: Settings, folder: Path
) -> None:
    assert await manager.ensure_image("host")
    assert not await manager.ensure_image(f"tar:{folder}/missing.tar")
    with tarfile.open(folder / "root.tar", "w") as archive:
        archive.add("/etc/os-release", "etc/os-release")
    made = await manager.ensure_image(f"tar:{folder}/root.tar")
    assert made is (engine.name != "bubblewrap")
    if made:
        assert (await Images(settings.data_dir).get(f"tar:{folder}/root.tar")).root is not None
        await Images(settings.data_dir).remove(f"tar:{folder}/root.tar")


async def test_settings_of_openmanus_are_a_config(make_manager: Make, engine: TroubledEngine) -> None:
    if engine.name == "bubblewrap":
        not_applicable("it has no limits")
    first = make_manager()
    config = SandboxSettings(image="host", memory_limit="256m", pids_limit=64, timeout=7)
    id = await first.create_sandbox(config)
    await first.cleanup(keep=True)
    sandbox = await make_manager().get_sandbox(id)
    assert (sandbox.spec.limits.memory_bytes, sandbox.spec.limits.pids, sandbox.timeout_s) == (256 << 20, 64, 7)


async def test_how_long_a_command_may_take_by_default_is_kept(manager: SandboxManager) -> None:
    sandbox = await manager.get_sandbox(await manager.create_sandbox(timeout=0.2))
    assert (await sandbox.exec("sleep 60")).cause == "timeout"


async def test_the_lifetime_is_the_managers_business_so_that_it_can_be_extended(
    manager: SandboxManager, engine: TroubledEngine
) -> None:
    id = await manager.create_sandbox({"limits": {"lifetime_s": 50}})
    [handle] = await engine.list()
    assert handle.spec.limits.lifetime_s is None
    assert (await manager.extend_lifetime(id, 500)).lifetime_s == 500


async def test_output_that_is_no_longer_kept_is_told_to_whoever_follows_a_command(manager: SandboxManager) -> None:
    sandbox = await manager.get_sandbox(await manager.create_sandbox())
    command = await sandbox.start("head -c 4000000 /dev/zero | tr '\\0' x; touch done; sleep 1000")
    await command.detach()
    await sandbox.exec("until test -e done; do sleep 0.01; done", timeout=30)
    again = await sandbox.command(command.id)
    assert again.dropped_bytes > 0
    await command.kill()
    assert f"{again.dropped_bytes} bytes left out" in (await again.wait()).stdout


@pytest.mark.filterwarnings("ignore::atoll.engines.unsafe_none.UnsafeWarning")
async def test_relative_paths_are_right_without_isolation_too(settings: Settings, folder: Path) -> None:
    async with SandboxManager(engine="unsafe-none", settings=settings, state_dir=folder / "state") as manager:
        sandbox = await manager.get_sandbox(await manager.create_sandbox())
        await sandbox.write_file("below/note", "here")
        assert (await sandbox.exec("cat below/note")).stdout == "here"
        assert await sandbox.run_command("cat below/note") == "here"


def test_the_manager_is_imported_from_the_package_when_it_is_asked_for() -> None:
    assert atoll.SandboxManager is SandboxManager
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = atoll.Nonsense  # type: ignore[attr-defined]
