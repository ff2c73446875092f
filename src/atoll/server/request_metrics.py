"""What the server counts about requests, and all its metrics as text for Prometheus."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.manager.metrics import Histogram, counter, gauge, histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_BOUNDS_S = (0.0025, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0)
"""Few, because each is a line for every route."""


class RequestMetrics:
    """Counts requests by the template of their route, never by a path that a client made up."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """Number of requests by method, path of the route, and status."""
        self.durations: dict[tuple[str, ...], Histogram] = {}
        """How long they took, by path of the route."""
        self.streams: Counter[str] = Counter()
        """Number of open streams, by kind."""
        self.lines_dropped: Callable[[], int] = lambda: 0
        """Number of lines that the log could not take."""

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in _METHODS else "other"
        self.requests[method, route, status] += 1
        durations = self.durations.get((route,))
        if durations is None:
            durations = self.durations[route,] = Histogram(_BOUNDS_S)
        durations.add(seconds)

    @contextmanager
    def stream(self, kind: str) -> Iterator[None]:
        self.streams[kind] += 1
        try:
            yield
        finally:
            self.streams[kind] -= 1

    def metric_families(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily

        requests = CounterMetricFamily("atoll_http_requests", "Requests.", labels=["method", "route", "status"])
        for (method, route, status), count in sorted(dict(self.requests).items()):
            requests.add_metric([method, route, str(status)], count)
        yield requests
        durations = dict(self.durations)
        seconds = {route: found.sum_s for (route,), found in durations.items()}
        yield counter("atoll_http_request_seconds", "How long all requests took together.", seconds, "route")
        meaning = "How long requests took, streams included."
        yield histogram("atoll_http_request_duration_seconds", meaning, durations, ["route"])
        yield gauge("atoll_open_streams", "Open streams by kind.", self.streams, "kind")
        yield counter("atoll_log_lines_dropped", "Lines that the log could not take.", {"": self.lines_dropped()})


class Exposition:
    """Writes the metrics of one application, whose registry is its own. A thread of its own writes them, one scrape
    after another, so that the event loop goes on meanwhile."""

    def __init__(self, *sources: Callable[[], Iterable[Metric]]) -> None:
        self._sources = sources
        self._registry: CollectorRegistry | None = None
        self._thread = ThreadPoolExecutor(1, "atoll-metrics")

    async def write(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics and their media type: OpenMetrics for clients that ask for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._write, accept, loop)

    def _write(self, accept: str, loop: asyncio.AbstractEventLoop) -> tuple[bytes, str]:
        from prometheus_client.exposition import choose_encoder

        if self._registry is None:
            self._registry = self._made(loop)
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def _made(self, loop: asyncio.AbstractEventLoop) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry, ProcessCollector

        registry = CollectorRegistry()
        for source in self._sources:
            registry.register(_Collector(source))
        registry.register(
            _Collector(lambda: [gauge("atoll_tasks", "Tasks of the event loop.", {"": len(asyncio.all_tasks(loop))})])
        )
        ProcessCollector(registry=registry)
        return registry


class _Collector:
    def __init__(self, source: Callable[[], Iterable[Metric]]) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        return self._source()
