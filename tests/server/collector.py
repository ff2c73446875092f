"""A collector of OpenTelemetry that keeps what it is sent: OTLP over HTTP, as protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

Values = dict[str, str | int | bool | float]
SERVER, CLIENT = 2, 3
"""Kinds of spans."""
ERROR = 2
"""A status of spans."""


@dataclass
class SeenSpan:
    name: str
    id: str
    parent_id: str
    trace_id: str
    kind: int
    status: int
    attributes: Values
    events: list[Values]
    links: list[str]
    resource: Values
    start: int
    end: int


@dataclass
class Collector:
    url: str
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    """Path and body of each request."""
    answer: int = 200
    holds: threading.Event = field(default_factory=threading.Event)
    """While this is not set, no request is answered."""

    def spans(self) -> list[SeenSpan]:
        """All spans so far, in the order in which they began."""
        found: list[SeenSpan] = []
        for path, body in list(self.requests):
            if path == "/v1/traces":
                found += _spans(ExportTraceServiceRequest.FromString(body))
        return sorted(found, key=lambda span: span.start)

    def trace(self, trace_id: str) -> list[SeenSpan]:
        return [span for span in self.spans() if span.trace_id == trace_id]


def parents(spans: list[SeenSpan], span: SeenSpan) -> list[str]:
    """The names of the spans around this one, from the outermost."""
    by_id = {each.id: each for each in spans}
    names: list[str] = []
    while (parent := by_id.get(span.parent_id)) is not None:
        names.insert(0, parent.name)
        span = parent
    return names


def one(spans: list[SeenSpan], name: str) -> SeenSpan:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, (name, [span.name for span in spans])
    return found[0]


def tree(spans: list[SeenSpan]) -> str:
    """The spans of one trace as indented lines."""
    return "\n".join(f"{'  ' * len(parents(spans, span))}{span.name}" for span in _in_depth(spans))


def _in_depth(spans: list[SeenSpan], parent: str | None = None) -> Iterator[SeenSpan]:
    known = {span.id for span in spans}
    for span in spans:
        if span.parent_id == parent if parent is not None else span.parent_id not in known:
            yield span
            yield from _in_depth(spans, span.id)


@contextmanager
def collector() -> Iterator[Collector]:
    made = Collector("")
    made.holds.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            made.requests.append((self.path, body))
            made.holds.wait(60)
            self.send_response(made.answer)
            self.send_header("Content-Length", "19")
            self.end_headers()
            self.wfile.write(b"the collector's own")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield made
    finally:
        made.holds.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _spans(request: ExportTraceServiceRequest) -> Iterator[SeenSpan]:
    for part in request.resource_spans:
        resource = values(part.resource.attributes)
        for scope in part.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    span.name,
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.trace_id.hex(),
                    span.kind,
                    span.status.code,
                    values(span.attributes),
                    [values(event.attributes) for event in span.events],
                    [link.span_id.hex() for link in span.links],
                    resource,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                )


def values(attributes: Any) -> Values:
    found: Values = {}
    for each in attributes:
        assert isinstance(each, KeyValue)
        assert each.key not in found, f"{each.key} is given twice"
        found[each.key] = getattr(each.value, each.value.WhichOneof("value") or "string_value")
    return found
