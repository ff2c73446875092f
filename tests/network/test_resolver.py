"""What the resolver makes of the answers of servers that fail, or that answer with anything at all."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.model import SandboxSpec
from atoll.network.gateway import dns
from atoll.network.gateway.member import Member
from atoll.network.gateway.resolver import LookupFailedError, Resolver
from atoll.network.refusals import RefusalLog, read_refusals

Answering = Callable[[bytes], bytes]
NAME = "allowed.test"


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self._transport.sendto(self._answering(data), address)  # type: ignore[attr-defined]

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()


@asynccontextmanager
async def server(datagram: Answering, stream: Answering) -> AsyncIterator[tuple[str, int]]:
    """A DNS server that answers the bytes of a question with any bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        answer = stream(await reader.readexactly(length))
        writer.write(struct.pack("!H", len(answer)) + answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    where = listening.sockets[0].getsockname()[:2]
    loop = asyncio.get_running_loop()
    transport, datagrams = await loop.create_datagram_endpoint(lambda: _Datagrams(datagram), where)
    try:
        async with listening:
            yield where
    finally:
        transport.close()
        await datagrams.closed.wait()


def answered(question: bytes, flags: int, *addresses: str) -> bytes:
    records = b"".join(
        struct.pack("!HHHIH", 0xC00C, dns.A, 1, 60, 4) + socket.inet_aton(address) for address in addresses
    )
    return question[:2] + struct.pack("!5H", 0x8180 | flags, 1, len(addresses), 0, 0) + question[12:] + records


@pytest.fixture
def member(tmp_path: Path) -> Member:
    policy = SandboxSpec.of(network={"allowed_domains": [NAME]}).network
    return Member("one", 1, policy, RefusalLog(tmp_path / "log"))


@pytest.mark.parametrize("code", [dns.NXDOMAIN, dns.SERVFAIL])
async def test_a_name_that_cannot_be_resolved_fails_every_time(member: Member, tmp_path: Path, code: int) -> None:
    asked = []

    def fail(question: bytes) -> bytes:
        asked.append(question)
        return answered(question, code)

    async with server(fail, fail) as where:
        resolver = Resolver([where])
        question = dns.write_question(7, NAME, dns.A)
        for _ in range(3):
            answer = await resolver.answer(member, question)
            assert answer is not None
            assert dns.read_answer(answer, 7, NAME, dns.A) == dns.Answer(code)
            with pytest.raises(LookupFailedError):
                await resolver.allowed(member, NAME, 443)
    assert len(asked) < 6, "the control: the failure was remembered"
    assert read_refusals(tmp_path / "log") == []


async def test_an_answer_by_tcp_that_is_cut_short_is_none(member: Member) -> None:
    """At every length. The next server is asked."""
    question = dns.write_question(7, NAME, dns.A)
    whole = len(answered(question, 0, "203.0.113.66"))

    def truncated(question: bytes) -> bytes:
        return answered(question, 0x200)

    async with server(lambda question: answered(question, 0, "203.0.113.10"), truncated) as good:
        for length in range(whole):

            def cut(question: bytes, length: int = length) -> bytes:
                return answered(question, 0, "203.0.113.66")[:length]

            async with server(truncated, cut) as bad:
                answer = await Resolver([bad, good]).answer(member, question)
            assert answer is not None
            found = dns.read_answer(answer, 7, NAME, dns.A)
            assert [str(each) for each in found.addresses] == ["203.0.113.10"]
