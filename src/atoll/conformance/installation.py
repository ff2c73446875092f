"""An installation for checks alone, of which nothing is left afterwards."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from atoll.cancellation import finish
from atoll.conformance.bench import Bench
from atoll.engines import registry
from atoll.engines.contract import GarbageCollecting, supporting
from atoll.settings import Settings


@asynccontextmanager
async def own_bench(engine: str, image: str = "host") -> AsyncIterator[Bench]:
    """Yield a bench for the engine of this name, with directories of its own.

    At the end every sandbox is deleted, whatever became of the check that made it, and so are the directories.
    """
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))  # the path of a socket is short
    folder.chmod(0o755)
    settings = Settings(data_dir=folder / "data", run_dir=folder / "run")
    try:
        bench = Bench(registry.get(engine, settings), settings, image)
        try:
            yield bench
        finally:
            await finish(_empty(bench))
    finally:
        await finish(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


async def _empty(bench: Bench) -> None:
    engine = bench.engine
    try:
        for handle in await engine.list():
            await engine.delete(handle)
        collecting = await supporting(engine, GarbageCollecting)
        if collecting is not None:
            await collecting.gc()
    finally:
        # An engine may hold a mounted file system: only without it can the directory be removed.
        await engine.aclose()
