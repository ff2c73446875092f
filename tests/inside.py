"""Looking at a sandbox from the inside."""

from __future__ import annotations

from atoll.engines.contract import Engine
from atoll.guest import Guest, StartRequest
from atoll.model import Handle


async def run(engine: Engine, handle: Handle, command: str) -> str:
    """What a shell command in the sandbox printed."""
    guest = Guest(lambda: engine.connect(handle), work_dir=handle.spec.work_dir)
    try:
        done = await guest.processes.run(
            StartRequest(b"look", shell=command, merge=True, forget=True), limit_bytes=1 << 20
        )
        return done.stdout.value().decode()
    finally:
        await guest.aclose()
