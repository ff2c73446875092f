"""What the server costs: a command over HTTP compared with the same command embedded, many requests at once, long
lists, and many users who read. Everything is measured in one run, on loopback, with a real server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from atoll import AsyncSandbox
from atoll.engines import leases
from atoll.settings import Settings
from benchmarks.measure import Figure, Samples, take_turns

ROUNDS = 300
CONCURRENT = 500
FEW, MANY = 10, 1000
USERS = 100
ALLOWED_S = 0.002
COUNT = "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.1; done"
COUNTED = "".join(f"{number}\n" for number in range(1, 11))


async def measure(folder: Path, engine: str) -> AsyncIterator[Figure]:
    settings = Settings(folder / "here" / "data", folder / "here" / "run")
    async with server(folder, engine) as (url, key):
        limits = httpx.Limits(max_connections=CONCURRENT, max_keepalive_connections=CONCURRENT)
        async with httpx.AsyncClient(
            base_url=f"{url}/api/v1", headers=bearer(key), timeout=120, limits=limits, trust_env=False
        ) as client:
            path = f"/sandboxes/{(await client.post('/sandboxes')).json()['id']}"
            yield await latency(url, key, path, engine, settings)
            await leases.close_all()
            yield await crowd(client, path)
            yield await streaming(client, url)
            yield await listing(client)
            while (page := (await client.get("/sandboxes/search")).json())["items"]:
                await asyncio.gather(*(client.delete(f"/sandboxes/{info['id']}") for info in page["items"]))


async def latency(url: str, key: str, path: str, engine: str, settings: Settings) -> Figure:
    plain = await Plain.open(url, key)
    async with (
        AsyncSandbox(engine=engine, settings=settings) as here,
        AsyncSandbox(server=url, api_key=key, settings=settings) as far,
    ):

        async def embedded() -> None:
            assert (await here.exec(["true"])).success

        async def http() -> None:
            await plain.post(f"{path}/exec", b'{"command": ["true"]}')

        async def sdk() -> None:
            assert (await far.exec(["true"])).success

        found = await take_turns({"embedded": embedded, "http": http, "sdk": sdk}, ROUNDS, 10)
    plain.close()
    detail = {f"{name} p50 ms": samples.p50 * 1e3 for name, samples in found.items()}
    allowed = (found["embedded"].p50 + ALLOWED_S) * 1e3
    ours = found["http"].p50 * 1e3
    return Figure("service: exec true over HTTP, p50", ours, allowed, "ms", "embedded + 2 ms", 1.0, detail=detail)


async def crowd(client: httpx.AsyncClient, path: str) -> Figure:
    async def timed() -> float:
        started = time.perf_counter()
        (await client.get(path)).raise_for_status()
        return time.perf_counter() - started

    found = Samples(tuple(await asyncio.gather(*(timed() for _ in range(CONCURRENT)))))
    return Figure(
        f"service: {CONCURRENT} requests at once, p99", found.p99 * 1e3, found.p50 * 1e3, "ms", "their p50", 10.0
    )


async def streaming(client: httpx.AsyncClient, url: str) -> Figure:
    """Measure users who each read a stream of their own sandbox for a second. One alone takes as long as the peer."""

    async def user(name: str) -> tuple[str, dict[str, str]]:
        (await client.post("/users", json={"id": name})).raise_for_status()
        scopes = ["read", "use", "manage"]
        made = await client.post("/keys", json={"user_id": name, "scopes": scopes})
        headers = bearer(made.json()["key"])
        sandbox = (await client.post("/sandboxes", headers=headers)).raise_for_status()
        return f"/sandboxes/{sandbox.json()['id']}", headers

    async def follow(path: str, headers: dict[str, str]) -> float:
        started, text = time.perf_counter(), ""
        async with client.stream("POST", f"{path}/exec/stream", json={"command": COUNT}, headers=headers) as stream:
            async for line in stream.aiter_lines():
                if '"type":"stdout"' in line:
                    text += line.partition('"data":"')[2].partition('"')[0].replace("\\n", "\n")
        assert text == COUNTED, text
        return time.perf_counter() - started

    users = await gather_few([user(f"user-{number}") for number in range(USERS)])
    alone = await follow(*users[0])
    together = Samples(tuple(await asyncio.gather(*(follow(*each) for each in users))))
    await gather_few([client.delete(path, headers=headers) for path, headers in users])
    detail = {"slowest s": max(together.seconds)}
    name = f"service: {USERS} users streaming at once, p50"
    return Figure(name, together.p50, alone, "s", "one alone", 5.0, detail=detail)


async def listing(client: httpx.AsyncClient) -> Figure:
    async def grow(count: int) -> None:
        await gather_few([client.post("/sandboxes") for _ in range(count)])

    async def search() -> Samples:
        async def once() -> None:
            (await client.get("/sandboxes/search", params={"limit": 10})).raise_for_status()

        return (await take_turns({"search": once}, 50))["search"]

    await grow(FEW - 1)
    few = await search()
    await grow(MANY - FEW)
    many = await search()
    name = f"service: search among {MANY} sandboxes, p50"
    return Figure(name, many.p50 * 1e3, few.p50 * 1e3, "ms", f"among {FEW}", 3.0)


# --- the server, and a client that costs nothing ----------------------------------------------------------------------


@asynccontextmanager
async def server(folder: Path, engine: str) -> AsyncIterator[tuple[str, str]]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")},
        "ATOLL_DATA_DIR": str(folder / "data"),
        "ATOLL_RUN_DIR": str(folder / "run"),
        "ATOLL_STATE_DIR": str(folder / "state"),
        "ATOLL_MAX_NUM_SANDBOXES": "2000",
    }
    command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", "serve", "--engine", engine, "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert process.stdout is not None
    text = ""
    while "export" not in text:
        line = await asyncio.to_thread(process.stdout.readline)
        assert line, "the server did not start"
        text += line
    found = re.search(r"ATOLL_URL=(\S+) ATOLL_API_KEY=(\S+)", text)
    assert found is not None
    try:
        yield found[1], found[2]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


class Plain:
    """Plain HTTP: a general client takes longer than the server, and is not what is measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self._reader = reader
        self._writer = writer
        self._key = key

    @classmethod
    async def open(cls, url: str, key: str) -> Plain:
        address = urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port), key)

    async def post(self, path: str, body: bytes) -> bytes:
        head = f"POST /api/v1{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        found = re.search(rb"content-length: (\d+)", answer)
        assert found is not None
        assert b" 200 " in answer.partition(b"\r\n")[0]
        return await self._reader.readexactly(int(found[1]))

    def close(self) -> None:
        self._writer.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def gather_few(work: list[Any], at_once: int = 8) -> list[Any]:
    slots = asyncio.Semaphore(at_once)

    async def one(part: Any) -> Any:
        async with slots:
            return await part

    return list(await asyncio.gather(*(one(part) for part in work)))
