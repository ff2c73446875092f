"""Connections that a sandbox has to the outside, from the kernel's own tables. Written inside, so read as hostile."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.guest.guest import Guest

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
DEVICES = "/proc/net/dev"
MAX_TABLE_BYTES = 4 << 20
_LINE = re.compile(r"\s*\d+: [0-9A-F]+:[0-9A-F]{4} ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4}) 01 ")


_LISTENS = re.compile(r"\s*\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A ")
_DEVICE = re.compile(r"\s*([^\s:]{1,64}):((?:\s*\d{1,20}){9,})\s*")
_SENT = 8
"""The column of the bytes that a device has sent."""


async def table(guest: Guest, path: str, length: int = MAX_TABLE_BYTES) -> str:
    """One of the tables as it is now, at most so many bytes of it; empty where there is none."""
    try:
        return (await guest.files.read(path, length=length)).decode(errors="replace")
    except OSError:
        return ""


def listening(table: str) -> set[int]:
    """The TCP ports that something listens on."""
    found = (_LISTENS.match(line) for line in table.splitlines())
    return {int(match[1], 16) for match in found if match is not None}


def sent_bytes(table: str) -> int:
    """How much went out over all devices but the loopback."""
    found = (_DEVICE.fullmatch(line) for line in table.splitlines())
    return sum(int(match[2].split()[_SENT]) for match in found if match is not None and match[1] != "lo")


def established(table: str) -> list[str]:
    """The far ends, as ADDRESS:PORT, of TCP connections that leave the sandbox."""
    found = []
    for line in table.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        words = [int(match[1][start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(match[1]), 8)]
        address = ipaddress.ip_address(b"".join(words))
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if not address.is_loopback:
            shown = f"[{address}]" if address.version == 6 else str(address)
            found.append(f"{shown}:{int(match[2], 16)}")
    return found
