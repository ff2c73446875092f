"""Recognizes the first bytes of a connection, and parses a TLS client hello. Pure; the bytes may be hostile."""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAX_HELLO = 64 * 1024
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D
_OLD_ENCRYPTED_NAMES = (0xFFCE, 0xFF02, 0xFF03, 0xFE08, 0xFE09, 0xFE0A, 0xFE0B, 0xFE0C)
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PRI")


class BadHelloError(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class Hello:
    server_name: str | None
    encrypted: bool
    """Whether the hello contains an encrypted one, which may name another server."""


def looks_like_tls(start: bytes) -> bool:
    return start[:1] == b"\x16" and (len(start) < 2 or start[1:2] == b"\x03")


def looks_like_http(start: bytes) -> bool:
    """Return whether the bytes may be the start of an HTTP request: a word in capitals followed by a space."""
    word, space, _ = start[:20].partition(b" ")
    return word.isalpha() and word.isupper() and (bool(space) or len(start) < 20)


def read_hello(data: bytes) -> Hello | None:
    """Parse a client hello, which may be split into any number of records. Returns None if more bytes are needed, and
    raises BadHelloError for anything else."""
    message = bytearray()
    at = 0
    while True:
        if len(data) - at < 5:
            return None
        kind, major, _, length = struct.unpack_from("!BBBH", data, at)
        if kind != _HANDSHAKE or major != 3 or not 0 < length <= 16_640:
            raise BadHelloError("it is not a TLS handshake")
        message += data[at + 5 : at + 5 + length]
        at += 5 + length
        if len(message) >= 4:
            if message[0] != _CLIENT_HELLO:
                raise BadHelloError("it is not a TLS hello")
            wanted = 4 + int.from_bytes(message[1:4], "big")
            if wanted > MAX_HELLO:
                raise BadHelloError("the TLS hello is too long")
            if len(message) >= wanted:
                if len(message) != wanted:
                    raise BadHelloError("something follows the TLS hello")
                return _parsed(bytes(message[4:]))
        if at > len(data):
            return None


def _parsed(body: bytes) -> Hello:
    try:
        at = 2 + 32
        at += 1 + body[at]
        at += 2 + int.from_bytes(body[at : at + 2], "big")
        at += 1 + body[at]
        if at == len(body):
            return Hello(None, False)
        end = at + 2 + int.from_bytes(body[at : at + 2], "big")
        if end != len(body):
            raise BadHelloError("the TLS hello is malformed")
        return _extensions(body[at + 2 : end])
    except IndexError:
        raise BadHelloError("the TLS hello is malformed") from None


def _extensions(data: bytes) -> Hello:
    name: str | None = None
    encrypted = False
    seen = set()
    at = 0
    while at < len(data):
        if at + 4 > len(data):
            raise BadHelloError("the TLS hello is malformed")
        kind, length = struct.unpack_from("!HH", data, at)
        value = data[at + 4 : at + 4 + length]
        if len(value) != length or kind in seen:
            raise BadHelloError("the TLS hello is malformed")
        seen.add(kind)
        if kind == _SERVER_NAME:
            name = _server_name(value)
        encrypted = encrypted or kind == _ENCRYPTED_HELLO or kind in _OLD_ENCRYPTED_NAMES
        at += 4 + length
    return Hello(name, encrypted)


def _server_name(value: bytes) -> str:
    """Return the server name. Raises BadHelloError unless there is exactly one and nothing else."""
    if len(value) < 5 or int.from_bytes(value[:2], "big") != len(value) - 2 or value[2] != 0:
        raise BadHelloError("the server name is malformed")
    if int.from_bytes(value[3:5], "big") != len(value) - 5:
        raise BadHelloError("the server name is malformed")
    try:
        return value[5:].decode("ascii")
    except UnicodeDecodeError:
        raise BadHelloError("the server name is malformed") from None


def alert(description: int = 49) -> bytes:
    """Return a fatal TLS alert. 49 is `access_denied`."""
    return bytes((21, 3, 3, 0, 2, 2, description))
