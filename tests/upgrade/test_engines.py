"""Sandboxes that the version before has made are found and usable, on every engine, also after it was killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.settings import Settings
from docker import private_engine
from native.users import UID, OrdinaryUser
from needs import need
from upgrade.conftest import Installation
from upgrade.uses_sandboxes import Uses
from upgrade.version_before import OldTree

STATES = ("saved", "went_back", "undone")
LIMITS = {"memory_bytes": 64 << 20, "cpus": 0.5, "pids": 50, "disk_bytes": 32 << 20, "lifetime_s": 3600.0}
FEW_LIMITS = {"open_files": 200, "lifetime_s": 3600.0}
ENGINES: dict[str, dict[str, Any]] = {
    "native": {"engine": "native", "kinds": ("busy", "paused", "limited", "volumes", *STATES, "died")},
    "runc": {"engine": "oci", "kinds": ("busy", "paused", "limited", "volumes", *STATES, "died")},
    "gvisor": {"engine": "oci", "spec": {"isolation": "gvisor"}, "kinds": ("paused", "memory")},
    "process": {"engine": "process", "kinds": ("busy", "paused", "limited", "volumes", "killed"), "limits": FEW_LIMITS},
}
DOCKER = {
    "engine": "docker",
    "spec": {"image": private_engine.DEBIAN},
    "kinds": ("busy", "paused", "limited", "volumes", *STATES, "died"),
    "limits": {"memory_bytes": 64 << 20, "cpus": 0.5, "pids": 50, "lifetime_s": 3600.0},
    "at_once": 1,  # whoever tidies up takes a state that another has just kept for a moment for a leftover
}


def wanted_of(engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the old code is asked for, with directories for volumes."""
    shared, fixed = folder / "shared", folder / "fixed"
    for path in (shared, fixed):
        path.mkdir()
        path.chmod(0o777)
        if os.geteuid() == 0:
            os.chown(path, UID, UID)  # no sandbox may write to what belongs to root
    (fixed / "file").write_text("fixed")
    common = {"spec": {}, "limits": LIMITS, "at_once": 4, "volumes": [str(shared), str(fixed)], "snapshot": "kept"}
    return common | engine


def found_and_used(old: OldTree, installation: Installation, wanted: dict[str, Any]) -> None:
    facts = old.run("sandboxes.py", wanted, installation.environment)
    old.remove()
    installation.atoll("gc")  # nothing of theirs is a leftover
    assert set(installation.listed()) == set(facts["ids"].values())
    asyncio.run(Uses(wanted, facts).use_all())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.again) if name == "runc" else name for name in ENGINES]
)
def test_sandboxes_of_the_version_before(
    name: str, old: OldTree, installation: Installation, need_engine: Callable[[str, Settings], None]
) -> None:
    wanted = wanted_of(ENGINES[name], installation.folder)
    need_engine(wanted["engine"], installation.settings)
    found_and_used(old, installation, wanted)
    if "saved" in wanted["kinds"]:
        assert wanted["snapshot"] in installation.atoll("snapshot", "ls", "--engine", wanted["engine"])
        installation.atoll("snapshot", "rm", wanted["snapshot"], "--engine", wanted["engine"])


@pytest.mark.docker
def test_containers_of_the_version_before(
    old: OldTree, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", private_engine.host())
    wanted = wanted_of(DOCKER, installation.folder)
    found_and_used(old, installation, wanted)
    installation.atoll("snapshot", "rm", wanted["snapshot"], "--engine", "docker")
    # The images that its deleted checkpoints and forks were kept for go with the last container.
    installation.atoll("rm", "--all")
    name = (installation.settings.data_dir / "installation-id").read_text()[:8]
    left = private_engine.docker("ps", "--all", "--format", "{{.Names}}") + private_engine.docker("images")
    assert f"atoll-{name}" not in left


@pytest.fixture(params=["range", pytest.param("single", marks=pytest.mark.again)])
def user(request: pytest.FixtureRequest, session_folder: Path, compiled: OldTree) -> Iterator[OrdinaryUser]:
    need("root", "newuidmap", "newgidmap", "setpriv")
    made = OrdinaryUser(session_folder, request.param == "range")
    yield made
    if processes_of(UID):  # what our code cannot find goes all the same
        made.run("env", f"PYTHONPATH={path_of(compiled)}", made.python, "-P", "-m", "atoll.cli", "rm", "--all")
    shutil.rmtree(made.home)


def path_of(old: OldTree) -> str:
    """With the packages that are installed where another user's Python does not look."""
    return os.pathsep.join((old.path, *filter(None, sys.path)))


def test_sandboxes_of_the_version_before_without_any_right(old: OldTree, user: OrdinaryUser) -> None:
    """A user who is not root finds the sandboxes that the old code has made for the same user."""
    engine = {"engine": "native", "kinds": ("busy", "limited", "volumes", "died"), "limits": FEW_LIMITS}
    wanted = wanted_of(engine, user.home)
    command = old.command("sandboxes.py", wanted, user.python)
    facts = old.facts(user.run("env", f"PYTHONPATH={path_of(old)}", *command))
    old.remove()

    def ours(*words: str) -> str:
        done = user.run(user.python, "-P", "-W", "ignore", "-m", *words)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    listed = json.loads(ours("atoll.cli", "ls", "--json"))
    assert {row["id"] for row in listed} == set(facts["ids"].values())
    ours("upgrade.uses_sandboxes", json.dumps(wanted), json.dumps(facts))
    ours("atoll.cli", "rm", "--all")
    assert processes_of(UID) == []


def processes_of(uid: int) -> list[str]:
    done = subprocess.run(["ps", "-u", str(uid), "-o", "stat=,args="], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if not line.startswith("Z")]
