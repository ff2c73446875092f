"""What a network policy costs: creating a sandbox, a download, a request; and many sandboxes at once.

The peer of the last two is the same program at the other end of a plain veth pair.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from atoll import AsyncSandbox
from atoll.engines import registry
from atoll.engines.contract import Engine, GarbageCollecting
from atoll.model import SandboxSpec
from atoll.network import client
from atoll.settings import Settings
from benchmarks.measure import Figure, take_turns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from network import world
from network.internet import Internet, offline_internet

CREATES = 60
DOWNLOAD_BYTES = 1_000_000_000
DOWNLOADS = 5
REQUESTS = 300
MANY = 200
CHANGES = 20
NAMES = {"allowed_domains": ["allowed.test"]}

DOWNLOAD = f"""
import socket, time
s = socket.create_connection(("{world.WEB}", 80))
s.sendall(b"GET /bytes/{DOWNLOAD_BYTES} HTTP/1.1\\r\\nHost: allowed.test\\r\\nConnection: close\\r\\n\\r\\n")
buffer, left, began = bytearray(1 << 20), {DOWNLOAD_BYTES}, time.perf_counter()
while left > 0:
    got = s.recv_into(buffer)
    if not got: raise SystemExit("cut short")
    left -= got
print(time.perf_counter() - began)
"""
ASK = f"""
import json, socket, time
s = socket.create_connection(("{world.WEB}", 80)); s.setsockopt(6, 1, 1)
took = []
for i in range({REQUESTS}):
    began = time.perf_counter()
    s.sendall(b"GET /bytes/10 HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n")
    got = b""
    while not got.endswith(b"x" * 10): got += s.recv(4096)
    took.append(time.perf_counter() - began)
print(json.dumps(took))
"""
HELD = f"""
import socket, time
s = socket.create_connection(("{world.WEB}", 80))
s.sendall(b"GET /slow HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n")
s.recv(1)
open("open", "w").write("1")
try:
    while s.recv(65536): pass
except OSError: pass
while True:
    try:
        s = socket.create_connection(("{world.WEB}", 80), 5)
        s.sendall(b"GET /bytes/1 HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n")
        if not s.recv(100).startswith(b"HTTP/1.1 200"): break
    except OSError: break
print(time.time())
"""


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    del engine
    if (reason := client.problem()) is not None:
        print(f"  network: {reason}")
        return
    settings = Settings(directory / "data", directory / "run")
    with offline_internet(directory / "net", capture=False) as internet:
        os.environ.update(internet.environment())
        found = registry.get("native", settings)
        try:
            async for figure in _figures(found, settings, internet):
                yield figure
        finally:
            for handle in await found.list():
                await found.delete(handle)
            assert isinstance(found, GarbageCollecting)
            await found.gc()
            await found.aclose()
            for name in internet.environment():
                del os.environ[name]


async def _figures(engine: Engine, settings: Settings, internet: Internet) -> AsyncIterator[Figure]:
    number = iter(range(1 << 30))

    def creating(spec: SandboxSpec):  # type: ignore[no-untyped-def]
        async def once() -> float:
            began = time.perf_counter()
            handle = await engine.create(f"b{next(number)}", spec)
            took = time.perf_counter() - began
            await engine.delete(handle)
            return took

        return once

    async with AsyncSandbox(engine=engine, settings=settings, network=NAMES) as sandbox:
        made = await take_turns(
            {"plain": creating(SandboxSpec()), "policy": creating(SandboxSpec.of(network=NAMES))}, CREATES
        )
        yield Figure("network: create with a policy, p50", made["policy"].p50 * 1e3, made["plain"].p50 * 1e3, "ms",
                     "create without", at_most=1.3)  # fmt: skip

        async def through() -> float:
            done = await sandbox.exec(["python3", "-c", DOWNLOAD], timeout=60)
            return float(done.stdout)

        async def plain() -> float:
            return float(_plain(internet, DOWNLOAD))

        rates = await take_turns({"plain": plain, "gateway": through}, DOWNLOADS, warm_up=1)
        gigabytes = DOWNLOAD_BYTES / 1e9
        yield Figure("network: download by name", gigabytes / rates["gateway"].p50, gigabytes / rates["plain"].p50,
                     "GB/s", "plain veth", at_least=0.5)  # fmt: skip
        asked = json.loads((await sandbox.exec(["python3", "-c", ASK], timeout=60)).stdout)
        directly = json.loads(_plain(internet, ASK))
        extra = statistics.median(asked) - statistics.median(directly)
        yield Figure("network: a request takes longer by, p50", extra * 1e3, 1.0, "ms", "1 ms", at_most=1.0,
                     detail={"direct_ms": statistics.median(directly) * 1e3})  # fmt: skip
        ends = sorted([await _changed(sandbox) for _ in range(CHANGES)])
        yield Figure("network: a change ends what it forbids, p50", statistics.median(ends) * 1e3, 1000.0, "ms", "1 s",
                     at_most=1.0, detail={"slowest_ms": ends[-1] * 1e3})  # fmt: skip
    yield await _many(engine, settings)


async def _changed(sandbox: AsyncSandbox) -> float:
    """Measure the time from the call to the end of a connection, and to the first refusal."""
    await sandbox.set_network(NAMES)
    await sandbox.exec("rm -f open")
    command = await sandbox.start(["python3", "-c", HELD])
    await sandbox.exec("until test -s open; do sleep 0.01; done", timeout=30)
    began = time.time()
    await sandbox.set_network("none")
    return float((await command.wait()).stdout) - began


async def _many(engine: Engine, settings: Settings) -> Figure:
    turns = asyncio.Semaphore(8)
    sandboxes = [AsyncSandbox(engine=engine, settings=settings, network=NAMES) for _ in range(MANY)]

    async def make(sandbox: AsyncSandbox) -> None:
        async with turns:
            await sandbox.create()

    async def ask(sandbox: AsyncSandbox) -> int:
        async with turns:
            done = await sandbox.exec(
                "curl -sS -m 20 http://allowed.test/; curl -sS -m 20 http://evil.test/", timeout=60
            )
        return int('"at": "WEB"' in done.stdout and "resolve" in done.stderr)

    try:
        await asyncio.gather(*(make(each) for each in sandboxes))
        worked = sum(await asyncio.gather(*(ask(each) for each in sandboxes)))
    finally:
        for each in sandboxes:
            await each.cleanup()
    return Figure("network: sandboxes with policies at once", worked, MANY, "of them", "asked for", at_least=1.0)


def _plain(internet: Internet, program: str) -> str:
    command = ["nsenter", f"--net={internet.uplink}", "/usr/bin/python3", "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
