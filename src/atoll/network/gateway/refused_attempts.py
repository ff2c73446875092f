"""Handles connections that the gate refused, of which the kernel sends copies of the first packet. Each one is written
to the network log and answered with a TCP reset, so that `connect()` fails at once with the usual error."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address

from atoll.network.gateway.member import Member
from atoll.network.link import netlink, router
from atoll.network.link.nfnetlink import PacketLog

_MAX_HEADERS_BYTES = 96
_ROUNDS = 32
_MAX_AT_ONCE = 1000
_TCP = 6
_RESET_ACK = 0x14


@dataclass(frozen=True, slots=True)
class ConnectionAttempt:
    """The first packet of a connection."""

    source: tuple[str, int]
    address: IPv4Address
    port: int
    expected: int
    """The acknowledgement number that a reset needs to be accepted by the sandbox's kernel."""

    def reset(self) -> bytes:
        ours, theirs = self.address.packed, IPv4Address(self.source[0]).packed
        header = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40, 0, 0x4000, 64, _TCP, 0, ours, theirs)
        fields = (self.port, self.source[1], 0, self.expected, 5 << 4, _RESET_ACK, 0)
        segment = struct.pack("!HHIIBBHHH", *fields, 0, 0)
        total = _checksum(ours + theirs + struct.pack("!BBH", 0, _TCP, len(segment)) + segment)
        return header + struct.pack("!HHIIBBHHH", *fields, total, 0)


def read_attempt(packet: bytes) -> ConnectionAttempt | None:
    """Parse a packet from a sandbox, which may be hostile. Returns None if it is not the start of a TCP connection."""
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[9] != _TCP:
        return None
    start = (packet[0] & 15) * 4
    if start < 20 or len(packet) < start + 20:
        return None
    (length,) = struct.unpack_from("!H", packet, 2)
    source, target, number = struct.unpack_from("!HHI", packet, start)
    data = max(0, length - start - (packet[start + 12] >> 4) * 4)
    return ConnectionAttempt(
        (str(IPv4Address(packet[12:16])), source), IPv4Address(packet[16:20]), target, (number + 1 + data) & 0xFFFFFFFF
    )


class RefusedAttempts:
    def __init__(self, router_fd: int, find: Callable[[str], Member | None]) -> None:
        self._find = find
        self._answering: set[asyncio.Task[None]] = set()
        with netlink.inside(router_fd):
            self._log = PacketLog(router.REFUSED_GROUP, _MAX_HEADERS_BYTES)
            self._speaker = socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW)
        self._speaker.setblocking(False)
        asyncio.get_running_loop().add_reader(self._log.fileno(), self._arrived)

    def _arrived(self) -> None:
        for _ in range(_ROUNDS):
            try:
                packets = self._log.read()
            except OSError:  # none left, or some were lost; the sandbox repeats lost ones
                return
            for packet in packets:
                if (attempt := read_attempt(packet)) is not None:
                    self._refuse(attempt)

    def _refuse(self, attempt: ConnectionAttempt) -> None:
        member = self._find(attempt.source[0])
        if member is None or len(self._answering) >= _MAX_AT_ONCE:
            self._reset(attempt)
            return
        task = asyncio.create_task(self._answer(member, attempt))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, member: Member, attempt: ConnectionAttempt) -> None:
        decision = member.by_address(attempt.address, attempt.port, "tcp")
        if decision or member.evaluator.reads_names(attempt.port):
            return  # the policy has just changed; the repeated packet will pass
        names = ", ".join(member.names_of(attempt.address))
        # Find the process before the reset: the kernel knows it only while the connection is being attempted.
        await member.refuse("tcp", attempt.address, attempt.port, names, decision.rule, attempt.source)
        self._reset(attempt)

    def _reset(self, attempt: ConnectionAttempt) -> None:
        with suppress(OSError):
            self._speaker.sendto(attempt.reset(), (attempt.source[0], 0))


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
