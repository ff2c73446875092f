"""Durations as Go writes them: `30s`, `1m30s`, `500ms`."""

from __future__ import annotations

import re

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})(ns|us|µs|ms|s|m|h)")
_MAX_CHARS = 64


def seconds(text: str) -> float | None:
    """Return how long that is, or None if it is no duration."""
    if text == "0":
        return 0.0
    total = 0.0
    at = 0
    while at < len(text) <= _MAX_CHARS:
        part = _PART.match(text, at)
        if part is None:
            return None
        total += float(part[1]) * _UNITS[part[2]]
        at = part.end()
    return total if at > 0 else None
