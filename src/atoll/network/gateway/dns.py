"""Parses DNS messages from sandboxes and servers, both of which may be hostile, and writes new ones.

No part of a message is ever passed on. Questions are made from a name that was checked, and answers from addresses that
were checked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from atoll.model.addresses import Address

A, CNAME, AAAA, OPT, HTTPS = 1, 5, 28, 41, 65
_IN = 1
NOERROR, FORMERR, SERVFAIL, NXDOMAIN, REFUSED = 0, 1, 2, 3, 5
_HEAD = 12
_LONGEST = 4096
_LONGEST_NAME = 255
"""With a byte for the length of each label, also of the empty one at the end."""
_LONGEST_TTL = 0x7FFF_FFFF
_MAX_RECORDS = 64
_MAX_POINTERS = 32


class BadMessageError(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class Question:
    number: int
    name: str
    kind: int
    recursion: bool
    raw: bytes
    """The original question, with its upper and lower case, to be repeated in the answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    addresses: tuple[Address, ...] = ()
    ttl: int = 0
    truncated: bool = False


def read_question(message: bytes) -> Question:
    if not _HEAD < len(message) <= _LONGEST:
        raise BadMessageError("its length")
    number, flags, questions, answers, _, _ = struct.unpack_from("!6H", message)
    if flags & 0xF800 or questions != 1 or answers:
        raise BadMessageError("it is no plain question")
    name, at = _name(message, _HEAD)
    if at + 4 > len(message):
        raise BadMessageError("it is cut short")
    kind, family = struct.unpack_from("!HH", message, at)
    if family != _IN:
        raise BadMessageError("its class")
    return Question(number, name, kind, bool(flags & 0x100), message[_HEAD : at + 4])


def write_answer(question: Question, answer: Answer) -> bytes:
    flags = 0x8080 | (0x100 if question.recursion else 0) | answer.code
    found = answer.addresses[:_MAX_RECORDS]
    head = struct.pack("!6H", question.number, flags, 1, len(found), 0, 0)
    records = b"".join(
        struct.pack("!HHHIH", 0xC00C, A if each.version == 4 else AAAA, _IN, answer.ttl, len(each.packed)) + each.packed
        for each in found
    )
    return head + question.raw + records


def write_question(number: int, name: str, kind: int) -> bytes:
    labels = b"".join(bytes((len(label),)) + label.encode("ascii") for label in name.split("."))
    return struct.pack("!6H", number, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, _IN)


def read_answer(message: bytes, number: int, name: str, kind: int) -> Answer:
    """Return the addresses of a name from a server's answer, following the aliases in it. Raises BadMessageError if it
    is not an answer to the question."""
    if len(message) < _HEAD:
        raise BadMessageError("its length")
    found, flags, questions, answers, _, _ = struct.unpack_from("!6H", message)
    if found != number or flags & 0xF800 != 0x8000 or questions != 1:
        raise BadMessageError("it answers something else")
    asked, at = _name(message, _HEAD)
    if at + 4 > len(message):
        raise BadMessageError("it is cut short")
    if asked != name or struct.unpack_from("!HH", message, at) != (kind, _IN):
        raise BadMessageError("it answers something else")
    if flags & 0x200:
        return Answer(NOERROR, truncated=True)
    code = flags & 0xF
    if code:
        return Answer(code)
    return Answer(NOERROR, *_addresses(message, at + 4, answers, name, kind))


def _addresses(message: bytes, at: int, count: int, name: str, kind: int) -> tuple[tuple[Address, ...], int]:
    aliases, addresses, ttls = {name}, [], []
    for _ in range(min(count, _MAX_RECORDS)):
        owner, at = _name(message, at)
        if at + 10 > len(message):
            raise BadMessageError("it is cut short")
        found, family, ttl, length = struct.unpack_from("!HHIH", message, at)
        at += 10
        data = message[at : at + length]
        if len(data) != length:
            raise BadMessageError("it is cut short")
        if family == _IN and owner in aliases:
            if found == CNAME:
                alias, after = _name(message, at)
                if after != at + length:
                    raise BadMessageError("an alias is of another length than its record")
                aliases.add(alias)
            elif found == kind and length == (4 if kind == A else 16):
                addresses.append(IPv4Address(data) if kind == A else IPv6Address(data))
                ttls.append(ttl if ttl <= _LONGEST_TTL else 0)  # longer ones are an error that means 0 (RFC 2181)
        at += length
    return tuple(dict.fromkeys(addresses)), min(ttls, default=0)


def _name(message: bytes, at: int) -> tuple[str, int]:
    """Return the name at a position, in lower case, and the position after it. Bytes other than ASCII are kept as
    Latin-1 characters, so that such a name matches no normalized name."""
    labels: list[str] = []
    start, limit = at, len(message)
    end, jumps, total = -1, 0, 0
    while True:
        if at >= limit:
            raise BadMessageError("a name is cut short")
        length = message[at]
        if length & 0xC0 == 0xC0:
            end = at + 2 if end < 0 else end
            to = (length & 0x3F) << 8 | message[at + 1] if at + 1 < limit else 0
            # A pointer leads back, to something that ends before this part of the name. The header belongs to no name.
            if not _HEAD <= to < start or jumps >= _MAX_POINTERS:
                raise BadMessageError("a pointer leads to no name")
            start, limit, at, jumps = to, start, to, jumps + 1
            continue
        if length & 0xC0:
            raise BadMessageError("a label is of an unknown kind")
        at += 1
        label = message[at : min(at + length, limit)]
        total += length + 1
        if len(label) != length or total > _LONGEST_NAME:
            raise BadMessageError("a name is too long")
        if not length:
            break
        # A dot inside a label must not look like one between labels.
        text = label.decode("latin-1").lower()
        labels.append(text.replace(".", "\0"))
        at += length
    return ".".join(labels), at if end < 0 else end
