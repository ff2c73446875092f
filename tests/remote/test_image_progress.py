"""The image of a spec is fetched ahead, and anybody can see how far it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.settings import Settings
from needs import needs
from server.running import RunningServer, new_folder, running_server
from unit.images.archives import file, small_root, tar
from unit.images.registries import Front, Pusher, registry

pytestmark = needs("docker-registry")
PATIENCE_S = 40.0
SIZE = 3 << 20


@pytest.fixture(scope="module")
def native_server(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    need_engine("native", session_settings)
    with running_server(new_folder(session_folder, "images"), "native") as running:
        yield running


def atoll(server: RunningServer, *arguments: str) -> subprocess.Popen[str]:
    assert server.key is not None
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    environment = {**kept, "ATOLL_URL": server.url, "ATOLL_API_KEY": server.key}
    command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_how_far_an_image_is_can_be_seen(native_server: RunningServer, tmp_path: Path) -> None:
    with registry(tmp_path / "registry") as address, Front(address, "stalled") as front:
        layers = [tar(file("large", os.urandom(SIZE))), small_root()]
        Pusher(address, "team/app").image("1", layers)
        image = f"{front.address}/team/app:1"
        with native_server.client() as client:
            made = client.post("/sandbox-specs", json={"id": "app", "settings": {"image": image}})
            assert made.json()["image_status"] == "pulling"
            until(front.stalled.is_set, "nothing is fetched")

            def look() -> dict[str, Any]:
                return dict(client.get("/sandbox-specs/app").json())

            until(lambda: (look()["image_progress"] or {}).get("done_bytes", 0) > 0, "no progress is shown")
            step = look()["image_progress"]
            assert (step["stage"], step["detail"]) == ("pull", "layer 1 of 2")
            assert step["total_bytes"] == sum(len(layer) for layer in layers)
            assert 0 < step["done_bytes"] <= len(layers[0]) // 2 + len(layers[1])
            with atoll(native_server, "spec", "pull", "app") as pulling:
                front.mode = ""
                front.over.set()  # the rest comes
                said, _ = pulling.communicate(timeout=60)
            assert (pulling.returncode, said) == (0, f"{image} is ready\n")
            assert (look()["image_status"], look()["image_progress"]) == ("ready", None)
            assert client.delete("/sandbox-specs/app").status_code == 204


@pytest.mark.timeout(120)
def test_why_an_image_cannot_be_had_is_said_and_it_can_be_tried_again(
    native_server: RunningServer, tmp_path: Path
) -> None:
    with registry(tmp_path / "registry") as address, native_server.client() as client:
        wanted = {"id": "later", "settings": {"image": f"{address}/team/later:1"}}
        client.post("/sandbox-specs", json=wanted)
        with atoll(native_server, "spec", "pull", "later") as pulling:
            _, complaint = pulling.communicate(timeout=60)
        assert pulling.returncode == 125
        assert "has no image" in complaint
        assert "Traceback" not in complaint
        assert client.get("/sandbox-specs/later").json()["image_status"] == "failed"
        Pusher(address, "team/later").image("1", [small_root()])
        with atoll(native_server, "spec", "pull", "later") as pulling:
            pulling.communicate(timeout=60)
        assert pulling.returncode == 0
        assert client.delete("/sandbox-specs/later").status_code == 204
