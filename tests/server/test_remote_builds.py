"""Builds on a server from a program: the same class, the same result and the same errors as on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll import (
    AsyncImage,
    AsyncSandbox,
    BuildError,
    BuildEvent,
    Image,
    ImageError,
    ImageNotFoundError,
    Sandbox,
    SpecError,
)
from needs import needs
from server.building import BASE, with_base
from server.conftest import new_user
from server.running import RunningServer

pytestmark = needs("root", "busybox")


@pytest.fixture(scope="session")
def where(native_server: RunningServer) -> dict[str, Any]:
    """Options that say which server is meant, as a user of it."""
    with native_server.client() as admin:
        person = new_user(admin, "erin")
    with native_server.client(person.key) as client:
        with_base(client)
    return {"server": native_server.url, "api_key": person.key}


@pytest.fixture
def client(native_server: RunningServer, where: dict[str, Any]) -> Iterator[httpx.Client]:
    with native_server.client(where["api_key"]) as client:
        yield client


async def test_a_build_on_a_server_is_like_one_here(where: dict[str, Any], tmp_path: Path) -> None:
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


def test_the_synchronous_class(where: dict[str, Any]) -> None:
    image = Image.build(None, dockerfile=f"FROM {BASE}\nRUN echo made > /made\n".encode(), name="made", **where)
    with Sandbox(image=image, **where) as sandbox:
        assert sandbox.exec("cat /made").stdout == "made\n"


async def test_errors_are_those_of_a_build_here(where: dict[str, Any], tmp_path: Path) -> None:
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


async def test_what_cannot_be_sent_is_left_out_with_a_warning(where: dict[str, Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
    (tmp_path / "f").write_text("f")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 33)
    (tmp_path / ".dockerignore").write_text("large\n")
    seen: list[BuildEvent] = []
    dockerfile = f"FROM {BASE}\nCOPY . /in/\nRUN ls /in\n".encode()
    await AsyncImage.build(tmp_path, dockerfile=dockerfile, on_event=seen.append, **where)
    warned = [event.text for event in seen if event.kind == "warning"]
    assert warned == [
        f"'{name}' in the context is left out: it is a device, pipe or socket" for name in ("pipe", "socket")
    ]
    assert "f\n" in "".join(event.text for event in seen if event.kind == "output")


async def test_a_cancelled_caller_cancels_the_build(where: dict[str, Any], client: httpx.Client) -> None:
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
    where: dict[str, Any], client: httpx.Client, tmp_path: Path, native_server: RunningServer
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


async def test_images_of_a_server(where: dict[str, Any], tmp_path: Path) -> None:
    built = await AsyncImage.build(None, dockerfile=f"FROM {BASE}\nRUN echo x > /x\n".encode(), name="moved", **where)
    await built.save(tmp_path / "file")
    await built.remove()
    with pytest.raises(ImageNotFoundError):
        await built.inspect()
    with pytest.raises(ImageNotFoundError):
        await AsyncImage.get("moved", **where)
    loaded = await AsyncImage.load(tmp_path / "file", **where)
    assert loaded.reference == built.reference
    assert built.reference in [image.reference for image in await AsyncImage.list(**where)]
    renamed = await AsyncImage.import_tar(tmp_path / "file", "renamed:2", **where)
    async with AsyncSandbox(image=renamed, **where) as sandbox:
        assert (await sandbox.exec("cat /x")).stdout == "x\n"
        await loaded.remove()  # the other name is enough for the sandbox
        with pytest.raises(ImageError):
            await renamed.remove()
    assert (await renamed.inspect()).digest == renamed.digest
    assert await AsyncImage.prune(**where) > 0
    assert [image.reference for image in await AsyncImage.list(**where) if "renamed" in image.reference] == []


def test_the_command_builds_on_the_server(where: dict[str, Any], tmp_path: Path) -> None:
    with_base_of = {"ATOLL_URL": where["server"], "ATOLL_API_KEY": where["api_key"]}
    environment = {**os.environ, **with_base_of}
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nCOPY f /f\nRUN echo built $(cat /f); exit $(cat /f)\n")
    (tmp_path / "f").write_text("0")
    command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", "build", str(tmp_path), "-t", "by-command"]
    with_client = {"env": environment, "capture_output": True, "text": True, "timeout": 60, "check": False}
    done = subprocess.run(command, **with_client)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("by-command  sha256:")
    assert "built 0" in done.stderr
    (tmp_path / "f").write_text("3")
    failed = subprocess.run(command, **with_client)  # type: ignore[call-overload]
    assert failed.returncode != 0
    assert "Dockerfile:3" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.slow
def test_ctrl_c_cancels_the_build_on_the_server(where: dict[str, Any], tmp_path: Path, client: httpx.Client) -> None:
    environment = {**os.environ, "ATOLL_URL": where["server"], "ATOLL_API_KEY": where["api_key"]}
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nRUN echo begun; sleep 1000\n")
    command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", "build", str(tmp_path)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "begun" not in (line := process.stderr.readline()) or "RUN" in line:
            assert line, "it ended"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert builds(client)[0]["state"] == "cancelled"
