"""Whoever goes away before the answer leaves nothing that nobody knows of."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.server.services import services
from atoll.server.settings import ServerSettings
from atoll.service import Caller, ForkRequest, SandboxRequest, Scope
from atoll.settings import Settings

ANN = Caller("ann", frozenset(Scope))


@pytest.mark.parametrize("key", [None, "mine"])
@pytest.mark.parametrize("what", ["start", "fork"])
async def test_a_caller_who_goes_before_the_answer(
    session_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, what: str
) -> None:
    settings = ServerSettings.model_validate({"state_dir": tmp_path, "engine": "process"})
    async with services(settings, session_settings) as made:
        service, told = made.sandboxes, asyncio.Event()
        ids = [(await service.creation.start(ANN, SandboxRequest())).id] if what == "fork" else []

        async def fork(*_: object, **__: object) -> list[str]:
            return [await made.manager.create_sandbox(owner="ann") for _ in range(2)]

        async def describe(*_: object, **__: object) -> None:
            told.set()
            await asyncio.sleep(1000)

        monkeypatch.setattr(made.manager, "fork_sandbox", fork)
        monkeypatch.setattr(service.creation, "_shown", describe)
        if what == "fork":
            work = asyncio.ensure_future(service.creation.fork(ANN, ids[0], ForkRequest(count=2), key=key))
        else:
            work = asyncio.ensure_future(service.creation.start(ANN, SandboxRequest(), key=key))  # type: ignore[arg-type]
        await told.wait()
        work.cancel()
        await asyncio.wait({work})
        new = {record.id for record in await made.manager.list_sandboxes()} - set(ids)
        assert bool(new) is (key is not None)
        await made.manager.cleanup(keep=False)
