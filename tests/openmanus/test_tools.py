"""What OpenManus's tools use besides a sandbox: files of this machine, a global configuration, rules for file names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import SpecError
from atoll.openmanus import (
    Config,
    DockerSandbox,
    FileOperator,
    LocalFileOperator,
    OperationError,
    ToolError,
    clean_path,
    should_exclude_file,
)
from manager.waiting import until


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("/workspace/src/main.py", "src/main.py"),
        ("workspace/src/main.py", "src/main.py"),
        ("src//./main.py", "src/main.py"),
        ("/workspace", ""),
        ("workspace2/x", "workspace2/x"),
        ("a/../b", "b"),
        ("/etc/passwd", "etc/passwd"),
    ],
)
def test_paths_become_relative_to_the_workspace(path: str, clean: str) -> None:
    assert clean_path(path) == clean


def test_another_workspace() -> None:
    assert clean_path("/home/me/project/x", "/home/me/project") == "x"
    assert clean_path("/home/me/project2/x", "/home/me/project") == "home/me/project2/x"


@pytest.mark.parametrize("path", ["../../etc/passwd", "/workspace/../etc/passwd", "a/../../b", ".."])
def test_no_path_leads_out_of_the_workspace(path: str) -> None:
    with pytest.raises(SpecError, match="leads out"):
        clean_path(path)


def test_which_files_are_left_out() -> None:
    assert all(map(should_exclude_file, ["node_modules/a.js", "a/.git/config", "package-lock.json", "x/logo.PNG"]))
    assert not any(map(should_exclude_file, ["rebuild/a.py", "distance.py", "src/builder/x.py", "a.py", "git/x"]))


async def test_files_of_this_machine(tmp_path: Path) -> None:
    operator = LocalFileOperator()
    assert isinstance(operator, FileOperator)
    await operator.write_file(tmp_path / "a b", "tëxt")
    assert await operator.read_file(str(tmp_path / "a b")) == "tëxt"
    assert await operator.exists(tmp_path / "a b")
    assert not await operator.is_directory(tmp_path / "a b")
    assert await operator.is_directory(tmp_path)
    with pytest.raises(ToolError, match=r"Failed to read .*missing") as caught:
        await operator.read_file(tmp_path / "missing")
    assert caught.value.message == str(caught.value)
    with pytest.raises(ToolError, match="Failed to write to"):
        await operator.write_file(tmp_path / "no" / "directory", "x")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ToolError, match="Failed to read"):
        await operator.read_file(tmp_path / "binary")


async def test_commands_on_this_machine(tmp_path: Path) -> None:
    operator = LocalFileOperator()
    assert await operator.run_command("echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
    assert (await operator.run_command("kill -9 $$"))[0] == 137
    pid = tmp_path / "pid"
    with pytest.raises(TimeoutError, match=r"timed out after 0\.5 seconds"):
        await operator.run_command(f"sleep 600 & echo $! > {pid}; wait", timeout=0.5)
    await until(lambda: not Path(f"/proc/{pid.read_text().strip()}/exe").exists())  # killed with its shell


async def test_an_archive_of_one_file() -> None:
    stream = await DockerSandbox._create_tar_stream("name", b"content")
    assert await DockerSandbox._read_from_tar(iter([stream.read(100), stream.read()])) == b"content"
    for broken in ([b"no archive"], [bytes(10240)]):
        with pytest.raises(OperationError):
            await DockerSandbox._read_from_tar(broken)


def test_one_configuration_for_all_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config().sandbox.timeout == 300, "there is no file"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("[llm]\nmodel = 'x'\n[sandbox]\nuse_sandbox = true\ntimeout = 7\n")
    config = Config()
    assert (config.sandbox.use_sandbox, config.sandbox.timeout) == (True, 7)
    config.sandbox.use_sandbox = False
    assert not config.sandbox.use_sandbox
    monkeypatch.setenv("OPENMANUS_CONFIG", str(tmp_path / "missing.toml"))
    with pytest.raises(FileNotFoundError, match=r"missing\.toml"):
        _ = Config().sandbox


def test_a_configuration_that_makes_no_sense_says_where(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[sandbox]\nmemory = '1g'\n")
    code = "from atoll.openmanus import config\nconfig.sandbox"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"OPENMANUS_CONFIG": str(tmp_path / "config.toml")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "[sandbox] in" in done.stderr.splitlines()[-1]
    assert "memory" in done.stderr.splitlines()[-1]
