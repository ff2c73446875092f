"""Sandboxes whose programs may send telemetry through the server: their variables, whose it is, and how much."""

from __future__ import annotations

from urllib.parse import quote

from atoll.errors import UnsupportedError
from atoll.manager import Record
from atoll.model.manus_names import TASK_LABEL
from atoll.service.callback_messages import Callbacks
from atoll.service.rates import Rate, Rates

TELEMETRY_LABEL = "sandbox_telemetry"
_HEADER = "x-session-api-key"
_OF_SANDBOX, _OF_USER = Rate("exports", "sandbox", 10.0, 100.0), Rate("exports", "user", 40.0, 400.0)
_BYTES_OF_SANDBOX = Rate("bytes of exports", "sandbox", float(1 << 20), float(10 << 20))
_BYTES_OF_USER = Rate("bytes of exports", "user", float(4 << 20), float(40 << 20))


class SandboxTelemetry:
    def __init__(self, callbacks: Callbacks, public_url: str, *, is_on: bool) -> None:
        self._callbacks = callbacks
        self._base = f"{public_url.rstrip('/')}/api/v1/otlp"
        self._is_on = is_on
        self._rates = Rates()

    def label(self, wanted: bool) -> dict[str, str]:
        """Return the label of a sandbox that may send telemetry. Raises UnsupportedError if this server relays none."""
        if wanted and not self._is_on:
            raise UnsupportedError(
                "this server relays no telemetry", hint="Its operator sets otlp_endpoint; or leave out `telemetry`."
            )
        return {TELEMETRY_LABEL: "yes"} if wanted else {}

    def variables(self, record: Record) -> dict[str, str]:
        """Return the variables that tell the OpenTelemetry SDKs where to send to, unless the user has set them."""
        if TELEMETRY_LABEL not in record.labels:
            return {}
        found = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{self._base}/{record.id}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_HEADERS": f"{_HEADER}={quote(self._callbacks.inside_key(record))}",
            "OTEL_RESOURCE_ATTRIBUTES": ",".join(f"{name}={quote(value)}" for name, value in owners(record).items()),
        }
        return {name: value for name, value in found.items() if name not in record.spec.env}

    def count_export(self, record: Record) -> None:
        """Count an export before its body is read. Raises RateLimitedError."""
        self._rates.take((_OF_SANDBOX, record.id, 1), (_OF_USER, record.owner or "", 1))

    def count_bytes(self, record: Record, size: int) -> None:
        """Count the bytes of an export. Raises RateLimitedError."""
        self._rates.take((_BYTES_OF_SANDBOX, record.id, size), (_BYTES_OF_USER, record.owner or "", size))


def owners(record: Record) -> dict[str, str]:
    """Return the attributes that say whose a sandbox is."""
    found = {
        "atoll.sandbox.id": record.id,
        "atoll.user.id": record.owner,
        "atoll.task.id": record.labels.get(TASK_LABEL),
    }
    return {name: value for name, value in found.items() if value}
