"""The blocks of the documentation whose sandboxes are containers, on a real Docker engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.openmanus import SandboxSettings
from docker.private_engine import DEBIAN, docker
from docs import python_blocks
from docs.blocks import Block, blocks


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in blocks() if block.needs_docker])
def test_block(block: Block, config: SandboxSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = docker("ps", "-aq", "--filter", "label=atoll.sandbox_id")
    monkeypatch.chdir(tmp_path)
    replaced = {"python:3.12-slim": DEBIAN, "/data/in": str(tmp_path), '"python ': '"python3 '}
    python_blocks.run(block, {"settings": config}, replaced)
    assert docker("ps", "-aq", "--filter", "label=atoll.sandbox_id") == before
