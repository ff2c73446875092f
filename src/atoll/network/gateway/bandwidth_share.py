"""One sandbox's share of the gateway: as much as any other sandbox gets, and no more than its limit.

In each turn of the event loop, all connections of a sandbox together may pass on a fixed number of bytes, then the next
sandbox has its turn: many connections get no more than one. In addition, the bytes of both directions have a rate.
"""

from __future__ import annotations

import asyncio

from atoll.token_bucket import TokenBucket

DEFAULT_BYTES_PER_S = 3_125_000_000
"""25 Gbit/s."""
_TURN = 4 << 20
_BURST_S = 0.2
_MIN_BURST = 256 * 1024


class BandwidthShare:
    def __init__(self, bytes_per_s: float) -> None:
        self._left = _TURN
        self._is_new_turn_coming = False
        self._bucket = TokenBucket(bytes_per_s, _burst(bytes_per_s))

    def limit(self, bytes_per_s: float) -> None:
        """Change the rate from now on."""
        self._bucket.limit(bytes_per_s, _burst(bytes_per_s))

    def is_open(self) -> bool:
        """Whether more may be passed on in this turn."""
        return self._left > 0 and self.pause_s() == 0

    def pause_s(self) -> float:
        """Return how long nothing may be passed on because of the rate; 0 if only a turn has to be waited for."""
        return self._bucket.wait_s()

    def count(self, size: int) -> None:
        """Count bytes that were passed on."""
        self._left -= size
        self._bucket.overdraw(size)
        if not self._is_new_turn_coming:
            self._is_new_turn_coming = True
            asyncio.get_running_loop().call_soon(self._new_turn)

    async def passed(self, size: int) -> None:
        """Count bytes that were passed on, and wait if the rate was exceeded."""
        self.count(size)
        if (seconds := self.pause_s()) > 0:
            await asyncio.sleep(seconds)

    def _new_turn(self) -> None:
        self._left = _TURN
        self._is_new_turn_coming = False


def _burst(bytes_per_s: float) -> float:
    return max(_MIN_BURST, bytes_per_s * _BURST_S)
