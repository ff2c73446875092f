"""Pass exports of sandboxes on to the operator's collector, from a bounded queue.

A sender has its answer when its export is in the queue, so a slow or dead collector holds up nobody. Users take turns,
and each has a part of the queue, so a user who sends much delays no other's exports. What finds no room is refused and
counted; what the collector does not take is counted and forgotten. Its answers are shown to nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll import buffers, tracing
from atoll.manager.metrics import counter, gauge
from atoll.server.webhooks.posting import NotPostedError, parse, post
from atoll.workers import account

if TYPE_CHECKING:
    from prometheus_client import Metric

_MAX_WAITING_BYTES = 32 << 20
_MAX_OF_ONE_BYTES = 8 << 20
_OVERHEAD_BYTES = 1024
"""What an export counts for beside its body, which may be empty."""
_AT_ONCE = 4
_DRAIN_S = 2.0
_QUIET_EVERY = 1000
"""Of failures only the first of this many is logged."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Export:
    signal: str
    media_type: str
    body: bytes

    @property
    def size(self) -> int:
        return _OVERHEAD_BYTES + len(self.body)


class Relay:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._hosts = frozenset((parse(endpoint).hostname or "",))
        self._waiting: OrderedDict[str, deque[Export]] = OrderedDict()
        """The exports of each user, in the order in which users have their turns."""
        self._held: Counter[str] = Counter()
        """How many bytes of each user wait or are being sent."""
        self._outcomes: Counter[str] = Counter()
        self._some = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        with tracing.apart():
            self._senders = [asyncio.create_task(self._send(), name=f"telemetry {n}") for n in range(_AT_ONCE)]

    def offer(self, user_id: str, export: Export) -> bool:
        """Put an export into the queue. Returns False if there is no room for it."""
        size = export.size
        if self._held[user_id] + size > _MAX_OF_ONE_BYTES or self._held.total() + size > _MAX_WAITING_BYTES:
            self._outcomes["dropped"] += 1
            return False
        self._held[user_id] += size
        self._waiting.setdefault(user_id, deque()).append(export)
        self._some.set()
        self._empty.clear()
        return True

    def metric_families(self) -> Iterator[Metric]:
        """Return the metrics. May be called in another thread."""
        found = {outcome: self._outcomes[outcome] for outcome in ("forwarded", "failed", "dropped")}
        yield counter("atoll_telemetry_exports", "Exports of sandboxes by what became of them.", found, "outcome")
        waiting = dict(self._held)
        yield gauge("atoll_telemetry_waiting_bytes", "Bytes of exports that wait.", {"": sum(waiting.values())})

    async def aclose(self) -> None:
        """Send what waits, for a short time at most."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._empty.wait()
        except TimeoutError:
            _log.warning("exports of sandboxes were not sent: %d bytes", self._held.total())
        for task in self._senders:
            task.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)

    async def _send(self) -> None:
        account.set("")
        buffers.reservation.set(None)
        while True:
            user_id, export = await self._next()
            try:
                await self._post(export)
                self._outcomes["forwarded"] += 1
            except NotPostedError as error:
                if self._outcomes["failed"] % _QUIET_EVERY == 0:
                    _log.warning("the collector %s does not take the exports of sandboxes: %s", self._endpoint, error)
                self._outcomes["failed"] += 1
            finally:
                self._held[user_id] -= export.size
                if not self._held[user_id]:
                    del self._held[user_id]
                if not self._held:
                    self._empty.set()

    async def _next(self) -> tuple[str, Export]:
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        user_id, exports = self._waiting.popitem(last=False)
        export = exports.popleft()
        if exports:
            self._waiting[user_id] = exports  # behind all other users
        return user_id, export

    async def _post(self, export: Export) -> None:
        url = f"{self._endpoint}/v1/{export.signal}"
        status, _ = await post(url, {"Content-Type": export.media_type}, export.body, hosts=self._hosts)
        if not 200 <= status < 300:
            raise NotPostedError(f"it answered {status}")
