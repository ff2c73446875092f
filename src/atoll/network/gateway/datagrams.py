"""Carries UDP, which is closed unless a rule allows it for an address and a port. Each pair of addresses has two
sockets: one that is connected to the destination, and one that sends to the sandbox from the destination's address."""

from __future__ import annotations

import asyncio
import functools
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address

from atoll.network.gateway.member import MAX_DATAGRAM_FLOWS, Flow, Member
from atoll.network.gateway.proxy import refuse_own
from atoll.network.link import router
from atoll.network.refusals import RefusedError

_MAX_BYTES = 65_536
_IDLE_S = 60.0
_ROUNDS = 32
_MAX_REFUSING = 1000

Pair = tuple[tuple[str, int], tuple[str, int]]


class DatagramFlow(Flow):
    def __init__(self, member: Member, pair: Pair, router_fd: int, ended: Callable[[], None]) -> None:
        (source, (address, port)) = pair
        super().__init__(IPv4Address(address), port, "udp", None)
        self._loop = asyncio.get_running_loop()
        self._member, self._ended = member, ended
        refuse_own(self.address)
        self._far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._far.connect((address, port))
            self._near = router.transparent_socket(router_fd, socket.SOCK_DGRAM, (address, port))
        except BaseException:
            self._far.close()
            raise
        self._near.connect(source)
        self._loop.add_reader(self._far.fileno(), self._carry, self._far, self._near)
        self._loop.add_reader(self._near.fileno(), self._carry, self._near, self._far)
        self._busy = True
        self._timer = self._loop.call_later(_IDLE_S, self._look)
        member.flows.add(self)
        member.datagram_flows += 1

    def send(self, data: bytes) -> None:
        self._busy = True
        if self._member.share.is_open():  # otherwise the datagram is dropped
            self._member.share.count(len(data))
            with suppress(OSError):
                self._far.send(data)

    def abort(self) -> None:
        if self in self._member.flows:
            self._member.flows.discard(self)
            self._member.datagram_flows -= 1
            self._timer.cancel()
            for each in (self._far, self._near):
                self._loop.remove_reader(each.fileno())
                each.close()
            self._ended()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        self._busy = True
        with suppress(OSError):
            for _ in range(_ROUNDS):
                data = source.recv(_MAX_BYTES)
                if self._member.share.is_open():
                    self._member.share.count(len(data))
                    target.send(data)

    def _look(self) -> None:
        if not self._busy:
            self.abort()
            return
        self._busy = False
        self._timer = self._loop.call_later(_IDLE_S, self._look)


class Datagrams:
    def __init__(self, router_fd: int, listener: socket.socket, find: Callable[[str], Member | None]) -> None:
        self._router, self._listener, self._find = router_fd, listener, find
        self._flows: dict[Pair, DatagramFlow] = {}
        self._refusing: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(listener.fileno(), self._arrived)

    def _arrived(self) -> None:
        for _ in range(_ROUNDS):
            try:
                data, source, target = receive(self._listener)
            except OSError:
                return
            member = self._find(source[0])
            if member is not None and target is not None:
                self._carry(member, data, (source, target))

    def _carry(self, member: Member, data: bytes, pair: Pair) -> None:
        flow = self._flows.get(pair)
        if flow is not None:
            flow.send(data)
            return
        address, port = IPv4Address(pair[1][0]), pair[1][1]
        decision = member.by_address(address, port, "udp")
        if not decision or member.datagram_flows >= MAX_DATAGRAM_FLOWS:
            rule = decision.rule if not decision else f"more than {MAX_DATAGRAM_FLOWS} UDP flows at once"
            self._refuse(member, pair, ", ".join(member.names_of(address)), rule)
            return
        try:
            made = DatagramFlow(member, pair, self._router, functools.partial(self._forget, pair))
        except RefusedError as error:
            self._refuse(member, pair, "", error.rule)
            return
        except OSError:
            return
        self._flows[pair] = made
        made.send(data)

    def _refuse(self, member: Member, pair: Pair, name: str, rule: str) -> None:
        source, (address, port) = pair
        if len(self._refusing) < _MAX_REFUSING:
            task = asyncio.create_task(member.refuse("udp", address, port, name, rule, source))
            self._refusing.add(task)
            task.add_done_callback(self._refusing.discard)

    def _forget(self, pair: Pair) -> None:
        self._flows.pop(pair, None)


def receive(listener: socket.socket) -> tuple[bytes, tuple[str, int], tuple[str, int] | None]:
    """Return a datagram, its source, and its original destination (None if the kernel did not report it)."""
    data, extras, _, source = listener.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(16))
    target = None
    for level, kind, value in extras:
        if level == socket.SOL_IP and kind == router.IP_RECVORIGDSTADDR and len(value) >= 8:
            port, packed = struct.unpack_from("!xxH4s", value)
            target = (str(IPv4Address(packed)), port)
    return data, (source[0], source[1]), target
