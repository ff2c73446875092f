"""The server is killed and started again while a client reads: the stream goes on without a gap."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll import AsyncSandbox
from atoll.settings import Settings
from server.running import start_server


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_stream_goes_on_after_the_server_was_killed(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    need_engine("bubblewrap", session_settings)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    folder = session_folder / "restart"
    server = await asyncio.to_thread(start_server, folder, "process", port)
    async with AsyncSandbox(server=server.url, api_key=server.key, settings=session_settings) as sandbox:
        command = await sandbox.start("for i in $(seq 200); do echo line $i; sleep 0.05; done")
        text = b""
        async for piece in command:
            text += piece.data
            if b"line 5\n" in text and server.process.poll() is None and b"line 40\n" not in text:
                server.stop(signal.SIGKILL)
                server.close()
                starting = asyncio.create_task(asyncio.to_thread(start_server, folder, "process", port))
        server = await starting
        assert text.decode().split("\n")[:-1] == [f"line {number}" for number in range(1, 201)]
        assert (await command.wait()).exit_code == 0
    assert server.stop() == 0
    server.close()
