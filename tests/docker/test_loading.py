"""A real Docker engine loads what was saved, and gives it back equal."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
from pathlib import Path

from atoll.images import Images
from needs import needs
from unit.images.stacked_images import CONFIG, merged, stacked

pytestmark = needs("root")


def test_docker_loads_an_image_that_was_saved_and_gives_it_back(tmp_path: Path, docker_host: str) -> None:
    images, others = Images(tmp_path / "data"), Images(tmp_path / "others")
    image = asyncio.run(stacked(images, tmp_path))
    asyncio.run(images.save("mine:1", tmp_path / "out.tar", name="atoll-test/loaded:1"))

    def docker(*words: str) -> str:
        command = ["docker", "-H", docker_host, *words]
        return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout

    try:
        assert "atoll-test/loaded:1" in docker("load", "-i", str(tmp_path / "out.tar"))
        config = json.loads(docker("image", "inspect", "atoll-test/loaded:1"))[0]["Config"]
        assert config["Labels"] == CONFIG.labels
        assert config["Entrypoint"] == list(CONFIG.entrypoint)
        docker("save", "-o", str(tmp_path / "back.tar"), "atoll-test/loaded:1")
    finally:
        docker("rmi", "-f", "atoll-test/loaded:1")
    back = asyncio.run(others.load(tmp_path / "back.tar"))
    assert merged(others, back) == merged(images, image)
    assert back.config == dataclasses.replace(CONFIG, history=back.config.history)
