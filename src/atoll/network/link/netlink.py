"""Makes links, addresses and routes with netlink requests to the kernel. Starting `ip` five times would take longer
than making a sandbox."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_NEWLINK, _DELLINK, _GETLINK, _NEWADDR, _NEWROUTE = 16, 17, 18, 20, 24
_REQUEST, _ACK, _EXCL, _CREATE = 1, 4, 0x200, 0x400
_ERROR = 2
_UP = 1
_NETLINK_ROUTE = 0
_IFNAME, _MTU, _LINKINFO, _NET_NS_FD = 3, 4, 18, 28
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_LOCAL, _ADDRESS = 2, 1
_DST, _OIF, _GATEWAY, _PRIORITY = 1, 4, 5, 6
_UNICAST_ROUTE, _LOCAL_ROUTE = 1, 2
_MAIN_TABLE, _BOOT_PROTOCOL, _GLOBAL_SCOPE, _HOST_SCOPE = 254, 3, 0, 254


def setns(fd: int) -> None:
    """Move this thread to a network namespace. Its new sockets then belong to that namespace."""
    if _libc.setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")


def new_network() -> int:
    """Make a new, empty network namespace and return its descriptor. This thread stays in its own namespace."""
    with _here_afterwards():
        if _libc.unshare(_CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "unshare")
        return own_network()


def own_network() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def inside(fd: int) -> Iterator[None]:
    """Move this thread to a network namespace for the duration of a block, which must not contain an `await`."""
    with _here_afterwards():
        setns(fd)
        yield


@contextmanager
def _here_afterwards() -> Iterator[None]:
    here = own_network()
    try:
        yield
    finally:
        setns(here)
        os.close(here)


class Links:
    """A netlink connection for the links of the network namespace in which it was opened."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._socket.settimeout(5)
        self._number = 0

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make_pair(self, name: str, peer: str, peer_network: int, mtu: int) -> None:
        """Make a veth pair with one end in this network namespace and the other in `peer_network`. Both ends are down
        and have no address."""
        there = _interface(0) + _attribute(_IFNAME, _text(peer)) + _attribute(_MTU, struct.pack("=I", mtu))
        there += _attribute(_NET_NS_FD, struct.pack("=I", peer_network))
        kind = _attribute(_INFO_KIND, b"veth") + _attribute(_INFO_DATA, _attribute(_VETH_PEER, there))
        here = _attribute(_IFNAME, _text(name)) + _attribute(_MTU, struct.pack("=I", mtu))
        self._ask(_NEWLINK, _interface(0) + here + _attribute(_LINKINFO, kind), _CREATE | _EXCL)

    def up(self, index: int) -> None:
        self._ask(_NEWLINK, _interface(index, _UP, _UP))

    def delete(self, name: str) -> None:
        self._ask(_DELLINK, _interface(0) + _attribute(_IFNAME, _text(name)))

    def add_address(self, index: int, address: IPv4Address, prefix: int) -> None:
        body = struct.pack("=BBBBI", socket.AF_INET, prefix, 0, _GLOBAL_SCOPE, index)
        body += _attribute(_LOCAL, address.packed) + _attribute(_ADDRESS, address.packed)
        self._ask(_NEWADDR, body, _CREATE | _EXCL)

    def add_default_route(self, index: int, gateway: IPv4Address) -> None:
        body = _route(_UNICAST_ROUTE, _GLOBAL_SCOPE) + _attribute(_GATEWAY, gateway.packed)
        self._ask(_NEWROUTE, body + _attribute(_OIF, struct.pack("=I", index)), _CREATE | _EXCL)

    def receive_everything(self, index: int) -> None:
        """Treat every address that no link has as one of this namespace's own, so that no packet is ever forwarded."""
        body = _route(_LOCAL_ROUTE, _HOST_SCOPE) + _attribute(_OIF, struct.pack("=I", index))
        self._ask(_NEWROUTE, body, _CREATE)

    def _ask(self, kind: int, body: bytes, flags: int = 0) -> None:
        self._number += 1
        length = 16 + len(body)
        self._socket.send(struct.pack("=IHHII", length, kind, _REQUEST | _ACK | flags, self._number, 0) + body)
        while True:
            answer = self._socket.recv(65_536)
            _, found, _, number, _ = struct.unpack_from("=IHHII", answer)
            if number == self._number and found == _ERROR:
                break
        (error,) = struct.unpack_from("=i", answer, 16)
        if error:
            raise OSError(-error, os.strerror(-error), f"netlink request {kind}")


def _interface(index: int, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, change)


def _route(kind: int, scope: int) -> bytes:
    return struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, _MAIN_TABLE, _BOOT_PROTOCOL, scope, kind, 0)


def _text(name: str) -> bytes:
    return name.encode() + b"\0"


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + b"\0" * (-length % 4)
