"""The `native` engine on this machine, with a look at what it leaves behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import leftovers
from atoll.engines.host import process_ref
from atoll.engines.linux.native_engine import NativeEngine
from atoll.guest import Guest, StartRequest
from atoll.model import Handle
from atoll.settings import Settings
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


def left_behind(engine: NativeEngine) -> list[str]:
    """Processes, mounts, control groups and files that only a sandbox or its making has."""
    return leftovers.left_behind(engine) + [f"launcher {pid}" for pid in launchers() - _OF_OTHERS]


_OF_OTHERS: set[int] = set()
"""Launchers that other tests of this process keep waiting."""


@pytest.fixture(autouse=True)
def launchers_of_others() -> None:
    _OF_OTHERS.clear()
    _OF_OTHERS.update(launchers())


def launchers() -> set[int]:
    return {pid for pid in process_ref.descendants(os.getpid()) if _is_launcher(pid)}


def _is_launcher(pid: int) -> bool:
    try:
        return "atoll-native" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return False


async def output(engine: NativeEngine, handle: Handle, command: str, user: str | None = None) -> str:
    guest = Guest(lambda: engine.connect(handle))
    try:
        request = StartRequest(id=os.urandom(4).hex().encode(), shell=command, user=user, merge=True)
        return (await guest.processes.run(request, limit_bytes=1 << 20)).stdout.value().decode(errors="replace")
    finally:
        await guest.aclose()
