"""A program as it is written for OpenManus: nothing but its imports is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from docker.private_engine import DEBIAN, docker

PROGRAM = """
import asyncio
from app.config import SandboxSettings
from app.sandbox.client import SANDBOX_CLIENT, create_sandbox_client
from app.sandbox.core.exceptions import SandboxTimeoutError
from app.sandbox.core.sandbox import DockerSandbox
from app.sandbox.core.terminal import AsyncDockerizedTerminal


async def main():
    config = SandboxSettings(image="IMAGE", work_dir="/workspace", memory_limit="256m", cpu_limit=0.5, timeout=30)
    async with DockerSandbox(config=config) as sandbox:
        print(await sandbox.run_command("python3 -c 'print(6 * 7)'"))
        try:
            await sandbox.run_command("sleep 60", timeout=1)
        except SandboxTimeoutError:
            print("too slow")
        await asyncio.gather(*(sandbox.write_file(f"part/{n}.txt", str(n)) for n in range(3)))
        print(await sandbox.run_command("cat part/*.txt"))
        try:
            await sandbox.read_file("missing.txt")
        except FileNotFoundError as error:
            print(error)
        async with AsyncDockerizedTerminal(sandbox.container.id, env_vars={"NAME": "term"}) as terminal:
            print(await terminal.run_command("echo $NAME"))

    client = create_sandbox_client()
    await client.create(config=config)
    try:
        await client.write_file("note.txt", "by a client")
        print(await client.read_file("note.txt"))
    finally:
        await client.cleanup()
    await SANDBOX_CLIENT.cleanup()


asyncio.run(main())
"""
MODULES = ("app.config", "app.sandbox.client", "app.sandbox.core.exceptions", "app.sandbox.core.sandbox")


def test_it_runs_after_its_imports_were_changed(tmp_path: Path) -> None:
    text = PROGRAM.replace("IMAGE", DEBIAN)
    for module in (*MODULES, "app.sandbox.core.terminal"):
        text = text.replace(f"from {module} import", "from atoll.openmanus import")
    path = tmp_path / "program.py"
    path.write_text(text)
    before = docker("ps", "-aq", "--filter", "label=atoll.sandbox_id")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.stderr == ""
    assert done.stdout == "42\ntoo slow\n012\nFile not found: missing.txt\nterm\nby a client\n"
    assert docker("ps", "-aq", "--filter", "label=atoll.sandbox_id") == before


EXAMPLE = Path(__file__).parents[2] / "examples" / "openmanus_program.py"


def test_the_example_runs() -> None:
    before = docker("ps", "-aq", "--filter", "label=atoll.sandbox_id")
    command = [sys.executable, str(EXAMPLE), DEBIAN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        *("0", "1", "4"),
        "too slow, and the shell goes on: yes",
        "terminal",
        "client",
        "(3, '2\\n', 'oh\\n')",
        *("sandbox", "sandbox"),
    ]
    assert docker("ps", "-aq", "--filter", "label=atoll.sandbox_id") == before
