"""Sessions of the runtime API that take long to start, fail, or ask for more than the default."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from atoll.errors import ConflictError, SandboxError
from atoll.model import Handle, SandboxSpec
from atoll.server.services import Services, services
from atoll.server.settings import ServerSettings
from atoll.service import Caller, ForkRequest, Scope
from atoll.service.failures import SessionNotFoundError
from atoll.service.models.openhands_runtime import RuntimeInfo, RuntimeStart
from atoll.service.runtimes import RuntimeService
from atoll.settings import Settings
from needs import needs

ANN, BOB = Caller("ann", frozenset(Scope)), Caller("bob", frozenset({Scope.READ, Scope.USE, Scope.MANAGE}))
NeedEngine = Callable[[str, Settings], None]


def wanted(session_id: str = "s", **more: Any) -> RuntimeStart:
    return RuntimeStart.model_validate(
        {"session_id": session_id, "image": "host", "command": ["sleep", "1000"], **more}
    )


@pytest_asyncio.fixture
async def made(session_settings: Settings, tmp_path: Path, need_engine: NeedEngine) -> AsyncIterator[Services]:
    need_engine("bubblewrap", session_settings)
    settings = ServerSettings.model_validate({"state_dir": tmp_path, "engine": "process"})
    async with services(settings, session_settings) as made:
        yield made
        await made.manager.cleanup(keep=False)


@pytest.fixture
def runtimes(made: Services) -> RuntimeService:
    return RuntimeService(made.sandboxes, network="none", origin="http://h", patience_s=0.05)


async def until(runtimes: RuntimeService, status: str) -> RuntimeInfo:
    while (info := await runtimes.get(ANN, "s")).status != status:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return info


async def test_what_takes_long_goes_on_without_the_request(
    made: Services, runtimes: RuntimeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, create = asyncio.Event(), made.engine.create

    async def slow(sandbox_id: str, spec: SandboxSpec) -> Handle:
        await gate.wait()
        return await create(sandbox_id, spec)

    monkeypatch.setattr(made.engine, "create", slow)
    first = await runtimes.start(ANN, wanted())
    assert (first.status, first.pod_status, first.url) == ("starting", "pending", None)
    assert first.session_api_key, "OpenHands remembers the key of this answer"
    assert await runtimes.get(ANN, "s") == await runtimes.start(ANN, wanted()) == first
    assert [each.session_id for each in await runtimes.running(ANN)] == ["s"]
    with pytest.raises(ConflictError):
        await runtimes.start(ANN, wanted(command=["true"]))
    with pytest.raises(SessionNotFoundError):
        await runtimes.get(BOB, "s")
    assert len(runtimes._starting) == 1, "however often it is asked for"
    gate.set()
    ready = await until(runtimes, "running")
    assert (ready.runtime_id, ready.session_api_key) == (first.runtime_id, first.session_api_key)
    assert ready.url == f"http://h/{ready.runtime_id}"


@pytest.mark.parametrize("has_id", [True, False])
async def test_one_that_is_being_started_can_be_stopped(
    made: Services, runtimes: RuntimeService, monkeypatch: pytest.MonkeyPatch, has_id: bool
) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(1000)

    place, name = (made.engine, "create") if has_id else (made.manager, "default_limits")
    monkeypatch.setattr(place, name, never)
    info = await runtimes.start(ANN, wanted())
    assert info.status == "starting"
    assert info.runtime_id.startswith("unmade.") is not has_id
    with pytest.raises(SessionNotFoundError):
        await runtimes.stop(BOB, info.runtime_id)
    assert (await runtimes.stop(ANN, info.runtime_id)).status == "stopped"
    while runtimes._starting:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(SessionNotFoundError):
        await runtimes.get(ANN, "s")
    assert await made.manager.list_sandboxes() == []


async def test_a_server_that_ends_gives_up_what_it_starts(
    made: Services, runtimes: RuntimeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(1000)

    monkeypatch.setattr(made.engine, "create", never)
    await runtimes.start(ANN, wanted())
    await runtimes.aclose()
    assert not runtimes._starting
    assert await made.manager.list_sandboxes() == []


async def test_a_user_has_room_for_a_few_failures(made: Services) -> None:
    runtimes = RuntimeService(made.sandboxes, network="none", origin="http://h", patience_s=30)
    for number in range(40):
        with pytest.raises(SandboxError):
            await runtimes.start(ANN, wanted(f"s{number}", image="no-such:image"))
    assert len(runtimes._failed["ann"]) == 32
    assert (await runtimes.get(ANN, "s39")).status == "error"
    with pytest.raises(SessionNotFoundError):
        await runtimes.get(ANN, "s0")


@needs("root")
async def test_resources_and_users_where_the_engine_has_them(
    session_settings: Settings, tmp_path: Path, need_engine: NeedEngine
) -> None:
    need_engine("native", session_settings)
    settings = ServerSettings.model_validate({"state_dir": tmp_path, "engine": "native", "runtime_network": "none"})
    async with services(settings, session_settings) as made:
        held = {}
        for factor in (1, 2):
            info = await made.runtimes.start(ANN, wanted(f"x{factor}", resource_factor=factor))
            held[factor] = (await made.sandboxes.describe(ANN, info.runtime_id)).effective_limits
        assert held[2].memory_bytes == 2 * (held[1].memory_bytes or 0) > 0
        assert (held[2].cpus, held[2].pids) == (2 * (held[1].cpus or 0), 2 * (held[1].pids or 0))
        with pytest.raises(SandboxError, match="this server's maximum"):
            await made.runtimes.start(BOB, wanted(resource_factor=64))
        [twin] = await made.sandboxes.creation.fork(ANN, info.runtime_id, ForkRequest())
        assert (await made.runtimes.get(ANN, "x2")).runtime_id == info.runtime_id, "a fork is no session"
        assert twin.id not in {each.runtime_id for each in await made.runtimes.running(ANN)}
        command = ["sh", "-c", "id -u > mine; id -g >> mine; sleep 1000"]
        info = await made.runtimes.start(ANN, wanted(command=command, run_as_user=10001, run_as_group=10002))
        sandbox = await made.sandboxes.sandbox(ANN, info.runtime_id)
        seen = (await sandbox.exec("until [ $(wc -l < mine) = 2 ]; do sleep 0.01; done 2>/dev/null; cat mine")).stdout
        assert seen.split() == ["10001", "10002"], "and it may write where it starts"
        await made.manager.cleanup(keep=False)
