"""The headers of W3C Trace Context and Baggage, as clients send them: bounded, and left out if they are malformed."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PARENT = re.compile(r"([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?")
_KEY = r"[a-z0-9][a-z0-9_*/@-]{0,255}"
_STATE = re.compile(rf"{_KEY}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_TOKEN, _VALUE = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*"
_BAGGAGE = re.compile(rf"{_TOKEN}[ \t]*=[ \t]*{_VALUE}([ \t]*;[ \t]*{_TOKEN}([ \t]*=[ \t]*{_VALUE})?)*")
_MAX_PARENT, _MAX_STATE, _MAX_BAGGAGE = 128, 512, 8192
_MAX_STATES, _MAX_BAGGAGES = 32, 64
_NAMES = frozenset((b"traceparent", b"tracestate", b"baggage"))


def carried(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers about traces among these: `traceparent`, `tracestate` and `baggage`. Malformed ones are left
    out, and so is `tracestate` without `traceparent`. Names are in lower case, as in ASGI."""
    given: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in _NAMES:
            given.setdefault(name, []).append(value)
    if not given:
        return {}
    found: dict[str, str] = {}
    parents = given.get(b"traceparent", [])
    if len(parents) == 1 and (parent := _parent(parents[0])):
        found["traceparent"] = parent
        if state := _list(given.get(b"tracestate", []), _STATE, _MAX_STATE, _MAX_STATES):
            found["tracestate"] = state
    if baggage := _list(given.get(b"baggage", []), _BAGGAGE, _MAX_BAGGAGE, _MAX_BAGGAGES):
        found["baggage"] = baggage
    return found


def _parent(value: bytes) -> str:
    match = _PARENT.fullmatch(value.decode("latin-1").strip(" \t")) if len(value) <= _MAX_PARENT else None
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5] is not None):
        return ""
    return f"00-{match[2]}-{match[3]}-{int(match[4], 16) & 3:02x}"  # a later version is continued as this one


def _list(values: list[bytes], member: re.Pattern[str], most_bytes: int, most: int) -> str:
    """Return the members of a header that may be given several times, or nothing if one of them is malformed."""
    if sum(len(value) + 1 for value in values) > most_bytes:
        return ""
    parts = [part.strip(" \t") for value in values for part in value.decode("latin-1").split(",")]
    parts = [part for part in parts if part]
    if len(parts) > most or not all(member.fullmatch(part) for part in parts):
        return ""
    return ",".join(parts)
