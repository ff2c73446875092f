"""Talks to the kernel's packet filter directly: sets which chain applies to a sandbox's connections, and receives those
that were refused. Starting `nft` for each sandbox would take longer than making the rest of its link."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from ipaddress import IPv4Address

_NETFILTER = 12
_REQUEST, _ACK, _CREATE = 1, 4, 0x400
_INET = 1
_TABLES, _ULOG = 10, 4
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_ELEMENT, _DELETE_ELEMENT = _TABLES << 8 | 12, _TABLES << 8 | 14
_LOG_CONFIG, _LOG_PACKET = _ULOG << 8 | 1, _ULOG << 8
_NESTED = 0x8000
_JUMP = -3
_BIND, _COPY_PACKET, _PAYLOAD = 1, 2, 9
_BUFFER = 1 << 20
_HEADER = struct.Struct("=IHHII")


class VerdictMap:
    """A map from addresses to chains, in a table of the network namespace in which it was opened."""

    def __init__(self, table: str, name: str) -> None:
        self._table, self._name = table, name
        self._socket = _opened()
        self._socket.settimeout(5)
        self._number = 0

    def close(self) -> None:
        self._socket.close()

    def put(self, address: IPv4Address, chain: str, *, replace: bool) -> None:
        """Map an address to a chain. Replacing an existing entry is atomic too."""
        removal = [(_DELETE_ELEMENT, self._elements(address, None))] if replace else []
        self._change([*removal, (_NEW_ELEMENT, self._elements(address, chain))])

    def remove(self, address: IPv4Address) -> None:
        """Remove an address. May be repeated."""
        with suppress(FileNotFoundError):
            self._change([(_DELETE_ELEMENT, self._elements(address, None))])

    def _elements(self, address: IPv4Address, chain: str | None) -> bytes:
        element = _nested(1, _attribute(1, address.packed))
        if chain is not None:
            verdict = _attribute(1, struct.pack("!i", _JUMP)) + _attribute(2, _text(chain))
            element += _nested(2, _nested(2, verdict))
        names = _attribute(1, _text(self._table)) + _attribute(2, _text(self._name))
        return names + _nested(3, _nested(1, element))

    def _change(self, requests: list[tuple[int, bytes]]) -> None:
        first = self._number + 1
        batch = self._message(_BATCH_BEGIN, _REQUEST, 0, _TABLES, b"")
        for kind, body in requests:
            batch += self._message(kind, _REQUEST | _ACK | _CREATE, _INET, 0, body)
        batch += self._message(_BATCH_END, _REQUEST, 0, _TABLES, b"")
        self._socket.send(batch)
        waiting = set(range(first + 1, first + 1 + len(requests)))
        while waiting:
            for _, number, body in _messages(self._socket.recv(65_536)):
                (error,) = struct.unpack_from("=i", body)
                if first <= number <= self._number and error:
                    raise OSError(-error, os.strerror(-error), "a map of the packet filter")
                waiting.discard(number)

    def _message(self, kind: int, flags: int, family: int, resource: int, body: bytes) -> bytes:
        self._number += 1
        return _message(kind, flags, self._number, family, resource, body)


class PacketLog:
    """Receives copies of the packets that rules log to a group, in the network namespace in which it was opened."""

    def __init__(self, group: int, length: int) -> None:
        self._socket = _opened()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            mode = struct.pack("!IBx", length, _COPY_PACKET)
            at_once = _attribute(5, struct.pack("!I", 1))
            for number, body in enumerate((_attribute(1, bytes((_BIND,))), _attribute(2, mode) + at_once), 1):
                self._socket.send(_message(_LOG_CONFIG, _REQUEST | _ACK, number, 0, group, body))
                for _, _, answer in _messages(self._socket.recv(65_536)):
                    (error,) = struct.unpack_from("=i", answer)
                    if error:
                        raise OSError(-error, os.strerror(-error), "the log of the packet filter")
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def read(self) -> list[bytes]:
        """Return the beginnings of some packets. Raises BlockingIOError if there are none, and another OSError if some
        were lost."""
        found = []
        for kind, _, body in _messages(self._socket.recv(65_536)):
            if kind == _LOG_PACKET:
                found += [value for name, value in _attributes(body[4:]) if name == _PAYLOAD]
        return found


def _opened() -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER)
    made.bind((0, 0))
    return made


def _message(kind: int, flags: int, number: int, family: int, resource: int, body: bytes) -> bytes:
    content = struct.pack("!BBH", family, 0, resource) + body
    return _HEADER.pack(_HEADER.size + len(content), kind, flags, number, 0) + content


def _messages(data: bytes) -> list[tuple[int, int, bytes]]:
    """Return the kind, number and content of each message."""
    found, at = [], 0
    while at + _HEADER.size <= len(data):
        length, kind, _, number, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            break
        found.append((kind, number, data[at + _HEADER.size : at + length]))
        at += (length + 3) & ~3
    return found


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            break
        found.append((kind & 0x3FFF, data[at + 4 : at + length]))
        at += (length + 3) & ~3
    return found


def _text(name: str) -> bytes:
    return name.encode() + b"\0"


def _nested(kind: int, value: bytes) -> bytes:
    return _attribute(kind | _NESTED, value)


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + b"\0" * (-length % 4)
