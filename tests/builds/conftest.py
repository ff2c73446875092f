"""Builds on this machine, with the engine `native` and a small root."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from atoll.settings import Settings
from builds import small_root
from builds.small_root import Workshop
from needs import need


@pytest.fixture(scope="module")
def building_settings() -> Iterator[Settings]:
    """Directories that the builds of one module share, with the base image in them."""
    need("root", "busybox", "mkfs.btrfs")
    folder = Path(tempfile.mkdtemp(prefix="ab-", dir="/tmp"))
    folder.chmod(0o755)
    settings = Settings(folder / "data", folder / "run")
    asyncio.run(small_root.install(settings, folder))
    yield settings
    shutil.rmtree(folder)


@pytest.fixture
async def workshop(building_settings: Settings, tmp_path: Path) -> AsyncIterator[Workshop]:
    context = tmp_path / "context"
    context.mkdir()
    async with small_root.workshop(building_settings, context) as made:
        yield made
