"""Has a manager make sandboxes, prints what is known of them and is killed.

This runs with the code of an earlier commit (see `version_before.py`): no name in here follows a renaming.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import atoll
from atoll import PoolSettings, SandboxManager, SandboxSpec


async def main(wanted: dict[str, Any]) -> None:
    pools = [PoolSettings(SandboxSpec(env={"POOLED": "yes"}), size=1)]
    manager = SandboxManager(engine="native", at_exit="keep", pools=pools)
    await manager.start()
    ids: dict[str, str] = {}
    ids["named"] = await manager.create_sandbox(**wanted["named"])
    sandbox = await manager.get_sandbox(ids["named"])
    await sandbox.write_file("notes.txt", "kept")
    await sandbox.run_command("cd /tmp && colour=red && greet() { echo hello $1; }")
    command = await sandbox.start("until test -e /workspace/go; do sleep 0.02; done; echo bye; exit 5")
    await manager.watch_command(ids["named"], command.id)
    ids["paused"] = await manager.create_sandbox(name="rests", owner="bob")
    await manager.pause_sandbox(ids["paused"])
    (ids["fork"],) = await manager.fork_sandbox(ids["named"], names=["twin"])
    ids["other"] = await manager.create_sandbox(**wanted["other"])
    deleted = await manager.create_sandbox(name="gone", owner="ann")
    await manager.delete_sandbox(deleted)
    while '"ready": 1' not in json.dumps(manager.get_stats()["pools"]):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    facts = {
        "ids": ids,
        "deleted": deleted,
        "command": command.id,
        "event": await manager.latest_event(),
        "expires_at": (await manager.describe(ids["named"])).expires_at,
        "code": atoll.__file__,
    }
    print(json.dumps(facts), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main(json.loads(sys.argv[1])))
