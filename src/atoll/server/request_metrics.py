"""Metrics of the server itself: requests by route and status; open streams, tasks and files."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestMetrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """Number of requests by method, path of the route, and status."""
        self.seconds: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        """Number of open streams, by kind."""

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
        """Return the metrics in the text format of Prometheus. Paths are templates of routes, so their number is
        bounded."""
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


class RequestCount:
    """A pure ASGI middleware that counts requests by the template of their route, never by a path that a client made
    up."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = scope.get("route")
            made = getattr(scope["app"].state, "services", None)
            if made is not None:
                path = getattr(route, "path", "none")
                made.metrics.count(scope["method"], path, status, time.perf_counter() - started)
