"""The code of the version before, taken from the history of this repository and compiled.

`git archive` is used and not `git worktree`: a worktree that outlives a killed test stays registered in the repository,
an unpacked archive is only a folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needs import missing, need

COMMIT = "d959f96e76340785bf88d1205a3f32c7d5b19702"
"""The last commit before the modules, programs and tests found the places where they are now."""
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).with_name("before")
_PARTS = ("src", "agent", "launcher", "hatch_build.py")
_BUILD_S, _RUN_S = 120, 60

Run = Callable[..., subprocess.CompletedProcess[str]]
"""As `subprocess.run`, with the command as words."""


@dataclass(frozen=True, slots=True)
class OldTree:
    """One installation of the old code."""

    directory: Path

    @property
    def path(self) -> str:
        """What PYTHONPATH has to be: it comes before the package that is installed."""
        return str(self.directory / "src")

    def copy(self, directory: Path) -> OldTree:
        """One that can be removed. The files are the same, so this takes no time."""
        shutil.copytree(self.directory, directory, copy_function=os.link)
        return OldTree(directory)

    def run(self, script: str, wanted: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, Any]:
        """Let the old code make something and be killed. The answer is what the script has printed about it."""
        command = [*self.command(script, wanted)]
        done = subprocess.run(
            command,
            env={**os.environ, **environment, "PYTHONPATH": self.path},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=_RUN_S,
        )
        return self.facts(done)

    def command(self, script: str, wanted: Mapping[str, object], python: str = sys.executable) -> list[str]:
        return [python, "-P", "-W", "ignore", str(SCRIPTS / script), json.dumps(wanted)]

    def facts(self, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        """What a script has printed. It must have been killed afterwards, and have run with the old code."""
        assert done.returncode == -signal.SIGKILL, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        found: dict[str, Any] = json.loads(done.stdout)
        assert Path(found["code"]).is_relative_to(self.directory), f"{found['code']} is not the version before"
        return found

    def remove(self) -> None:
        """As an upgrade does, which replaces the files of whatever still runs."""
        shutil.rmtree(self.directory)


def unpack(directory: Path) -> OldTree:
    """Ends the test where the history does not reach so far back."""
    need("git")
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run([*git, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True, text=True)
    if known.returncode != 0:
        missing(
            f"the version before, commit {COMMIT[:12]}, is not in the history of {ROOT}: in a clone without the whole"
            f" history run 'git fetch --unshallow' ({known.stderr.strip() or 'no such commit'})"
        )
    directory.mkdir()
    archive = directory / "archive.tar"
    subprocess.run([*git, "archive", f"--output={archive}", COMMIT, *_PARTS], check=True, timeout=_BUILD_S)
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    archive.unlink()
    built = subprocess.run(
        [sys.executable, str(directory / "hatch_build.py")], capture_output=True, text=True, timeout=_BUILD_S
    )
    if built.returncode != 0:
        missing(f"the programs of the version before cannot be compiled: {built.stderr[-1000:]}")
    # Each script starts a new Python, which would compile all that it imports.
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(directory / "src")], check=True, timeout=_BUILD_S)
    return OldTree(directory)
