"""Traces: what a request or a call caused, as spans that are nested as the layers are.

While nobody records them, a span costs one function call, and Atoll does not import OpenTelemetry. Spans are recorded
after `use`, or as soon as the program that uses Atoll has set up OpenTelemetry itself.

A span has only the attributes in `Attributes`: never a command line, a variable, a path, the content of a file, the
text of an error or a credential.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeVar, Unpack, cast

from atoll.tracing.carried import carried

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

__all__ = [
    "Attributes",
    "Span",
    "apart",
    "carried",
    "continuing",
    "headers",
    "settle",
    "span",
    "traced",
    "use",
    "variables",
]

Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])
Kind = Literal["internal", "server", "client"]
_API = "opentelemetry.trace"


class Attributes(TypedDict, total=False):
    """What a span may say. `recording` has the names of OpenTelemetry for it."""

    sandbox_id: str
    user_id: str
    engine: str
    command_id: str
    exit_code: int
    cause: str
    image: str
    count: int
    method: str
    route: str
    status: int
    server_address: str
    server_port: int


class Span:
    """A span that nobody records. It is the base class of those that are recorded."""

    __slots__ = ()
    is_recorded = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        return None

    def set(self, **attributes: Unpack[Attributes]) -> None:
        """Set more attributes."""

    def rename(self, name: str) -> None:
        """Give the span its final name, if it was not known at the beginning."""


_OFF = Span()
_tracer: Tracer | None = None
_is_settled = False
_carried: ContextVar[Mapping[str, str] | None] = ContextVar("atoll_trace_headers", default=None)


def span(name: str, kind: Kind = "internal", **attributes: Unpack[Attributes]) -> Span:
    """Return a span for a `with` block. It is the current span inside, also of tasks that are created there.

    An error or a cancellation that leaves the block is recorded by its type and code. A span whose parent has already
    ended, as in a task that outlives its request, begins a trace of its own that links to the parent.
    """
    if _tracer is None and not _find_tracer():
        return _OFF
    from atoll.tracing.recording import RecordedSpan

    assert _tracer is not None
    return RecordedSpan(_tracer, name, kind, attributes)


def traced(name: str) -> Callable[[Method], Method]:
    """Wrap a coroutine function or method so that each call of it is a span."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        async def call(*args: Any, **options: Any) -> Any:
            with span(name):
                return await method(*args, **options)

        return cast(Method, call)

    return wrap


def use(provider: TracerProvider | None) -> None:
    """From now on, record spans with this provider, or with None with the program's own if it has one."""
    global _tracer
    _tracer = None if provider is None else provider.get_tracer("atoll")


def settle() -> bool:
    """Decide now, once and for all, whether spans are recorded, and return that. Later spans need not look for a
    provider. It is for programs in which nobody else can set one up."""
    global _is_settled
    is_recorded = _tracer is not None or _find_tracer()
    _is_settled = True
    return is_recorded


@contextlib.contextmanager
def continuing(found: Mapping[str, str]) -> Iterator[None]:
    """Continue the trace of a caller in this block. `found` is what `carried` returned for the caller's headers."""
    if not found:
        yield
        return
    token = _carried.set(found)
    try:
        if _tracer is None and not _find_tracer():
            yield
            return
        from atoll.tracing.recording import attached

        with attached(found):
            yield
    finally:
        _carried.reset(token)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """In this block there is no current span. It is for creating tasks that serve more than the present caller."""
    token = _carried.set(None)
    try:
        if _tracer is None and not _find_tracer():
            yield
            return
        from atoll.tracing.recording import unattached

        with unattached():
            yield
    finally:
        _carried.reset(token)


def headers() -> dict[str, str]:
    """Return the HTTP headers with which another program continues the current trace. None if there is no trace."""
    if _tracer is not None or _find_tracer():
        from atoll.tracing.recording import injected

        if found := injected():
            return found
    return dict(_carried.get() or {})


def variables() -> dict[str, str]:
    """Return the environment variables with which a command continues the current trace."""
    found = headers()
    return {name.upper(): found[name] for name in ("traceparent", "tracestate") if name in found}


def _find_tracer() -> bool:
    """Use the tracer provider that the program has set up, if there is one by now."""
    global _tracer
    if _is_settled or _API not in sys.modules:
        return False
    from atoll.tracing.recording import tracer_of_program

    _tracer = tracer_of_program()
    return _tracer is not None
