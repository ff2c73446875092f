"""Sandboxes from a pool: they have its policy from the start, and everybody gets the one that was asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from atoll.engines.linux.native_engine import NativeEngine
from atoll.manager import PoolSettings, SandboxManager
from atoll.model import SandboxSpec
from atoll.network.client import Gateway
from atoll.settings import Settings
from network import world
from network.attacks import PRELUDE
from network.conftest import NAMES
from network.internet import Internet

LOOK = f"""{PRELUDE}
for host in ("allowed.test", "evil.test"):
    print(connect("{world.EVIL}", 80, get(host)).replace("\\r\\n", " "))
"""


async def looked(manager: SandboxManager, sandbox_id: str) -> str:
    sandbox = await manager.get_sandbox(sandbox_id)
    found = await sandbox.exec(["python3", "-c", LOOK], timeout=40)
    return found.stdout


def hits(manager: SandboxManager) -> int:
    [found] = manager.get_stats()["pools"].values()  # type: ignore[attr-defined]
    return int(found["hits"])


async def test_a_claimed_sandbox_has_the_policy_that_was_asked_for(
    settings: Settings, internet: Internet, tmp_path: Path
) -> None:
    named, other = SandboxSpec.of(network=NAMES), SandboxSpec.of(network={"allowed_domains": ["evil.test"]})
    engine = NativeEngine(settings)

    def new_manager() -> SandboxManager:
        pools = [PoolSettings(named, size=1)]
        return SandboxManager(engine=engine, settings=settings, state_dir=tmp_path / "m", pools=pools)

    manager = new_manager()
    try:
        await manager.start()
        while "'ready': 1" not in str(manager.get_stats()["pools"]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        claimed = await manager.create_sandbox(named)
        assert hits(manager) == 1, "it is one from the pool"
        text = await looked(manager, claimed)
        assert '"at": "WEB"' in text
        assert "403 Forbidden" in text
        different = await manager.create_sandbox(other)
        text = await looked(manager, different)
        assert '"at": "EVIL"' in text
        assert "403 Forbidden" in text
        known = hits(manager)
        none = await manager.create_sandbox(SandboxSpec())
        assert hits(manager) == known, "who wants no network gets one that has no link"
        text = await looked(manager, none)
        assert "WEB" not in text
        assert "EVIL" not in text
        assert not Gateway(settings).files.is_member(none)
        await manager.cleanup(keep=True)
        manager = new_manager()
        await manager.start()
        text = await looked(manager, claimed)
        assert '"at": "WEB"' in text
        assert "403 Forbidden" in text
    finally:
        await manager.cleanup(keep=False, timeout=30)
        await engine.aclose()
