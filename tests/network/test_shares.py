"""Bandwidth: each sandbox has a limit, and none takes what is another's."""

from __future__ import annotations

import asyncio
import json
import os
import socket

from atoll import Sandbox
from atoll.network.gateway.bandwidth_share import BandwidthShare
from atoll.network.gateway.relay import Pump
from needs import missing, not_applicable
from network import world
from network.conftest import Kind, Make

DOWNLOAD = """
import json, socket, time
def fetch(count):
    with socket.create_connection(("{web}", {port}), 30) as s:
        s.sendall(b"GET /bytes/%d HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n" % count)
        left, buffer = count, bytearray(1 << 20)
        while left > 0:
            got = s.recv_into(buffer)
            if not got: raise SystemExit("cut short")
            left -= got
def send(count):
    with socket.create_connection(("{web}", {port}), 30) as s:
        s.sendall(b"POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nContent-Length: %d\\r\\n\\r\\n" % count + b"x" * count)
        s.recv(100)
began = time.perf_counter()
{what}
print(json.dumps(time.perf_counter() - began))
"""


def seconds(sandbox: Sandbox, what: str, port: int = 80) -> float:
    program = DOWNLOAD.format(web=world.WEB, what=what, port=port)
    found = sandbox.exec(["python3", "-c", program], timeout=50)
    assert found.success, found.stderr
    return float(json.loads(found.stdout))


RULES = {"allowed_domains": ["allowed.test"], "rules": [{"cidr": f"{world.WEB}/32", "port": 8080}]}


def test_a_policy_can_limit_the_bandwidth(make: Make, kind: Kind) -> None:
    """Compared with a neighbour that has no such limit; by name and by address, both ways."""
    if kind["engine"] != "native":
        not_applicable("decided by the gateway alone: the same for every engine")
    limited, free = make(kind, {**RULES, "bytes_per_s": 1_000_000}), make(kind, RULES)
    for what, port in (("fetch(3_000_000)", 80), ("fetch(3_000_000)", 8080), ("send(3_000_000)", 80)):
        slow, fast = seconds(limited, what, port), seconds(free, what, port)
        assert slow > 2 * fast, (what, port, slow, fast)
    limited.set_network(RULES)
    assert seconds(limited, "fetch(3_000_000)") < slow, "without the limit it is as fast as others"


def full(size: int) -> tuple[socket.socket, socket.socket]:
    """A connection that so much is waiting on, and one that takes all of it at once."""
    ends = []
    for _ in range(2):
        one, other = socket.socketpair()
        for each in (one, other):
            each.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 4 * size)
            each.setblocking(False)
        ends.append((one, other))
    (source, writer), (target, sink) = ends
    data = memoryview(bytes(size))
    while data:
        data = data[writer.send(data[: 64 * 1024]) :]
    kept.extend((writer, sink))
    return source, target


SO_SNDBUFFORCE = 32
kept: list[socket.socket] = []


async def test_many_connections_get_no_more_than_one() -> None:
    """One sandbox with fifty that all have something to pass on, and beside it one with a single one."""
    if os.geteuid() != 0:
        missing("only root can have buffers so large")
    greedy, modest = Counted(1e12), Counted(1e12)
    pairs = [(full(1 << 20), greedy) for _ in range(50)] + [(full(8 << 20), modest)]
    pumps = [Pump(source, target, share, lambda _: None) for (source, target), share in pairs]
    for _ in range(6):
        await asyncio.sleep(0)
    for pump in pumps:
        pump.stop()
    for (source, target), _ in pairs:
        source.close()
        target.close()
    for each in kept:
        each.close()
    assert modest.total >= 2 << 20
    assert modest.total > 0.2 * greedy.total, (modest.total, greedy.total)


class Counted(BandwidthShare):
    total = 0

    def count(self, size: int) -> None:
        self.total += size
        super().count(size)


async def test_a_share_is_one_of_turns_and_of_a_rate() -> None:
    share = BandwidthShare(1_000_000)
    assert share.is_open()
    share.count(5 << 20)
    assert not share.is_open()
    assert share.pause_s() > 4, "five seconds' worth was taken at once"
    share = BandwidthShare(1e12)
    share.count(3 << 20)
    assert share.is_open()
    share.count(1 << 20)
    assert not share.is_open()
    assert share.pause_s() == 0, "it is only a matter of turns"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert share.is_open()
    share.limit(1024)
    share.count(1 << 30)
    assert share.pause_s() > 1000
