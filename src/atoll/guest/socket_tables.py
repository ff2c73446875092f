"""Sockets inside a sandbox, from the kernel's tables: what listens, in which process, and what leads to the outside.

The agent reads the tables inside the sandbox, so they are parsed as hostile input.

The kernel's tables list the sockets; `/proc/PID/fd` shows which process holds them. If the agent may not see the
descriptors of a process, because it belongs to another user, the port is reported without a pid.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import SandboxResourceError
from atoll.model import ListeningPort
from atoll.printable import printable

if TYPE_CHECKING:
    from atoll.guest.guest import Guest

TCP_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
DEVICE_TABLE = "/proc/net/dev"
MAX_TABLE_BYTES = 4 << 20
_ESTABLISHED = re.compile(r"\s*\d+: [0-9A-F]+:[0-9A-F]{4} ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4}) 01 ")
_LISTENS = re.compile(r"\s*\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A ")
_DEVICE = re.compile(r"\s*([^\s:]{1,64}):((?:\s*\d{1,20}){9,})\s*")
_SENT = 8
"""The column of the bytes that a device has sent."""
MAX_PORTS = 1_000
"""The maximum number of listening sockets that are reported."""
_TABLE_BYTES = 512 << 10
"""This much of a table is enough, because the kernel lists listening sockets before all others."""
_MAX_ENTRIES = 20_000
_MAX_PROCESSES = 512
_MAX_DESCRIPTORS = 4_096
_MAX_DESCRIPTORS_OF_ALL = 50_000
_AT_ONCE = 8
_MAX_NAME = 64
_ROW = re.compile(
    r"\s*\d+: ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A (?:\S+ +){5}(\d{1,20})(?: |$)"
)
_PID = re.compile(r"[1-9][0-9]{0,9}")
_SOCKET = re.compile(r"socket:\[(\d{1,20})\]")


@dataclass(frozen=True, slots=True)
class _Socket:
    address: str
    port: int
    inode: str


async def listening_ports(
    guest: Guest, *, wanted: frozenset[int] | None = None, table_bytes: int = _TABLE_BYTES
) -> list[ListeningPort]:
    """Return the listening ports, sorted. `wanted` limits the answer, and the search for processes, to these ports."""
    rows: list[_Socket] = []
    for path in TCP_TABLES:
        rows += parse(await read_table(guest, path, table_bytes))
    sockets = [each for each in rows if wanted is None or each.port in wanted][:MAX_PORTS]
    pids = await _holders(guest, {each.inode for each in sockets}) if sockets else {}
    names = {pid: await _name(guest, pid) for pid in set(pids.values())}
    found = {
        (each.port, each.address): ListeningPort(
            each.port, each.address, pids.get(each.inode), names.get(pids.get(each.inode, 0))
        )
        for each in sockets
    }
    return [found[key] for key in sorted(found)]


def parse(table: str) -> list[_Socket]:
    """Return the listening sockets of one of the kernel's tables."""
    found: list[_Socket] = []
    for line in table.splitlines():
        match = _ROW.match(line)
        if match is not None and len(found) < MAX_PORTS:
            found.append(_Socket(str(_address(match[1])), int(match[2], 16), match[3]))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    words = [int(text[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


async def _holders(guest: Guest, inodes: set[str]) -> dict[str, int]:
    """Return the process that holds each of these sockets, if the agent can see it."""
    try:
        entries = await guest.files.list("/proc", _MAX_ENTRIES)
    except (OSError, SandboxResourceError):
        return {}
    pids = sorted(int(entry.path) for entry in entries if _PID.fullmatch(entry.path))
    found: dict[str, int] = {}
    seen = 0
    for start in range(0, min(len(pids), _MAX_PROCESSES), _AT_ONCE):
        some = pids[start : start + _AT_ONCE]
        for pid, held in zip(some, await asyncio.gather(*(_sockets(guest, pid) for pid in some)), strict=True):
            seen += len(held)
            for inode in inodes.intersection(held):
                found.setdefault(inode, pid)
        if len(found) == len(inodes) or seen > _MAX_DESCRIPTORS_OF_ALL:
            break
    return found


async def _sockets(guest: Guest, pid: int) -> list[str]:
    """Return one text for each descriptor of a process: the inode of a socket, or "" for anything else."""
    try:
        entries = await guest.files.list(f"/proc/{pid}/fd", _MAX_DESCRIPTORS)
    except (OSError, SandboxResourceError):
        return []  # the process has ended, belongs to another user, or has too many descriptors
    matches = (_SOCKET.fullmatch(entry.target or "") for entry in entries)
    return [match[1] if match is not None else "" for match in matches]


async def _name(guest: Guest, pid: int) -> str | None:
    try:
        data = await guest.files.read(f"/proc/{pid}/comm", length=_MAX_NAME)
    except OSError:
        return None
    return printable(data) or None


async def read_table(guest: Guest, path: str, length: int = MAX_TABLE_BYTES) -> str:
    """Return one of the tables as it is now, at most `length` bytes of it; empty if the sandbox has no such table."""
    try:
        return (await guest.files.read(path, length=length)).decode(errors="replace")
    except OSError:
        return ""


def listening(table: str) -> set[int]:
    """Return the TCP ports that something listens on."""
    found = (_LISTENS.match(line) for line in table.splitlines())
    return {int(match[1], 16) for match in found if match is not None}


def sent_bytes(table: str) -> int:
    """Return the number of bytes sent over all devices except the loopback."""
    found = (_DEVICE.fullmatch(line) for line in table.splitlines())
    return sum(int(match[2].split()[_SENT]) for match in found if match is not None and match[1] != "lo")


def established(table: str) -> list[str]:
    """Return the far ends, as ADDRESS:PORT, of the TCP connections that leave the sandbox."""
    found = []
    for line in table.splitlines():
        match = _ESTABLISHED.match(line)
        if match is None:
            continue
        address = _address(match[1])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if not address.is_loopback:
            shown = f"[{address}]" if address.version == 6 else str(address)
            found.append(f"{shown}:{int(match[2], 16)}")
    return found
