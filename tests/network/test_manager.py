"""Policies of sandboxes that a manager keeps: given at a claim, changed, and the same for the next manager."""

from __future__ import annotations

import json
from pathlib import Path

from atoll.manager import PoolSettings, SandboxManager
from atoll.manager.managed_sandbox import ManagedSandbox
from atoll.model import SandboxSpec
from atoll.settings import Settings
from manager.test_recovery import rewrite
from manager.waiting import until
from network import world
from network.attacks import PRELUDE
from network.conftest import NAMES
from network.internet import Internet


async def asked(sandbox: ManagedSandbox, host: str) -> str:
    """What comes back from a request to that name."""
    program = f"{PRELUDE}\nprint(json.dumps(connect('{world.WEB}', 80, get('{host}'))))"
    return str(json.loads((await sandbox.exec(["python3", "-c", program])).stdout)).partition("\r\n")[0]


def made(settings: Settings, folder: Path, *pools: PoolSettings) -> SandboxManager:
    return SandboxManager(engine="native", settings=settings, state_dir=folder / "state", pools=pools)


async def test_a_spare_gets_the_policy_of_whoever_claims_it(
    internet: Internet, settings: Settings, tmp_path: Path
) -> None:
    pool = PoolSettings(SandboxSpec.of(network={}), size=1)
    async with made(settings, tmp_path, pool) as manager:
        await until(lambda: '"ready": 1' in json.dumps(manager.get_stats()["pools"]))
        id = await manager.create_sandbox({"network": NAMES})
        assert '"hits": 1' in json.dumps(manager.get_stats()["pools"])
        sandbox = await manager.get_sandbox(id)
        assert await asked(sandbox, "allowed.test") == "HTTP/1.1 200 OK"
        assert (await asked(sandbox, "evil.test")).startswith("HTTP/1.1 403")
        assert (await manager.describe(id)).spec.network == SandboxSpec.of(network=NAMES).network
        # The next spare has nothing of it.
        await until(lambda: '"ready": 1' in json.dumps(manager.get_stats()["pools"]))
        other = await manager.get_sandbox(await manager.create_sandbox({"network": {}}))
        assert (await asked(other, "allowed.test")).startswith(("HTTP/1.1 403", "error"))


async def test_a_changed_policy_is_the_same_for_the_next_manager(
    internet: Internet, settings: Settings, tmp_path: Path
) -> None:
    manager = made(settings, tmp_path)
    id = await manager.create_sandbox({"network": NAMES})
    wanted = {"allowed_domains": ["a.w.test"]}
    await (await manager.get_sandbox(id)).set_network(wanted)
    assert (await manager.describe(id)).spec.network == SandboxSpec.of(network=wanted).network
    await manager.cleanup(keep=True)
    # As if it had died before it could write the change down.
    rewrite(tmp_path, id, spec=SandboxSpec.of(network=NAMES))
    async with made(settings, tmp_path) as manager:
        assert (await manager.describe(id)).spec.network == SandboxSpec.of(network=wanted).network
        sandbox = await manager.get_sandbox(id)
        assert await asked(sandbox, "a.w.test") == "HTTP/1.1 200 OK"
        assert (await asked(sandbox, "allowed.test")).startswith("HTTP/1.1 403")
