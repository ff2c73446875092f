"""A hundred users who read at once: each gets all of their own, and nothing of anybody else's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from server.conftest import new_user
from server.running import running_server

USERS = 100
LINES = 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("server")
async def test_a_hundred_users_stream_at_once(session_folder: Path) -> None:
    with running_server(session_folder / "crowd", ATOLL_MAX_NUM_SANDBOXES=str(USERS)) as server:
        with server.client() as admin:
            people = [new_user(admin, f"user-{number}") for number in range(USERS)]
        limits = httpx.Limits(max_connections=2 * USERS)
        async with httpx.AsyncClient(base_url=f"{server.url}/api/v1", timeout=120, limits=limits) as client:
            slots = asyncio.Semaphore(8)
            everybody_reads = asyncio.Barrier(USERS)

            async def follow(number: int) -> str:
                headers = {"Authorization": f"Bearer {people[number].key}"}
                async with slots:
                    made = await client.post("/sandboxes", headers=headers)
                path = f"/sandboxes/{made.json()['id']}/exec/stream"
                command = f"read go; for i in $(seq {LINES}); do echo {number}:$i; sleep 0.05; done"
                body = {"command": command, "stdin": True}
                text, began = "", False
                async with client.stream("POST", path, json=body, headers=headers) as stream:
                    async for line in stream.aiter_lines():
                        event = json.loads(line)
                        if not began:  # all have begun before the first of them writes
                            began = True
                            await everybody_reads.wait()
                            stdin = path.replace("exec/stream", f"commands/{event['command_id']}/stdin")
                            assert (await client.post(stdin, content=b"go\n", headers=headers)).status_code == 204
                        if event["type"] == "stdout":
                            text += event["data"]
                        assert event["type"] != "error", event
                return text

            found = await asyncio.gather(*(follow(number) for number in range(USERS)))
        assert found == ["".join(f"{number}:{i}\n" for i in range(1, LINES + 1)) for number in range(USERS)]
