"""Images of a real Docker engine, as root file systems of other engines."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import ImageNotFoundError
from atoll.images import Images
from unit.images.archives import file, small_root


@pytest.fixture
def docker_image(docker_host: str) -> Iterator[str]:
    name = "atoll-test/tiny:1"
    layer = small_root(file("etc/old", b"1"))
    subprocess.run(["docker", "import", "--change", "ENV A=1", "-", name], input=layer, check=True)
    yield name
    subprocess.run(["docker", "rmi", "-f", name], check=False)


async def test_an_image_of_the_docker_engine_is_taken_over(tmp_path: Path, docker_image: str) -> None:
    images = Images(tmp_path / "data")
    image = await images.ensure(f"docker:{docker_image}")
    assert image.root is not None
    assert (image.root / "etc/old").read_bytes() == b"1"
    assert image.config.env["A"] == "1"
    with pytest.raises(ImageNotFoundError):
        await images.ensure("docker:atoll-test/absent:1")
