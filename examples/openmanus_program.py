"""A program written for OpenManus's `app.sandbox`, with changed imports and nothing else changed.

    python examples/openmanus_program.py [IMAGE]

It needs a Docker engine (DOCKER_HOST, or the one on this machine). The image must contain a shell and Python.
"""

import asyncio
import sys

# from app.config import SandboxSettings
# from app.sandbox.client import SANDBOX_CLIENT, create_sandbox_client
# from app.sandbox.core.exceptions import SandboxTimeoutError
# from app.sandbox.core.manager import SandboxManager
# from app.sandbox.core.sandbox import DockerSandbox
# from app.sandbox.core.terminal import AsyncDockerizedTerminal
# from app.tool.file_operators import SandboxFileOperator
from atoll import (
    SANDBOX_CLIENT,
    AsyncDockerizedTerminal,
    DockerSandbox,
    SandboxFileOperator,
    SandboxSettings,
    SandboxTimeoutError,
    create_sandbox_client,
)
from atoll.openmanus import SandboxManager

SCRIPT = """
for number in range(3):
    print(number * number)
"""


async def one_sandbox(config: SandboxSettings) -> None:
    async with DockerSandbox(config=config) as sandbox:
        await sandbox.write_file("/workspace/squares.py", SCRIPT)
        print(await sandbox.run_command("python3 squares.py"))
        try:
            await sandbox.run_command("sleep 60", timeout=1)
        except SandboxTimeoutError:
            print("too slow, and the shell goes on:", await sandbox.run_command("echo yes"))
        assert sandbox.container is not None
        async with AsyncDockerizedTerminal(sandbox.container.id, env_vars={"NAME": "terminal"}) as terminal:
            print(await terminal.run_command("echo $NAME"))


async def a_client(config: SandboxSettings) -> None:
    client = create_sandbox_client()
    await client.create(config=config)
    try:
        print(await client.run_command("echo client"))
    finally:
        await client.cleanup()


async def a_tool(config: SandboxSettings) -> None:
    operator = SandboxFileOperator(config)
    await operator.write_file("notes.txt", "one\ntwo\n")
    print(await operator.run_command("wc -l <notes.txt; echo oh >&2; exit 3"))
    await SANDBOX_CLIENT.cleanup()  # each OpenManus agent does this when it ends


async def many_sandboxes(config: SandboxSettings) -> None:
    async with SandboxManager(max_sandboxes=3, idle_timeout=300) as manager:
        ids = await asyncio.gather(*(manager.create_sandbox(config) for _ in range(2)))
        for sandbox_id in ids:
            sandbox = await manager.get_sandbox(sandbox_id)
            print(await sandbox.run_command("hostname"))


async def main() -> None:
    image = sys.argv[1] if len(sys.argv) > 1 else "python:3.12-slim"
    config = SandboxSettings(image=image, work_dir="/workspace", memory_limit="256m", cpu_limit=0.5, timeout=30)
    await one_sandbox(config)
    await a_client(config)
    await a_tool(config)
    await many_sandboxes(config)


asyncio.run(main())
