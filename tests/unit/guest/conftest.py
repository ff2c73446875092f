"""A scripted agent for what only a hostile one would do, and the real one for everything else."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll import agent_binary
from atoll.errors import EngineUnavailableError
from atoll.guest import Guest
from needs import missing
from unit.guest.scripted import Script, ScriptedAgent

Scripted = Callable[..., ScriptedAgent]


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    """`scripted(script, ...)` makes an agent that plays these scripts, one for each connection."""
    agents: list[ScriptedAgent] = []

    def make(*scripts: Script) -> ScriptedAgent:
        agents.append(ScriptedAgent(*scripts))
        return agents[-1]

    yield make
    for agent in agents:
        await agent.finish()


@dataclass(frozen=True)
class RealAgent:
    """The agent as a plain process of the host, in a directory of its own."""

    root: Path
    address: str
    pid: int

    async def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        return sock


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RealAgent]:
    try:
        binary = agent_binary.path()
    except EngineUnavailableError as error:
        missing(str(error))
    root = tmp_path / "root"
    root.mkdir()
    address = str(tmp_path / "agent")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        process = start_agent(binary, listener, root)
    try:
        yield RealAgent(root, address, process.pid)
    finally:
        process.kill()
        process.wait()


def start_agent(binary: Path, listener: socket.socket, root: Path) -> subprocess.Popen[bytes]:
    """A shell moves the socket to descriptor 3, where the agent expects it."""
    command = f'exec "$0" --listen-fd 3 --work-dir "$1" 3<&{listener.fileno()}'
    return subprocess.Popen(
        ["bash", "-c", command, str(binary), str(root)], pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL
    )


@pytest.fixture
async def guest(agent: RealAgent) -> AsyncIterator[Guest]:
    guest = Guest(agent.connect)
    yield guest
    await guest.aclose()
