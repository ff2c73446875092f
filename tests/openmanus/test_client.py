from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import BaseModel

from atoll.openmanus import (
    SANDBOX_CLIENT,
    BaseSandboxClient,
    FileOperator,
    LocalSandboxClient,
    SandboxFileOperator,
    SandboxSettings,
    ToolError,
    create_sandbox_client,
)
from docker.private_engine import docker


def containers() -> int:
    return len(docker("ps", "-aq", "--filter", "label=atoll.sandbox_id").split())


async def test_a_client_does_what_its_sandbox_does(config: SandboxSettings, tmp_path: Path) -> None:
    client = create_sandbox_client()
    assert isinstance(client, BaseSandboxClient)
    await client.cleanup()
    for attempt in (client.run_command("true"), client.read_file("x"), client.write_file("x", "")):
        with pytest.raises(RuntimeError, match="Sandbox not initialized"):
            await attempt
    await client.create(config)
    await client.write_file("file", "text")
    assert await client.run_command("cat file", 10) == "text"
    assert await client.read_file("file") == "text"
    await client.copy_from("file", str(tmp_path / "out"))
    await client.copy_to(str(tmp_path / "out"), "in")
    assert await client.read_file("in") == "text"
    await client.cleanup()
    assert client.sandbox is None
    await client.cleanup()


async def test_creating_again_does_not_leak_the_first(config: SandboxSettings) -> None:
    before = containers()
    async with LocalSandboxClient() as client:
        await client.create(config)
        await client.create(config)
        assert containers() == before + 1
    assert containers() == before


async def test_an_agent_that_ends_takes_nothing_from_another(config: SandboxSettings) -> None:
    """Each ends with `SANDBOX_CLIENT.cleanup()`, whether it has used the sandbox or not."""
    first_is_done = asyncio.Event()

    async def first() -> None:
        await SANDBOX_CLIENT.create(config)
        started.set()
        await SANDBOX_CLIENT.run_command("echo one")
        await both.wait()
        await SANDBOX_CLIENT.cleanup()
        first_is_done.set()

    async def second() -> str:
        await started.wait()
        await SANDBOX_CLIENT.run_command("x=mine")
        both.set()
        await first_is_done.wait()
        text = await SANDBOX_CLIENT.run_command("echo $x")
        await SANDBOX_CLIENT.cleanup()
        return text

    async def idler() -> None:
        await started.wait()
        await SANDBOX_CLIENT.cleanup()

    started, both = asyncio.Event(), asyncio.Event()
    before = containers()
    _, text, _ = await asyncio.gather(first(), second(), idler())
    assert text == "mine"
    assert SANDBOX_CLIENT.sandbox is None
    assert containers() == before


async def test_the_file_operator_tells_the_truth(config: SandboxSettings) -> None:
    async with LocalSandboxClient() as client:
        operator = SandboxFileOperator(config, client)
        assert isinstance(operator, FileOperator)
        await operator.write_file("a dir/x; y", "text")
        assert client.sandbox is not None
        assert client.sandbox.config == config
        assert await operator.read_file(Path("a dir/x; y")) == "text"
        assert await operator.exists("a dir/x; y")
        assert await operator.is_directory("a dir")
        assert not await operator.is_directory("a dir/x; y")
        assert not await operator.exists("a dir; touch injected")
        assert not await operator.exists("injected")
        assert await operator.run_command("echo out; echo err >&2; exit 5") == (5, "out\n", "err\n")
        with pytest.raises(TimeoutError, match=r"timed out after 0\.3 seconds in sandbox"):
            await operator.run_command("sleep 100", timeout=0.3)
        with pytest.raises(ToolError, match="Failed to read missing in sandbox") as caught:
            await operator.read_file("missing")
        assert caught.value.message.startswith("Failed to read")
        with pytest.raises(ToolError, match="Failed to write to"):
            await operator.write_file("/proc/version", "x")


def test_a_copy_of_a_tool_has_the_same_shared_client() -> None:
    class Tool(BaseModel):
        _operator: SandboxFileOperator = SandboxFileOperator()

    assert Tool()._operator.sandbox_client is SANDBOX_CLIENT
