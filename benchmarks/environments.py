"""What one more sandbox of `computer` takes, beside one of `host`: memory and disk of each beyond the first.

Sandboxes of the two images are made in turns. Each runs a command, and its memory is what the kernel charges to its
control group then; its disk is what its writable layer holds. The image is taken from the cache, or built first.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator
from pathlib import Path

from atoll import AsyncSandbox
from atoll.engines.linux.native_engine import NativeEngine
from atoll.images import Images
from atoll.settings import Settings
from benchmarks.measure import Figure

IMAGES = ("computer", "host")
MANY = 100
MIB = 1 << 20
_COMMAND = "cat /etc/os-release >/dev/null; ls /usr/bin | wc -l >/tmp/count"


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    del engine
    settings = Settings(directory / "data", directory / "run")
    await Images(settings.data_dir, settings=settings).ensure(IMAGES[0])
    native = NativeEngine(settings)
    made: dict[str, list[AsyncSandbox]] = {image: [] for image in IMAGES}
    try:
        for _ in range(MANY):
            for image, sandboxes in made.items():
                sandbox = AsyncSandbox(engine=native, settings=settings, image=image)
                sandboxes.append(await sandbox.create())
                await sandbox.exec(_COMMAND)
        memory, disk = {}, {}
        for image, sandboxes in made.items():
            used = [await sandbox.stats() for sandbox in sandboxes[1:]]
            memory[image] = statistics.mean(each.memory_bytes or 0 for each in used) / MIB
            disk[image] = statistics.mean(each.disk_bytes or 0 for each in used) / MIB
    finally:
        for sandbox in (sandbox for sandboxes in made.values() for sandbox in sandboxes):
            await sandbox.cleanup()
        await native.aclose()
    ours, peer = IMAGES
    yield Figure(f"memory of one more {ours}", memory[ours], memory[peer], "MiB", peer, at_most=1.1)
    yield Figure(f"disk of one more {ours}", disk[ours], disk[peer], "MiB", peer, at_most=1.1)
