"""Starts a sandbox as OpenHands does, prints what is known of it and is killed.

This runs with the code of an earlier commit (see `version_before.py`): no name in here follows a renaming.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal

import atoll
from atoll.openhands import ProcessSandboxService


async def main() -> None:
    service = ProcessSandboxService(user_id="ann")
    info = await service.start_sandbox()
    facts = {"id": info.id, "key": info.session_api_key, "code": atoll.__file__}
    print(json.dumps(facts), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main())
