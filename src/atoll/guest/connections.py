"""Connections that a sandbox has to the outside, from the kernel's own tables. Written inside, so read as hostile."""

from __future__ import annotations

import ipaddress
import re

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LONGEST = 4 << 20
_LINE = re.compile(r"\s*\d+: [0-9A-F]+:[0-9A-F]{4} ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4}) 01 ")


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
