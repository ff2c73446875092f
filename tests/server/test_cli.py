"""The command line against a server, and the SDK as the README shows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll import AsyncSandbox, Sandbox, SandboxNotFoundError
from atoll.cli import app
from atoll.errors import EngineUnavailableError, NotAuthenticatedError, SandboxError, SpecError
from server.conftest import Person
from server.running import RunningServer


@pytest.fixture
def environment(server: RunningServer, ann: Person) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    return {**kept, "ATOLL_URL": server.url, "ATOLL_API_KEY": ann.key}


def atoll(environment: dict[str, str], *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, input=stdin, timeout=60)


@pytest.mark.timeout(180)
def test_a_sandbox_lives_on_the_server(environment: dict[str, str], tmp_path: Path) -> None:
    made = atoll(environment, "create", "-e", "STAGE=test")
    assert made.returncode == 0, made.stderr
    id = made.stdout.strip()
    ran = atoll(environment, "exec", id, "--", "sh", "-c", "cat; echo $STAGE; exit 4", stdin="typed ")
    assert (ran.stdout, ran.returncode) == ("typed test\n", 4)
    (tmp_path / "f").write_text("content")
    assert atoll(environment, "cp", str(tmp_path / "f"), f"{id}:g").returncode == 0
    assert atoll(environment, "cp", f"{id}:g", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back").read_text() == "content"
    listed = json.loads(atoll(environment, "ls", "--json").stdout)
    assert [row["state"] for row in listed if row["id"] == id] == ["RUNNING"]
    assert "RUNNING" in atoll(environment, "logs", id).stdout
    assert json.loads(atoll(environment, "stats", id, "--json").stdout)[0]["pids"] is not None
    refused = atoll(environment, "pause", "--disk", id)
    assert refused.returncode == 125
    assert "cannot" in refused.stderr
    assert (atoll(environment, "pause", id).returncode, atoll(environment, "resume", id).returncode) == (0, 0)
    assert atoll(environment, "rm", id).stdout == f"{id}\n"
    gone = atoll(environment, "exec", id, "--", "true")
    assert (gone.returncode, gone.stderr) == (125, f"atoll: Sandbox {id} not found\n`atoll ls` lists them.\n")


@pytest.mark.timeout(180)
def test_a_command_that_is_given_up_does_not_go_on(environment: dict[str, str]) -> None:
    id = atoll(environment, "create").stdout.strip()
    command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", "exec", id, "--", "sh", "-c", "echo up; sleep 9999"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    left = atoll(environment, "exec", id, "--", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "9999" not in left.stdout
    assert atoll(environment, "rm", id).returncode == 0


@pytest.mark.timeout(180)
def test_keys_specs_and_settings(environment: dict[str, str]) -> None:
    assert "default" in atoll(environment, "spec", "ls").stdout
    assert atoll(environment, "spec", "create", "clis").stdout == "clis\n"
    flags = ("--name", "of-spec", "--label", "run=1", "-e", "STAGE=spec", "--lifetime", "900")
    id = atoll(environment, "create", "--spec", "clis", *flags).stdout.strip()
    assert atoll(environment, "exec", "of-spec", "--", "sh", "-c", "echo $STAGE").stdout == "spec\n"
    (row,) = json.loads(atoll(environment, "ls", "--label", "run=1", "--json").stdout)
    assert (row["id"], row["name"]) == (id, "of-spec")
    assert atoll(environment, "rm", id).returncode == 0
    assert atoll(environment, "spec", "rm", "clis").returncode == 0
    key = atoll(environment, "key", "create", "mine", "--scope", "read").stdout.strip()
    assert key.startswith("atoll_")
    keys = json.loads(atoll(environment, "key", "ls", "--json").stdout)
    assert atoll(environment, "key", "revoke", keys[0]["id"]).returncode == 0
    assert id in atoll(environment, "events", "--limit", "1000", "--json").stdout
    assert "ATOLL_MAX_NUM_SANDBOXES" in atoll(environment, "config").stdout


def test_without_a_server_it_says_so(environment: dict[str, str]) -> None:
    here = {name: value for name, value in environment.items() if not name.startswith("ATOLL_")}
    refused = atoll(here, "key", "ls")
    assert refused.returncode == 125
    assert "ATOLL_URL" in refused.stderr


def test_the_sdk_takes_a_server_or_finds_it_in_the_environment(
    server: RunningServer, ann: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sandbox(server=server.url, api_key=ann.key) as sandbox:
        assert sandbox.engine_name == "remote"
        assert sandbox.exec("echo hi").stdout == "hi\n"
        sandbox.write_file("notes/a.txt", "hi")
        assert sandbox.run_command("cd notes && cat a.txt") == "hi"
    monkeypatch.setenv("ATOLL_URL", server.url)
    monkeypatch.setenv("ATOLL_API_KEY", ann.key)
    with Sandbox() as sandbox:
        assert sandbox.engine_name == "remote"
        assert sandbox.exec("echo hi").stdout == "hi\n"


async def test_the_sdk_finds_a_sandbox_that_was_made_over_rest(server: RunningServer, ann: Person) -> None:
    with server.client(ann.key) as client:
        id = client.post("/sandboxes").json()["id"]
    sandbox = await AsyncSandbox.attach(id, server=server.url, api_key=ann.key)
    assert (await sandbox.exec("echo hi")).stdout == "hi\n"
    await sandbox.cleanup()
    with pytest.raises(SandboxNotFoundError):
        await AsyncSandbox.attach(id, server=server.url, api_key=ann.key)


async def test_a_wrong_server_or_key_is_said(server: RunningServer) -> None:
    with pytest.raises(NotAuthenticatedError, match="credential"):
        await AsyncSandbox(server=server.url, api_key="atoll_x_y").create()
    with pytest.raises(EngineUnavailableError, match="not the URL"):
        await AsyncSandbox(server="nonsense", api_key="k").create()
    with pytest.raises(SpecError, match="either"):
        AsyncSandbox(server=server.url, engine="bubblewrap")


@pytest.mark.parametrize("words", ["create --spec none", "ls", "rm none", "ports ID", "spec pull none", "spec rm none"])
def test_what_fails_closes_its_connections(environment: dict[str, str], words: str) -> None:
    id = atoll(environment, "create").stdout.strip() if "ID" in words else ""
    assert not id or atoll(environment, "pause", id).returncode == 0  # its ports cannot be listed then
    key = environment["ATOLL_API_KEY"] if words != "ls" else "atoll_wrong"
    before = sockets()
    arguments = words.replace("ID", id).split()
    result = CliRunner().invoke(app, arguments, env={"ATOLL_URL": environment["ATOLL_URL"], "ATOLL_API_KEY": key})
    assert isinstance(result.exception, SandboxError), result.output
    assert sockets() == before
    assert not id or atoll(environment, "rm", id).returncode == 0


def sockets() -> int:
    """How many this process has."""
    names = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(name).startswith("socket:") for name in names if os.path.islink(name))
