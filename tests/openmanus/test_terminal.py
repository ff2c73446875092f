"""A terminal in containers that Atoll did not make."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from atoll.engines.docker.connect.agent_streams import Streams
from atoll.errors import SandboxGoneError, SandboxNotFoundError, SandboxTimeoutError
from atoll.openmanus import AsyncDockerizedTerminal, OperationError
from docker.private_engine import BUSYBOX, DEBIAN, STATIC, docker


@dataclass
class SomeContainer:
    id: str


def traces(container: str) -> str:
    return docker(
        "exec", container, "sh", "-c", "ls -a / | grep atoll; ls /proc/*/exe -l 2>/dev/null | grep atoll; true"
    )


@pytest.fixture(params=[DEBIAN, pytest.param(BUSYBOX, marks=pytest.mark.again)])
def container(request: pytest.FixtureRequest) -> Iterator[str]:
    """A container of somebody else, with its own first process and a user without rights."""
    found = docker("run", "-d", "--network", "none", request.param, "sleep", "10000")
    yield found
    assert traces(found) == ""
    docker("rm", "-f", found)


@pytest.mark.parametrize("direct", [True, False])
async def test_commands_run_in_any_container(container: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.setattr(Streams, "reaches", lambda *_: False)
    terminal = AsyncDockerizedTerminal(container, working_dir="/some where/new", env_vars={"A": "b c"})
    with pytest.raises(RuntimeError, match="Terminal not initialized"):
        await terminal.run_command("true")
    await terminal.init()
    try:
        assert terminal.session is not None
        assert terminal.container.id == container
        assert await terminal.run_command('pwd; echo "$A"; id -u') == "/some where/new\nb c\n0"
        await terminal.run_command("x=kept")
        assert await terminal.run_command("echo $x; echo 42") == "kept\n42"
        with pytest.raises(SandboxTimeoutError):
            await terminal.run_command("sleep 100", timeout=0.3)
        assert await terminal.run_command("echo $x") == "kept"
    finally:
        await terminal.close()
        await terminal.close()
    assert terminal.session is not None


async def test_an_object_with_an_id_or_a_name_will_do(container: str) -> None:
    name = docker("inspect", "-f", "{{.Name}}", container).lstrip("/")
    for given in (SomeContainer(container), name, container[:12]):
        async with AsyncDockerizedTerminal(given) as terminal:
            assert terminal.container.id == container
            assert await terminal.run_command("pwd") == "/workspace"


async def test_its_rights_are_those_of_the_container(container: str) -> None:
    own = docker("exec", container, "cat", "/proc/1/status")
    async with AsyncDockerizedTerminal(container) as terminal:
        seen = await terminal.run_command("cat /proc/self/status")
    for name in ("CapBnd", "CapEff"):
        assert [line for line in seen.splitlines() if name in line] == [
            line for line in own.splitlines() if name in line
        ]


def test_it_serves_one_event_loop_after_another(container: str) -> None:
    terminal = AsyncDockerizedTerminal(container)

    async def first() -> None:
        await terminal.init()
        await terminal.run_command("x=kept")

    async def second() -> str:
        return await terminal.run_command("echo $x")

    asyncio.run(first())
    assert asyncio.run(second()) == "kept"
    asyncio.run(terminal.close())


def test_when_our_process_dies_nothing_of_it_stays_in_the_container(container: str) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from atoll.openmanus import AsyncDockerizedTerminal\n"
        "async def main():\n"
        "    terminal = AsyncDockerizedTerminal(sys.argv[1])\n"
        "    await terminal.init()\n"
        "    print(await terminal.run_command('echo up'), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, container], capture_output=True, text=True, timeout=60)
    assert done.stdout == "up\n", done.stderr
    for _ in range(200):
        if traces(container) == "":
            return
    pytest.fail(traces(container))


async def test_a_user_without_rights_is_kept() -> None:
    container = docker("run", "-d", "--network", "none", "--user", "65534:65534", DEBIAN, "sleep", "10000")
    try:
        async with AsyncDockerizedTerminal(container, "/tmp") as terminal:
            assert await terminal.run_command("id -u") == "65534"
        with pytest.raises(OperationError, match="cannot make or enter the directory '/workspace'"):
            await AsyncDockerizedTerminal(container).init()
    finally:
        docker("rm", "-f", container)


async def test_what_cannot_be_entered_is_told() -> None:
    stopped = docker("create", BUSYBOX, "true")
    bare = docker("create", STATIC, "/hello")
    frozen = docker("run", "-d", "--network", "none", "--read-only", BUSYBOX, "sleep", "10000")
    try:
        for given, cause in (("no-such-container", SandboxNotFoundError), (stopped, SandboxGoneError)):
            with pytest.raises(RuntimeError, match="Failed to create session") as caught:
                await AsyncDockerizedTerminal(given).init()
            assert isinstance(caught.value.__cause__, cause)
        with pytest.raises(RuntimeError, match="Failed to create session"):
            await AsyncDockerizedTerminal(bare).init()
        with pytest.raises(RuntimeError, match="read-only"):
            await AsyncDockerizedTerminal(frozen).init()
    finally:
        docker("rm", "-f", stopped, bare, frozen)


async def test_a_container_that_ends_is_told() -> None:
    container = docker("run", "-d", "--network", "none", BUSYBOX, "sleep", "10000")
    terminal = AsyncDockerizedTerminal(container)
    await terminal.init()
    docker("rm", "-f", container)
    async with asyncio.timeout(30):
        with pytest.raises(OperationError, match="ended"):
            await terminal.run_command("true")
        await terminal.close()
