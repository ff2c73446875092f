"""OpenManus's own tests and its editing tool, unmodified, on our classes and a real Docker engine.

    make upstream-openmanus CHECKOUT=/path/to/OpenManus     # a clone of FoundationAgents/OpenManus, also a bare one

Only imports lead elsewhere: a package `app` made here stands in for theirs. Of the 25 tests three are left out: two
ask a 3.12 image for Python 3.10, one needs the internet. Exit code 0 if all others pass and the editor works.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST_DOCKER = ROOT / "scripts" / "test-docker"
IMAGE = "python:3.12-slim"
TESTS = ("test_client", "test_docker_terminal", "test_sandbox", "test_sandbox_manager")
LEFT_OUT = (
    "test_client.py::test_sandbox_creation",
    "test_sandbox.py::test_sandbox_python_environment",
    "test_sandbox.py::test_sandbox_network_access",
)
SHIMS = {
    "config": "from atoll.openmanus import Config, SandboxSettings, config",
    "exceptions": "from atoll.openmanus import ToolError",
    "sandbox/client": "from atoll.openmanus import *",
    "sandbox/core/exceptions": "from atoll.openmanus import SandboxError, SandboxResourceError, SandboxTimeoutError",
    "sandbox/core/manager": "from atoll.openmanus import SandboxManager",
    "sandbox/core/sandbox": "from atoll.openmanus import DockerSandbox, SandboxSettings",
    "sandbox/core/terminal": "from atoll.openmanus import AsyncDockerizedTerminal",
    "tool/__init__": "from app.tool.base import BaseTool",
    "tool/file_operators": "from atoll.openmanus import FileOperator, LocalFileOperator, PathLike, SandboxFileOperator",
    "utils/files_utils": "from atoll.openmanus import clean_path, should_exclude_file",
    "utils/logger": "import logging\nlogger = logging.getLogger('app')",
}
TOOLS = ("app/tool/base.py", "app/tool/str_replace_editor.py")
EDITING = """
import asyncio, os, sys, tempfile
from app.config import config
from app.exceptions import ToolError
from app.sandbox.client import SANDBOX_CLIENT
from app.tool.str_replace_editor import StrReplaceEditor


async def edit(folder):
    editor = StrReplaceEditor()
    path = f"{folder}/a file; touch x.txt"
    said = await editor.execute(command="create", path=path, file_text="one\\ntwo\\nthree\\n")
    assert "created successfully" in str(said), said
    assert "two" in str(await editor.execute(command="view", path=path, view_range=[2, 3]))
    await editor.execute(command="str_replace", path=path, old_str="two", new_str="2")
    await editor.execute(command="insert", path=path, insert_line=3, new_str="four")
    assert "2" in str(await editor.execute(command="view", path=path))
    await editor.execute(command="undo_edit", path=path)
    assert "four" not in str(await editor.execute(command="view", path=path))
    assert "a file" in str(await editor.execute(command="view", path=folder))
    for wrong in (
        dict(command="view", path="not/absolute"),
        dict(command="view", path=f"{folder}/missing"),
        dict(command="str_replace", path=path, old_str="nowhere", new_str=""),
        dict(command="create", path=path, file_text=""),
    ):
        try:
            await editor.execute(**wrong)
        except ToolError as error:
            assert error.message and "\\n" not in str(error.message).strip(), error.message
        else:
            raise AssertionError(wrong)


async def main():
    with tempfile.TemporaryDirectory() as folder:
        config.sandbox.use_sandbox = False
        await edit(folder)
    config.sandbox.use_sandbox = True
    await edit("/workspace")
    assert await SANDBOX_CLIENT.run_command("ls /workspace") == "a file; touch x.txt"
    await SANDBOX_CLIENT.cleanup()


asyncio.run(main())
print("the editor works, here and in a sandbox")
"""


def show(checkout: str, path: str) -> str:
    """A file of upstream, from a work tree or a bare clone."""
    return subprocess.run(
        ["git", "-C", checkout, "show", f"HEAD:{path}"], check=True, capture_output=True, text=True
    ).stdout


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    checkout = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="aom-", dir="/tmp") as folder:
        here = Path(folder)
        for name, text in SHIMS.items():
            path = here / "app" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        for name in TOOLS:
            (here / name).write_text(show(checkout, name))
        for name in TESTS:
            (here / f"{name}.py").write_text(show(checkout, f"tests/sandbox/{name}.py"))
        (here / "editing.py").write_text(EDITING)
        (here / "pytest.ini").write_text("[pytest]\n")
        # Upstream's tests look at containers through the library `docker`, which nothing else here needs.
        subprocess.run(["pip3", "install", "-q", "--target", here / "more", "docker"], check=True)
        return run(here)


def run(here: Path) -> int:
    engine = tempfile.mkdtemp(prefix="atd-", dir="/tmp")
    started = subprocess.run([TEST_DOCKER, "start", engine], check=True, capture_output=True, text=True)
    environment = {
        **os.environ,
        "DOCKER_HOST": started.stdout.strip(),
        "ATOLL_DATA_DIR": str(here / "data"),
        "ATOLL_RUN_DIR": str(here / "run"),
        "PYTHONPATH": os.pathsep.join([str(here), str(here / "more")]),
    }
    try:
        subprocess.run(["docker", "tag", "atoll-test:debian", IMAGE], check=True, env=environment)
        deselected = [f"--deselect={name}" for name in LEFT_OUT]
        tests = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(here)]
        passed = subprocess.run([*tests, *deselected, *(f"{name}.py" for name in TESTS)], cwd=here, env=environment)
        edited = subprocess.run([sys.executable, "editing.py"], cwd=here, env=environment)
        return passed.returncode or edited.returncode
    finally:
        subprocess.run([TEST_DOCKER, "stop", engine], check=True)


if __name__ == "__main__":
    sys.exit(main())
