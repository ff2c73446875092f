"""Figures of the server itself: requests by route and status, streams, tasks and files that are open."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Figures:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """By method, path of the route, and status."""
        self.seconds: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        """Open right now, by kind."""

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests[method, route, status] += 1
        self.seconds[route] += seconds  # type: ignore[assignment]

    @contextmanager
    def stream(self, kind: str) -> Iterator[None]:
        self.streams[kind] += 1
        try:
            yield
        finally:
            self.streams[kind] -= 1

    def exposition(self) -> str:
        """The text format of Prometheus. The routes' paths are templates, so there are only so many."""
        lines = ["# TYPE atoll_http_requests_total counter"]
        for (method, route, status), count in sorted(self.requests.items()):
            lines.append(f'atoll_http_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}')
        lines.append("# TYPE atoll_http_request_seconds_total counter")
        for route, seconds in sorted(self.seconds.items()):
            lines.append(f'atoll_http_request_seconds_total{{route="{route}"}} {seconds:.6f}')
        lines.append("# TYPE atoll_open_streams gauge")
        for kind, count in sorted(self.streams.items()):
            lines.append(f'atoll_open_streams{{kind="{kind}"}} {count}')
        lines += ["# TYPE atoll_tasks gauge", f"atoll_tasks {len(asyncio.all_tasks())}"]
        lines += ["# TYPE process_open_fds gauge", f"process_open_fds {len(os.listdir('/proc/self/fd'))}"]
        return "\n".join(lines) + "\n"
