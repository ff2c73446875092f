"""Traces of the command line: each command is a span, which continues the trace in TRACEPARENT."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from atoll import tracing

_VARIABLES = ("TRACEPARENT", "TRACESTATE", "BAGGAGE")
_SERVES = "serve"
_NAME = re.compile("[a-z-]{1,20}")


@contextmanager
def traced_command(arguments: Sequence[str]) -> Iterator[None]:
    """Run a command in this block, with traces if the standard variables of OpenTelemetry ask for them. A server's
    spans are those of its requests, and there is none around all of them."""
    given = {name: value for name in _VARIABLES if (value := os.environ.get(name))}
    if not given and not any(name.startswith("OTEL_") for name in os.environ):
        tracing.settle()
        yield
        return
    from atoll.tracing.exporting import exported_traces

    command = next((word for word in arguments if not word.startswith("-")), "")
    with exported_traces():
        tracing.settle()
        if command == _SERVES:
            yield
            return
        found = tracing.carried((name.lower().encode(), os.fsencode(value)) for name, value in given.items())
        with tracing.continuing(found), tracing.span(f"atoll {command}" if _NAME.fullmatch(command) else "atoll"):
            yield
