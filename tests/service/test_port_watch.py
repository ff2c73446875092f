"""Looking for new ports costs what use of sandboxes costs: nothing where there is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.manager import Event, SandboxManager
from atoll.server.services import Services, services
from atoll.server.settings import ServerSettings
from atoll.service import Caller, SandboxRequest, Scope, port_watch
from atoll.settings import Settings

ANN = Caller("ann", frozenset(Scope))
PAUSES = (0.01, 0.02, 0.02, 0.02)
FLAPPING = """
import os, socket, time
for number in range(100):
    while not os.path.exists(f"go-{number}"): time.sleep(0.01)
    held = [socket.create_server(("127.0.0.1", 20000 + 30 * number + each)) for each in range(30)]
    open(f"done-{number}", "w")
"""


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of sandboxes that were looked into, one for each time."""
    found: list[str] = []
    observe = SandboxManager.observe

    async def counted(self: SandboxManager, sandbox_id: str, question: Callable[..., Awaitable[Any]], s: float) -> Any:
        found.append(sandbox_id)
        return await observe(self, sandbox_id, question, s)

    monkeypatch.setattr(SandboxManager, "observe", counted)
    monkeypatch.setattr(port_watch, "_PAUSES_S", PAUSES)
    monkeypatch.setattr(port_watch, "_LOOKS_PER_S", 1000.0)
    return found


async def _quiet() -> None:
    """Until nothing looks any more."""
    while tasks := [task for task in asyncio.all_tasks() if task.get_name().startswith("ports of ")]:
        await asyncio.wait(tasks)


async def _ports(made: Services, sandbox_id: str) -> list[Event]:
    return [event for event in await made.manager.events(sandbox_id=sandbox_id) if event.kind == "port"]


async def test_one_that_nobody_uses_is_not_looked_at(
    session_settings: Settings, tmp_path: Path, looks: list[str]
) -> None:
    settings = ServerSettings.model_validate({"state_dir": tmp_path, "engine": "process", "keep_sandboxes": False})
    async with services(settings, session_settings) as made:
        ids = [(await made.sandboxes.creation.start(ANN, SandboxRequest())).id for _ in range(3)]
        await _quiet()
        looks.clear()
        for _ in range(20):
            await made.sandboxes.search_sandboxes(ANN)
            await made.sandboxes.describe(ANN, ids[0])
        await _quiet()
        assert looks == [], "asking how it is is no use"
        await (await made.sandboxes.sandbox(ANN, ids[1])).exec("true")
        await _quiet()
        assert set(looks) == {ids[1]}
        assert len(looks) <= 2 * len(PAUSES) + 2


async def test_one_that_opens_ports_without_end_has_few_events(
    session_settings: Settings, tmp_path: Path, looks: list[str]
) -> None:
    settings = ServerSettings.model_validate({"state_dir": tmp_path, "engine": "process", "keep_sandboxes": False})
    async with services(settings, session_settings) as made:
        id = (await made.sandboxes.creation.start(ANN, SandboxRequest())).id
        sandbox = await made.sandboxes.sandbox(ANN, id)
        command = await sandbox.start(["python3", "-c", FLAPPING])
        for number in range(8):
            await sandbox.exec(f"touch go-{number}; until [ -e done-{number} ]; do sleep 0.01; done")
            await _quiet()
        found = await _ports(made, id)
        assert 16 < len(found) <= 66, "so many at a time, and so many in all"
        assert json.loads(found[0].data)["process"] == "python3"
        await command.kill()
