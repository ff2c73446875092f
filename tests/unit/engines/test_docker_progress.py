"""What a Docker engine tells of each layer becomes one figure for the whole image."""

from __future__ import annotations

from atoll.engines.docker.api.image_pull import Progress, summed
from atoll.model import ImageProgress


def test_layers_are_added_up() -> None:
    steps: list[ImageProgress] = []
    step = summed(steps.append)
    step(Progress("app", "Pulling from app"))
    assert (steps[-1].done_bytes, steps[-1].total_bytes) == (0, None)
    step(Progress("app", "Downloading", "aa", 10, 100))
    step(Progress("app", "Downloading", "bb", 50, 50))
    assert (steps[-1].done_bytes, steps[-1].total_bytes) == (60, 150)
    step(Progress("app", "Download complete", "aa"))
    assert (steps[-1].done_bytes, steps[-1].total_bytes) == (150, 150)
    step(Progress("app", "Extracting", "aa", 3, 400))
    assert (steps[-1].stage, steps[-1].detail, steps[-1].done_bytes) == ("extract", "Extracting aa", 150)
