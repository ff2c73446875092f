"""The `native` engine on this machine, with a look at what it leaves behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import leftovers
from atoll.engines.linux.native_engine import NativeEngine
from atoll.guest import Guest, StartRequest
from atoll.model import Handle
from atoll.settings import Settings
from native import launchers
from native.launchers import left_behind
from needs import need


@pytest.fixture
def settings() -> Iterator[Settings]:
    need("root")
    folder = Path(tempfile.mkdtemp(prefix="an-", dir="/tmp"))
    folder.chmod(0o755)
    yield Settings(folder / "data", folder / "run")
    shutil.rmtree(folder)


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[NativeEngine]:
    made = NativeEngine(settings)
    yield made
    await leftovers.emptied(made)
    assert left_behind(made) == []


@pytest.fixture(autouse=True)
def launchers_of_others() -> None:
    launchers.note_those_of_others()


async def output(engine: NativeEngine, handle: Handle, command: str, user: str | None = None) -> str:
    guest = Guest(lambda: engine.connect(handle))
    try:
        request = StartRequest(id=os.urandom(4).hex().encode(), shell=command, user=user, merge=True)
        return (await guest.processes.run(request, limit_bytes=1 << 20)).stdout.value().decode(errors="replace")
    finally:
        await guest.aclose()
