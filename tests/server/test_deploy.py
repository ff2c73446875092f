"""What is in deploy/ says what the program understands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.server.setting_sources import PREFIX
from atoll.server.settings import ServerSettings
from needs import needs

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KNOWN = {PREFIX + name.upper() for name in ServerSettings.model_fields} | {"ATOLL_DATABASE_PASSWORD"}


@needs("systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "atoll.service").read_text()
    program = re.search(r"^ExecStart=(\S+) serve$", text, re.M)
    assert program is not None
    unit = tmp_path / "atoll.service"
    unit.write_text(text.replace(program[1], sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_unit_builds_no_walls_that_its_sandboxes_would_get() -> None:
    """A mount namespace of its own would hide the pool from the next start, devices are needed under it."""
    options = re.findall(r"^(\w+)=", (DEPLOY / "atoll.service").read_text(), re.M)
    forbidden = ("Protect", "Private", "Restrict", "SystemCall", "Device", "ReadOnly", "ReadWrite", "Inaccessible")
    assert [option for option in options if option.startswith((*forbidden, "LockPersonality", "MemoryDeny"))] == []


@pytest.mark.parametrize("name", ["atoll.service", "compose.yaml", "Dockerfile"])
def test_every_variable_is_a_setting(name: str) -> None:
    named = set(re.findall(r"ATOLL_[A-Z_]+", (DEPLOY / name).read_text()))
    assert named <= KNOWN
