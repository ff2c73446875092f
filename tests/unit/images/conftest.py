from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.archive.archive_limits import Budget, ImageLimits
from atoll.archive.decompress import plain
from atoll.archive.extract import Extraction, extract
from atoll.archive.root import Root
from atoll.archive.work import Work
from unit.images.archives import fingerprint

Unpack = Callable[..., Extraction]


def start(*argv: str) -> subprocess.Popen[bytes]:
    """A Python program in a process of its own, to be killed by the test."""
    return subprocess.Popen([sys.executable, "-c", *argv])


async def until(condition: Callable[[], object], within_s: float = 120) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory beside the root that no archive may touch."""
    path = tmp_path / "outside"
    (path / "deep").mkdir(parents=True)
    (path / "canary").write_bytes(b"unchanged")
    (path / "deep" / "canary").write_bytes(b"unchanged too")
    before = fingerprint(path)
    yield path
    assert fingerprint(path) == before


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def unpack(root: Path) -> Unpack:
    """Unpack layers, one after the other, packed or not."""

    def run(*layers: bytes, limits: ImageLimits | None = None, require_end: bool = True) -> Extraction:
        limits = limits or ImageLimits()
        budget, work = Budget(limits), Work()
        result = Extraction()
        with Root(root) as opened:
            for layer in layers:
                with plain(io.BytesIO(layer), limits, work) as stream:
                    result = extract(stream, opened, budget, work, require_end=require_end)
        return result

    return run
