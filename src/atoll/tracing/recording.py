"""Spans that are recorded. This module imports OpenTelemetry, so it is imported only where it is used already."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from contextvars import Token
from typing import Self, Unpack

from opentelemetry import baggage, context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from atoll.errors import SandboxError
from atoll.tracing import Attributes, Kind, Span

_NAMES = {
    "sandbox_id": "atoll.sandbox.id",
    "user_id": "atoll.user.id",
    "engine": "atoll.engine",
    "command_id": "atoll.command.id",
    "exit_code": "atoll.command.exit_code",
    "cause": "atoll.cause",
    "image": "atoll.image",
    "count": "atoll.count",
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "server_address": "server.address",
    "server_port": "server.port",
}
_KINDS = {"internal": trace.SpanKind.INTERNAL, "server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT}
_MAX_VALUE = 256
_CANCELLED = "cancelled"
_REFUSED, _FAILED = 400, 500
"""From which status on a request is an error for its client, and for its server."""
_PARENTS = TraceContextTextMapPropagator()
_BAGGAGE = W3CBaggagePropagator()


class RecordedSpan(Span):
    __slots__ = ("_attributes", "_kind", "_name", "_span", "_token", "_tracer")
    is_recorded = True

    def __init__(self, tracer: trace.Tracer, name: str, kind: Kind, attributes: Attributes) -> None:
        self._tracer, self._name, self._kind, self._attributes = tracer, name, kind, attributes
        self._span: trace.Span = trace.INVALID_SPAN
        self._token: Token[context.Context] | None = None

    def __enter__(self) -> Self:
        present, links = context.get_current(), []
        parent = trace.get_current_span(present)
        if getattr(parent, "end_time", None) is not None:
            links = [trace.Link(parent.get_span_context())]
            present = trace.set_span_in_context(trace.INVALID_SPAN, present)
        self._span = self._tracer.start_span(
            self._name,
            present,
            _KINDS[self._kind],
            _named(self._attributes),
            links,
            record_exception=False,
            set_status_on_exception=False,
        )
        self._token = context.attach(trace.set_span_in_context(self._span, present))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace_: object) -> None:
        if error is not None:
            self._fail(error)
        self._span.end()
        if self._token is not None:
            context.detach(self._token)

    def set(self, **attributes: Unpack[Attributes]) -> None:
        self._span.set_attributes(_named(attributes))
        status = attributes.get("status", 0)
        if status >= (_FAILED if self._kind == "server" else _REFUSED):
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(trace.StatusCode.ERROR)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def _fail(self, error: BaseException) -> None:
        """Record an error without its text, which may contain anything."""
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        if isinstance(error, SystemExit):  # the end of a program, whose exit code is its result
            self.set(exit_code=error.code if isinstance(error.code, int) else int(error.code is not None))
            return
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._span.set_attribute("error.type", _CANCELLED)
        elif isinstance(error, SandboxError):
            self._span.set_attribute("error.type", error.code)
            self._span.add_event("exception", {"exception.type": kind, "atoll.error.code": error.code})
        else:
            self._span.set_attribute("error.type", kind)
            self._span.add_event("exception", {"exception.type": kind})
        self._span.set_status(trace.StatusCode.ERROR)


@contextlib.contextmanager
def attached(found: Mapping[str, str]) -> Iterator[None]:
    """Make the span and the baggage of these headers current."""
    token = context.attach(_BAGGAGE.extract(found, _PARENTS.extract(found, context.get_current())))
    try:
        yield
    finally:
        context.detach(token)


@contextlib.contextmanager
def unattached() -> Iterator[None]:
    """Let there be no current span and no baggage."""
    token = context.attach(baggage.clear(trace.set_span_in_context(trace.INVALID_SPAN)))
    try:
        yield
    finally:
        context.detach(token)


def injected() -> dict[str, str]:
    """Return the headers of the current span and its baggage."""
    found: dict[str, str] = {}
    _PARENTS.inject(found)
    _BAGGAGE.inject(found)
    return found


def tracer_of_program() -> trace.Tracer | None:
    """Return a tracer of the provider that the program has set up, or None if it has set up none."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return provider.get_tracer("atoll")


def _named(attributes: Attributes) -> dict[str, str | int | bool]:
    named: dict[str, str | int | bool] = {}
    for name, value in attributes.items():
        if value is not None:
            named[_NAMES[name]] = value[:_MAX_VALUE] if isinstance(value, str) else value  # type: ignore[assignment]
    return named
