"""What the server costs: a command over HTTP against the same command embedded, many requests at once, long lists.

`python -m benchmarks.service [--engine E]`. Everything is measured in one run, on loopback, against a real server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from atoll import AsyncSandbox
from atoll.settings import Settings

ROUNDS = 200
CONCURRENT = 500
USERS = 100


@asynccontextmanager
async def server(folder: Path, engine: str) -> AsyncIterator[tuple[str, str]]:
    environment = {
        **os.environ,
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
        text += await asyncio.to_thread(process.stdout.readline)
    found = re.search(r"ATOLL_URL=(\S+) ATOLL_API_KEY=(\S+)", text)
    assert found is not None
    try:
        yield found[1], found[2]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


class Plain:
    """HTTP with nothing around it: a general client takes longer than the server, and is not what is measured."""

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


def p50(samples: list[float]) -> float:
    return statistics.median(samples) * 1000


def p99(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)] * 1000


async def timed(work: object) -> float:
    started = time.perf_counter()
    await work  # type: ignore[misc]
    return time.perf_counter() - started


async def measure(folder: Path, engine: str, sandboxes: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    settings = Settings(folder / "here" / "data", folder / "here" / "run")
    async with server(folder, engine) as (url, key):
        limits = httpx.Limits(max_connections=CONCURRENT, max_keepalive_connections=CONCURRENT)
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            base_url=f"{url}/api/v1", headers=headers, timeout=120, limits=limits, trust_env=False
        ) as client:
            path = f"/sandboxes/{(await client.post('/sandboxes')).json()['id']}"
            async with AsyncSandbox(engine=engine, settings=settings) as here:
                async with AsyncSandbox(server=url, api_key=key, settings=settings) as far:
                    plain = await Plain.open(url, key)
                    figures |= await latency(plain, path, here, far)
                    plain.close()
            samples = await asyncio.gather(
                *(timed(client.get(path)) for _ in range(CONCURRENT)),
            )
            figures["500 at once, p50 ms"], figures["500 at once, p99 ms"] = p50(list(samples)), p99(list(samples))
            figures["500 at once, p99 / p50 (< 10)"] = p99(list(samples)) / p50(list(samples))
            figures |= await listing(client, sandboxes)
            figures |= await streaming(client, path)
            page = None
            while (page := (await client.get("/sandboxes/search")).json())["items"]:
                await asyncio.gather(*(client.delete(f"/sandboxes/{info['id']}") for info in page["items"]))
    return figures


async def latency(plain: Plain, path: str, here: AsyncSandbox, far: AsyncSandbox) -> dict[str, float]:
    embedded: list[float] = []
    http: list[float] = []
    sdk: list[float] = []
    for number in range(ROUNDS + 10):
        times = (
            await timed(here.exec(["true"])),
            await timed(plain.post(f"{path}/exec", b'{"command": ["true"]}')),
            await timed(far.exec(["true"])),
        )
        if number >= 10:
            for samples, seconds in zip((embedded, http, sdk), times, strict=True):
                samples.append(seconds)
    return {
        "exec true embedded, p50 ms": p50(embedded),
        "exec true over HTTP, p50 ms": p50(http),
        "exec true by the SDK on the server, p50 ms": p50(sdk),
        "HTTP - embedded, ms (<= 2)": p50(http) - p50(embedded),
    }


async def listing(client: httpx.AsyncClient, sandboxes: int) -> dict[str, float]:
    async def grow(count: int) -> None:
        slots = asyncio.Semaphore(8)

        async def one() -> None:
            async with slots:
                (await client.post("/sandboxes")).raise_for_status()

        await asyncio.gather(*(one() for _ in range(count)))

    async def search() -> float:
        return p50([await timed(client.get("/sandboxes/search", params={"limit": 10})) for _ in range(50)])

    await grow(9)
    few = await search()
    await grow(sandboxes - 10)
    many = await search()
    return {
        "search with 10, p50 ms": few,
        f"search with {sandboxes}, p50 ms": many,
        f"search {sandboxes} / 10 (< 3)": many / few,
    }


async def streaming(client: httpx.AsyncClient, path: str) -> dict[str, float]:
    async def follow() -> int:
        lines = 0
        body = {"command": "for i in 1 2 3 4 5; do echo $i; sleep 0.1; done"}
        async with client.stream("POST", f"{path}/exec/stream", json=body) as stream:
            async for line in stream.aiter_lines():
                lines += '"stdout"' in line
        return lines

    started = time.perf_counter()
    counts = await asyncio.gather(*(follow() for _ in range(USERS)))
    complete = sum(count >= 1 for count in counts)
    return {f"{USERS} streams at once: complete": complete, "their time, s": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service")
    parser.add_argument("--engine", default="native")
    parser.add_argument("--sandboxes", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        figures = asyncio.run(measure(Path(directory), options.engine, options.sandboxes))
    for name, value in figures.items():
        print(f"{name:45} {value:10.3f}")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / f"service-{options.engine}.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
