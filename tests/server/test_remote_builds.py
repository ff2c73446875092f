"""Builds on a server from a program: the same class, the same result and the same errors as on this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll import AsyncImage, AsyncSandbox, BuildError, BuildEvent, Image, Sandbox, SpecError
from needs import needs
from server.building import BASE, with_base
from server.conftest import new_user
from server.running import RunningServer

pytestmark = needs("root", "busybox")


@pytest.fixture(scope="module")
def where(native_server: RunningServer) -> dict[str, str]:
    """Options that say which server is meant, as a user of it."""
    with native_server.client() as admin:
        person = new_user(admin, "erin")
    with native_server.client(person.key) as client:
        with_base(client)
    return {"server": native_server.url, "api_key": person.key}


@pytest.fixture
def client(native_server: RunningServer, where: dict[str, str]) -> Iterator[httpx.Client]:
    with native_server.client(where["api_key"]) as client:
        yield client


async def test_a_build_on_a_server_is_like_one_here(where: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept\n")
    (tmp_path / "left").write_text("left out\n")
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/kept").write_text("deep\n")
    (tmp_path / "deep/left").write_text("left out\n")
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "run").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run").chmod(0o750)
    (tmp_path / ".dockerignore").write_text("left\n**/left\nDockerfile\n")
    dockerfile = f"FROM {BASE}\nARG WHO\nCOPY . /in/\nENV WHO=$WHO\nRUN echo building for $WHO\n"
    (tmp_path / "Dockerfile").write_text(dockerfile)
    seen: list[BuildEvent] = []
    image = await AsyncImage.build(tmp_path, name="team/erins", args={"WHO": "erin"}, on_event=seen.append, **where)
    assert image.reference == "docker.io/team/erins:latest"
    assert image.config.env["WHO"] == "erin"
    assert "building for erin\n" in "".join(event.text for event in seen if event.kind == "output")
    assert seen[0].kind == "plan"
    async with AsyncSandbox(image=image, **where) as sandbox:
        found = await sandbox.exec(
            "cd /in && find . | sort && cat kept link deep/er/kept && ./run && stat -c %a run || ls -l"
        )
        assert "./left" not in found.stdout
        assert "./deep/left" not in found.stdout
        assert "kept\nkept\ndeep\nran\n" in found.stdout


def test_the_synchronous_class(where: dict[str, str]) -> None:
    image = Image.build(None, dockerfile=f"FROM {BASE}\nRUN echo made > /made\n".encode(), name="made", **where)
    with Sandbox(image=image, **where) as sandbox:
        assert sandbox.exec("cat /made").stdout == "made\n"


async def test_errors_are_those_of_a_build_here(where: dict[str, str], tmp_path: Path) -> None:
    dockerfile = f"FROM {BASE}\n\nRUN echo well; echo broken >&2; exit 3\n".encode()
    with pytest.raises(BuildError) as failed:
        await AsyncImage.build(tmp_path, dockerfile=dockerfile, **where)
    error = failed.value
    assert (error.place, error.exit_code, error.cause, error.from_server) == ("Dockerfile:3", 3, "exit", True)
    assert "broken" in error.output
    with pytest.raises(SpecError, match="Dockerfile:1: "):
        await AsyncImage.build(tmp_path, dockerfile=b"NOTHING x\n", **where)
    with pytest.raises(SpecError, match="is not a directory"):
        await AsyncImage.build(tmp_path / "none", **where)
    with pytest.raises(BuildError, match="there is no snapshot 'none'"):
        await AsyncImage.build(tmp_path, dockerfile=b"FROM snapshot:none\nRUN x\n", **where)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "s"))
    sock.close()
    with pytest.raises(SpecError, match="'s' in the context is a device, pipe or socket"):
        await AsyncImage.build(tmp_path, dockerfile=dockerfile, **where)
    (tmp_path / ".dockerignore").write_text("s\n")
    with pytest.raises(BuildError):
        await AsyncImage.build(tmp_path, dockerfile=dockerfile, **where)


async def test_a_cancelled_caller_cancels_the_build(where: dict[str, str], client: httpx.Client) -> None:
    begun = asyncio.Event()

    def seen(event: BuildEvent) -> None:
        if event.kind == "output":
            begun.set()

    dockerfile = f"FROM {BASE}\nRUN echo begun; sleep 1000\n".encode()
    building = asyncio.create_task(AsyncImage.build(None, dockerfile=dockerfile, on_event=seen, **where))
    await begun.wait()
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert builds(client)[0]["state"] == "cancelled"


async def test_a_caller_who_is_cancelled_while_sending_leaves_nothing(
    where: dict[str, str], client: httpx.Client, tmp_path: Path, native_server: RunningServer
) -> None:
    before = builds(client)
    for number in range(50):
        (tmp_path / f"f{number}").write_bytes(os.urandom(1 << 20))
    building = asyncio.create_task(AsyncImage.build(tmp_path, dockerfile=b"FROM scratch\n", **where))
    transfers = native_server.folder / "state/transfers"
    await condition(lambda: any(transfers.iterdir()))
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    await condition(lambda: not any(transfers.iterdir()))
    after = builds(client)
    assert [each["state"] for each in after[: len(after) - len(before)]] in ([], ["cancelled"])


def builds(client: httpx.Client) -> list[dict[str, Any]]:
    """Those of the user, newest first."""
    return list(client.get("/images/builds").json()["items"])


async def condition(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
