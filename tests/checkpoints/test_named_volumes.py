"""Named volumes from Python and as a user types them, on one machine."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import (
    AsyncSandbox,
    AsyncVolumes,
    ConflictError,
    Sandbox,
    SpecError,
    UnsupportedError,
    VolumeNotFoundError,
    Volumes,
)
from atoll.engines.linux.engine import LinuxEngine
from atoll.manager import PoolSettings
from atoll.model import SandboxSpec, Volume
from atoll.settings import Settings
from checkpoints.test_cli import atoll


@pytest.fixture
def volumes(native: LinuxEngine, settings: Settings) -> Iterator[Settings]:
    """What is left at the end is removed."""
    yield settings
    Volumes.prune(engine="native", settings=settings)


async def test_a_volume_from_python(native: LinuxEngine, tmp_path: Path) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/file").write_text("kept")
    (tmp_path / "in/link").symlink_to("deep/file")
    await AsyncVolumes.upload("data", tmp_path / "in", engine=native)
    async with AsyncSandbox(engine=native, volumes=["data:/v"]) as sandbox:
        assert await sandbox.read_file("/v/link") == "kept"
        await AsyncVolumes.snapshot("data", "before", engine=native)
        await sandbox.write_file("/v/deep/file", "changed")
        assert (await AsyncVolumes.inspect("data", engine=native)).users == (sandbox.id,)
        with pytest.raises(ConflictError, match=sandbox.id):
            await AsyncVolumes.remove("data", engine=native)
        assert await AsyncVolumes.prune(engine=native) == ["before"]
    await AsyncVolumes.download("data", "deep", tmp_path / "out", engine=native)
    assert (tmp_path / "out/file").read_text() == "changed"
    with pytest.raises(SpecError, match="out of the volume"):
        await AsyncVolumes.download("data", "../etc", tmp_path / "etc", engine=native)
    with pytest.raises(SpecError, match="name of a volume"):
        await AsyncVolumes.upload("/etc", tmp_path / "in", engine=native)
    with pytest.raises(SpecError, match="size"):
        await AsyncVolumes.create("odd", size="many", engine=native)
    await AsyncVolumes.remove("data", engine=native)
    with pytest.raises(VolumeNotFoundError):
        await AsyncVolumes.download("data", "", tmp_path / "none", engine=native)
    assert await AsyncVolumes.list(engine=native) == []


@pytest.mark.slow  # the blocks of the guides use most of these commands in every run
@pytest.mark.timeout(240)
def test_a_volume_by_hand(volumes: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    assert atoll(volumes, "volume", "create", "data", "--size", "64m") == "data\n"
    sandbox = atoll(volumes, "create", "--engine", "native", "-v", "data:/v", "--setup", "echo one >/v/file").strip()
    assert json.loads(atoll(volumes, "volume", "inspect", "data"))["users"] == [sandbox]
    atoll(volumes, "volume", "snapshot", "data", "before")
    atoll(volumes, "exec", sandbox, "--", "sh", "-c", "echo two >/v/file")
    assert sandbox in atoll(volumes, "volume", "rm", "data", code=125)
    atoll(volumes, "rm", sandbox)
    atoll(volumes, "volume", "restore", "data", "before")
    atoll(volumes, "volume", "upload", str(tmp_path / "file"), "data:more/", "--engine", "native")
    atoll(volumes, "volume", "download", "data", str(tmp_path / "out"), "--engine", "native")
    assert (tmp_path / "out/file").read_text() == "one\n"
    assert (tmp_path / "out/more/file").read_text() == "here"
    listed = json.loads(atoll(volumes, "volume", "ls", "--json"))
    assert [(each["name"], each["source"]) for each in listed] == [("data", "before"), ("before", "data")]
    assert sorted(atoll(volumes, "volume", "prune", "--yes").split()) == ["before", "data"]


def test_a_directory_has_a_slash_on_the_command_line(volumes: Settings, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/file").write_text("of the host")
    environment = {**os.environ, "ATOLL_DATA_DIR": str(volumes.data_dir), "ATOLL_RUN_DIR": str(volumes.run_dir)}
    for source, shown in (("./dir", "file\n"), ("dir", "")):
        words = ("run", "--engine", "native", "-v", f"{source}:/v:ro", "--", "ls", "/v")
        command = [sys.executable, "-c", "from atoll.cli import main; main()", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, shown), done.stderr


def test_the_example_of_start_commands_does_what_it_says(
    volumes: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOLL_DATA_DIR", str(volumes.data_dir))
    monkeypatch.setenv("ATOLL_RUN_DIR", str(volumes.run_dir))
    runpy.run_path(str(Path(__file__).parents[2] / "examples/start_and_ready.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith("it answers 200\nit was started again: StartState(name='web'")
    assert "the disk is missing" in said


def test_the_example_does_what_it_says(
    volumes: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOLL_DATA_DIR", str(volumes.data_dir))
    monkeypatch.setenv("ATOLL_RUN_DIR", str(volumes.run_dir))
    runpy.run_path(str(Path(__file__).parents[2] / "examples/volume.py"), run_name="__main__")
    assert capsys.readouterr().out == "fetched\nfound\na,b\n"
    assert Volumes.list(settings=volumes) == []


def test_what_a_volume_may_be() -> None:
    assert Volume.parse("data:/v:ro") == Volume(name="data", path="/v", read_only=True)
    assert Volume.parse("/data:/v") == Volume(host="/data", path="/v")
    # What earlier versions wrote has no name.
    assert Volume.model_validate({"host": "/data", "path": "/v", "read_only": False}) == Volume(host="/data", path="/v")
    for wrong in (
        "data",
        "data:",
        ":/v",
        "data:v",
        "da ta:/v",
        "-x:/v",
        "a:b:c:d",
        "data:/v:rx",
        "@" + "0" * 40 + ":/v",
    ):
        with pytest.raises(SpecError):
            Volume.parse(wrong)
    for both in ({"path": "/v"}, {"name": "data", "host": "/data", "path": "/v"}, {"name": "data", "path": ""}):
        with pytest.raises(ValueError, match="volume"):
            Volume.model_validate(both)


def test_a_pool_has_no_named_volumes() -> None:
    for text in ("data:/v", "data:/v:ro"):
        with pytest.raises(SpecError, match="volumes"):
            PoolSettings(spec=SandboxSpec(volumes=(Volume.parse(text),)), size=1)


def test_an_engine_without_volumes_says_so(settings: Settings) -> None:
    with pytest.raises(UnsupportedError, match="named volumes"):
        Volumes.list(engine="bubblewrap", settings=settings)
    with (
        pytest.raises(UnsupportedError, match="named_volumes"),
        Sandbox(engine="bubblewrap", settings=settings, volumes={"data": "/v"}),
    ):
        pass
