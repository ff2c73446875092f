from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import atoll
from atoll.compat import openmanus
from atoll.errors import SpecError
from atoll.openmanus import SandboxSettings


def test_names_and_defaults_are_those_of_openmanus() -> None:
    assert SandboxSettings().model_dump(exclude={"pids_limit"}) == {
        "use_sandbox": False,
        "image": "python:3.12-slim",
        "work_dir": "/workspace",
        "memory_limit": "512m",
        "cpu_limit": 1.0,
        "timeout": 300,
        "network_enabled": False,
    }


def test_every_name_can_be_imported_from_atoll_and_is_only_then_loaded() -> None:
    # `atoll.SandboxManager` is the one for every engine; this package's own is for Docker alone.
    later = sorted(set(openmanus.__all__) & set(atoll.__all__) - {"SandboxManager"})
    assert {"DockerSandbox", "SANDBOX_CLIENT", "SandboxFileOperator", "refuse"} <= set(later)
    for name in later:
        assert getattr(atoll, name) is getattr(openmanus, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = atoll.nothing  # type: ignore[attr-defined]
    code = "import atoll, sys; print([n for n in sys.modules if 'openmanus' in n or 'docker' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_a_section_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[llm]\nmodel = "x"\n[sandbox]\nuse_sandbox = true\nmemory_limit = "1g"\ncpu_limit = 2.0\n')
    found = SandboxSettings.load(path)
    assert (found.use_sandbox, found.memory_limit, found.cpu_limit, found.timeout) == (True, "1g", 2.0, 300)
    path.write_text('[llm]\nmodel = "x"\n')
    assert SandboxSettings.load(path) == SandboxSettings()


@pytest.mark.parametrize(
    "text",
    ["memory_limit = 'lots'", "cpu_limit = 0", "timeout = -1", "image = ''", "memory_limt = '1g'", "work_dir = 'x'"],
)
def test_what_makes_no_sense_is_told_with_its_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[sandbox]\n{text}\n")
    with pytest.raises(SpecError, match=text.split(" ")[0]):
        SandboxSettings.load(path)


def test_a_broken_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[sandbox\n")
    with pytest.raises(SpecError, match="not a TOML file"):
        SandboxSettings.load(path)
    with pytest.raises(FileNotFoundError):
        SandboxSettings.load(tmp_path / "missing")


def test_values_are_checked_when_they_are_changed_too() -> None:
    settings = SandboxSettings()
    with pytest.raises(ValidationError):
        settings.cpu_limit = -1
    with pytest.raises(ValidationError):
        SandboxSettings(memory_limit="1k")


def test_they_become_a_spec(tmp_path: Path) -> None:
    spec = SandboxSettings(memory_limit="1g", cpu_limit=0.5).spec({str(tmp_path): "/data", "/usr": "/host-usr:ro"})
    assert (spec.limits.memory_bytes, spec.limits.cpus) == (1 << 30, 0.5)
    assert [(volume.path, volume.read_only) for volume in spec.volumes] == [("/data", False), ("/host-usr", True)]
    with pytest.raises(SpecError, match="not a volume"):
        SandboxSettings().spec({"/a": "/b:rx"})
