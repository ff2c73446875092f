"""Report ports on which programs begin to listen, as events.

The kernel does not report that a program begins to listen, so sandboxes have to be polled. A sandbox is polled only
after it was used, a few times and ever more rarely, so an unused sandbox costs nothing. All polls together are limited
in rate, each is bounded in time and size, and a sandbox can cause only a limited number of events, however many ports
it opens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time

from atoll import buffers
from atoll.errors import SandboxError
from atoll.guest.guest import Guest
from atoll.guest.socket_tables import TCP_TABLES, listening, listening_ports, read_table
from atoll.manager import SandboxManager
from atoll.model import ListeningPort
from atoll.token_bucket import TokenBucket
from atoll.workers import Shares

PORT = "port"
"""The kind of these events."""
_PAUSES_S = (0.3, 0.7, 2.0, 4.0, 8.0, 16.0)
"""Pauses before each poll after a use. A further use starts again, but never before the second pause."""
_LOOKS_PER_S = 20.0
_AT_ONCE, _OF_ONE = 8, 2
_LOOK_S = 2.0
_TABLE_BYTES = 128 << 10
_MAX_AT_ONCE = 16
_BURST, _RATE = 64.0, 0.2
_MAX_KNOWN = 10_000
_log = logging.getLogger(__name__)


class PortWatch:
    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._since = time.time()
        self._slots = Shares(_AT_ONCE, _OF_ONE)
        self._free_at = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._used_again: set[str] = set()
        self._known: dict[str, frozenset[int]] = {}
        """The listening ports at the last poll, by sandbox."""
        self._buckets: dict[str, TokenBucket] = {}
        """How many more events each sandbox may cause."""

    def used(self, sandbox_id: str) -> None:
        """Note that a use of this sandbox has begun."""
        if sandbox_id in self._tasks:
            self._used_again.add(sandbox_id)
            return
        task = asyncio.get_running_loop().create_task(self._follow(sandbox_id), name=f"ports of {sandbox_id}")
        self._tasks[sandbox_id] = task
        task.add_done_callback(lambda _: self._over(sandbox_id))

    async def aclose(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _over(self, sandbox_id: str) -> None:
        self._tasks.pop(sandbox_id, None)
        self._used_again.discard(sandbox_id)

    async def _follow(self, sandbox_id: str) -> None:
        buffers.reservation.set(None)  # the request that started this task ends soon, and its memory is released
        step = 0
        try:
            while step < len(_PAUSES_S):
                await asyncio.sleep(_PAUSES_S[step])
                step = 1 if sandbox_id in self._used_again else step + 1
                self._used_again.discard(sandbox_id)
                if not await self._look(sandbox_id):
                    return
        except SandboxError as error:
            _log.debug(
                "the ports of sandbox %s are not reported: %s", sandbox_id, error, extra={"sandbox_id": sandbox_id}
            )

    async def _look(self, sandbox_id: str) -> bool:
        """Poll a sandbox. Returns False if there is no sandbox to poll any more."""
        record = await self._manager.recall(sandbox_id)
        if record is None:
            self._known.pop(sandbox_id, None)
            self._buckets.pop(sandbox_id, None)
            return False
        async with self._slots.slot(record.owner or ""):
            await self._turn()
            try:
                ports = await self._manager.observe(sandbox_id, _listening, _LOOK_S)
                is_new = record.created_at >= self._since  # for any other, the ports before are unknown
                before = self._known.get(sandbox_id, frozenset() if is_new else ports)
                new = sorted(ports - before)[:_MAX_AT_ONCE]
                wanted = frozenset(new[: self._allowed(sandbox_id, len(new))])
                found = await self._manager.observe(sandbox_id, lambda guest: _named(guest, wanted), _LOOK_S)
            except (SandboxError, OSError):
                return True  # it is paused or does not answer
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
            self._buckets.clear()
        self._known[sandbox_id] = ports
        if found:
            more = len(ports - before) - len(found)
            await self._manager.report(sandbox_id, PORT, [_event(each, more) for each in found])
        return True

    async def _turn(self) -> None:
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + 1 / _LOOKS_PER_S
        await asyncio.sleep(self._free_at - 1 / _LOOKS_PER_S - now)

    def _allowed(self, sandbox_id: str, number: int) -> int:
        bucket = self._buckets.setdefault(sandbox_id, TokenBucket(_RATE, _BURST))
        return bucket.take_up_to(number)


async def _listening(guest: Guest) -> frozenset[int]:
    tables = [await read_table(guest, path, _TABLE_BYTES) for path in TCP_TABLES]
    return frozenset(port for table in tables for port in listening(table))


async def _named(guest: Guest, wanted: frozenset[int]) -> list[ListeningPort]:
    """Return one entry for each port, with its process if that can be determined."""
    if not wanted:
        return []
    found = await listening_ports(guest, wanted=wanted, table_bytes=_TABLE_BYTES)
    return list({each.port: each for each in found}.values())


def _event(found: ListeningPort, more: int) -> tuple[str, str]:
    who = f"{found.process or 'a process'} (pid {found.pid})" if found.pid is not None else "a process"
    others = f", and {more} more ports are new" if more > 0 else ""
    data = {"port": found.port, "address": found.address, "pid": found.pid, "process": found.process}
    return f"{who} listens on port {found.port}{others}", json.dumps(data)
