"""Finds the process that a refused connection came from, as far as the host can see it.

The kernel knows which socket in the sandbox's network namespace has the address, and `/proc` shows which process holds
the socket. Lookups run in a thread, their rate is limited, and so is the number of entries they look at, because a
sandbox decides how many there are. The processes of a sandbox with a kernel of its own cannot be seen.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path

from atoll.printable import printable

_MAX_LOOKUP_S = 1.0
_MAX_PROCESSES = 50_000
_MAX_DESCRIPTORS = 20_000
_MAX_TABLE = 4 << 20


class Owners:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "owners")
        self._busy = 0

    async def find(self, network: int, kind: str, source: tuple[str, int]) -> str:
        """Return the process that uses an address in a network namespace, as `name[pid]` with the id that it has inside
        the sandbox. `kind` is tcp or udp. The result is empty if the process is not found in time."""
        if not network or self._busy >= 4:
            return ""
        loop = asyncio.get_running_loop()
        self._busy += 1
        work = loop.run_in_executor(self._thread, owner, network, kind, source)
        work.add_done_callback(self._done)
        with suppress(TimeoutError, OSError):
            return await asyncio.wait_for(asyncio.shield(work), _MAX_LOOKUP_S)
        return ""

    def _done(self, work: asyncio.Future[str]) -> None:
        self._busy -= 1
        if not work.cancelled():
            work.exception()


def owner(network: int, kind: str, source: tuple[str, int]) -> str:
    deadline = time.monotonic() + _MAX_LOOKUP_S
    pids = list(_processes(network))
    inode = _inode(pids[0], kind, source) if pids else None
    if inode is None:
        return ""
    wanted, left = f"socket:[{inode}]", _MAX_DESCRIPTORS
    for pid in reversed(pids):  # the newest process is the most likely one
        with suppress(OSError):
            for fd in os.scandir(f"/proc/{pid}/fd"):
                left -= 1
                with suppress(OSError):
                    if os.readlink(fd.path) == wanted:
                        return _name(pid)
        if left <= 0 or time.monotonic() > deadline:
            break
    return ""


def _processes(network: int) -> Iterator[int]:
    """Yield the host's ids of all processes in this network namespace."""
    wanted = f"net:[{network}]"
    for count, entry in enumerate(os.scandir("/proc")):
        if count > _MAX_PROCESSES:
            return
        if entry.name.isdecimal():
            with suppress(OSError):
                if os.readlink(f"/proc/{entry.name}/ns/net") == wanted:
                    yield int(entry.name)


def _inode(pid: int, kind: str, source: tuple[str, int]) -> int | None:
    """Return the inode number of the socket with this address. The kernel's tables show addresses in host byte
    order."""
    ours = f"{int.from_bytes(IPv4Address(source[0]).packed, 'little'):08X}:{source[1]:04X}"
    anywhere = f"00000000:{source[1]:04X}"
    mapped = f"0000000000000000FFFF0000{ours}"
    nowhere = f"{'0' * 32}:{source[1]:04X}"
    for table in (kind, f"{kind}6"):
        with suppress(OSError), open(f"/proc/{pid}/net/{table}") as lines:
            for line in lines.read(_MAX_TABLE).splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[1] in (ours, mapped, anywhere, nowhere) and fields[9] != "0":
                    return int(fields[9])
    return None


def _name(pid: int) -> str:
    place = Path(f"/proc/{pid}")
    name = place.joinpath("comm").read_text(errors="replace").rstrip("\n")
    inner = str(pid)
    for line in place.joinpath("status").read_text(errors="replace").splitlines():
        if line.startswith("NSpid:"):
            inner = line.split()[-1]
    return f"{printable(name, instead='?')}[{inner}]"
