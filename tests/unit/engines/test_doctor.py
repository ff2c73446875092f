from __future__ import annotations

from pathlib import Path

import pytest

from atoll.engines import registry
from atoll.engines.diagnosis import diagnose
from atoll.engines.host.machine import cgroup_mode, look
from atoll.settings import Settings

V1 = "30 23 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V2 = "31 23 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


@pytest.fixture
def only_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process = {"bubblewrap": "atoll.engines.bubblewrap.engine:BubblewrapEngine"}
    monkeypatch.setattr(registry, "_STRONGEST_FIRST", process)
    monkeypatch.setattr(registry, "_ENGINES", process)


def test_it_looks_at_the_machine_and_every_engine(settings: Settings) -> None:
    found = diagnose(settings)
    assert found.machine.kernel
    assert found.machine.cpus >= 1
    assert {tool.name for tool in found.machine.tools} >= {"bwrap", "runc", "docker"}
    assert [engine.name for engine in found.engines] == registry.names()
    assert found.auto in {engine.name for engine in found.engines if engine.available}
    assert found.auto != "unsafe-none"
    assert found.auto_reasons


@pytest.mark.usefixtures("only_process")
def test_it_says_what_to_install(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = diagnose(settings)
    (process,) = [engine for engine in found.engines if engine.name == "bubblewrap"]
    assert not process.available
    assert process.reasons == ("the program 'bwrap' is not installed",)
    assert "apt-get install bubblewrap" in process.hints[0]
    assert found.auto is None


@pytest.mark.usefixtures("only_process")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo bubblewrap 0.4.1", "bubblewrap 0.4.1 is too old"),
        ("echo nonsense", "nonsense is too old"),
        ('[ "$1" = --version ] && echo bubblewrap 0.9.0 || { echo no userns >&2; exit 1; }', "no userns"),
    ],
)
def test_a_bubblewrap_that_does_not_work_is_found_out(
    settings: Settings, open_folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    program = open_folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{open_folder}:/usr/bin:/bin")
    found = diagnose(settings)
    assert not found.engines[0].available
    assert reason in found.engines[0].reasons[0]
    assert found.engines[0].hints


def test_cgroup_modes_are_told_apart() -> None:
    assert [cgroup_mode(text) for text in (V1, V2, f"{V1}\n{V2}", "")] == ["v1", "v2", "hybrid", "none"]


def test_programs_are_found_where_the_engines_find_them(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """In our own directory of programs, by a variable, and in directories that an ordinary PATH leaves out."""
    program = settings.data_dir / "programs" / "runsc"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho runsc version 20250101.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("ATOLL_CRUN", str(program))
    monkeypatch.setenv("PATH", "/nowhere")
    tools = {tool.name: tool for tool in look(settings.data_dir).tools}
    assert tools["runsc"].path == tools["crun"].path == str(program)
    assert tools["runsc"].version == "20250101.0"
    assert tools["runc"].path, "from a directory that this PATH leaves out"
