"""Record and export the spans of this process, as the standard variables of OpenTelemetry say."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from atoll import tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_STOP_S = 2.0
"""How long the end of the process may take because spans are still to be exported."""
_GIVE_UP_S = 1.0
_log = logging.getLogger(__name__)


def is_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables ask for traces: they name an exporter, or an endpoint of OTLP."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return exporter != "none" if exporter else any(environ.get(name) for name in endpoints)


@contextlib.contextmanager
def exported_traces() -> Iterator[bool]:
    """Record and export spans in this block if the variables ask for it, and say whether they are. At the end of the
    block what is left is exported, for a few seconds at most, whether the collector answers or not.

    Without the extra `otel` this is logged as a warning, and the program works without traces.
    """
    if not is_wanted():
        yield False
        return
    try:
        exporter = _exporter()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning("no traces are exported: %s. They need: pip install 'atoll[otel]'", error)
        yield False
        return
    except ValueError as error:
        _log.warning("no traces are exported: %s", error)
        yield False
        return
    provider = TracerProvider(resource=Resource.create(_resource(os.environ)), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracing.use(provider)
    try:
        yield True
    finally:
        tracing.use(None)
        # The SDK would wait for half a minute, and a collector that accepts connections and never answers for longer.
        stopping = threading.Thread(target=provider.shutdown, name="atoll-traces", daemon=True)
        stopping.start()
        stopping.join(_STOP_S)
        if stopping.is_alive():
            exporter.shutdown()  # ends the waiting between tries
            stopping.join(_GIVE_UP_S)


def _exporter() -> SpanExporter:
    """Return the exporter that OTEL_TRACES_EXPORTER names. Raises ImportError, or ValueError for one that Atoll does
    not have."""
    name = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() or "otlp"
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    if name != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER is {name!r}, and not 'otlp', 'console' or 'none'")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        raise ValueError(f"the OTLP protocol is {protocol!r}; only 'http/protobuf' is supported")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _resource(environ: Mapping[str, str]) -> dict[str, str]:
    given = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    has_name = environ.get("OTEL_SERVICE_NAME") or "service.name=" in given
    name = {} if has_name else {"service.name": "atoll"}
    return {**name, "service.version": version("atoll")} if "service.version=" not in given else name
