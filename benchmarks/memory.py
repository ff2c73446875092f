"""The private memory of an idle agent, after it has worked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

from atoll import AsyncSandbox
from benchmarks.measure import Figure

MIB = 1 << 20


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    del directory
    async with AsyncSandbox(engine=engine) as sandbox:
        for _ in range(200):
            await sandbox.exec(["true"])
        await sandbox.exec("head -c 100000000 /dev/zero", max_output_bytes=1024)
        await asyncio.sleep(2)
        private = _private_bytes(sandbox.id)
    yield Figure("idle agent, private memory", private / MIB, 1.0, "MiB", "one MiB", at_most=1.0)


def _private_bytes(sandbox_id: str) -> int:
    """Seen from the host: the process that runs our agent for this sandbox, by a variable in its environment."""
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or not (entry / "cmdline").read_bytes().startswith(b"/run/atoll/agent\0"):
                continue
            if sandbox_id.encode() not in (entry / "environ").read_bytes():
                continue
            text = (entry / "smaps_rollup").read_text()
        except OSError:
            continue
        return sum(int(size) * 1024 for size in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))
    raise RuntimeError("the agent was not found among the host's processes")
