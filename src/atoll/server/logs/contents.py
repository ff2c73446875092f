"""What a line of the log may contain: nothing secret, nothing that controls a terminal, and only so much.

Nothing that carries credentials is logged on purpose: no headers, bodies or queries. But texts of errors quote what
others sent, so whatever looks like a credential is replaced in every line.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from structlog.typing import EventDict

from atoll.printable import printable

MAX_TEXT = 2_000
MAX_TRACE = 20_000
_HIDDEN = "[redacted]"
_OWN = ("timestamp", "level", "logger", "event")
_SAFE = frozenset((*_OWN[:3], "method", "route", "request_id", "sandbox_id", "user_id", "trace_id", "span_id"))
"""Made by the server itself, or checked before."""
_WORDS = r"pass(?:word|wd|phrase)|secret|token|api[_-]?key|session[_-]?key|authorization|cookie|credential"
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
_SUSPICIOUS = re.compile(
    rf"atoll[sc]?_|eyJ|://|\?|[0-9a-f]{{64}}|PRIVATE KEY|\[parameters: |input_value=|bearer|basic|{_WORDS}",
    re.IGNORECASE,
)
_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"atoll[sc]?_[A-Za-z0-9_.-]{6,}"), _HIDDEN),  # API keys, session keys, keys inside
    (re.compile(r"eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){0,2}"), _HIDDEN),  # tokens
    (re.compile(r"\b[0-9]{1,12}\.[0-9a-f]{0,32}\.[0-9a-f]{64}\b"), _HIDDEN),  # port links
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL), _HIDDEN),
    (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{6,}", re.IGNORECASE), rf"\1 {_HIDDEN}"),
    (re.compile(r"(?<=://)[^/\s@'\"]+@"), f"{_HIDDEN}@"),  # users and passwords in URLs
    (re.compile(r"(?<=[^\s?])\?[^\s'\"?<>]*=[^\s'\"<>]*"), f"?{_HIDDEN}"),  # queries
    (re.compile(r"\[parameters: .*?(?:\)\]|\}\]|$)", re.DOTALL | re.MULTILINE), f"[parameters: {_HIDDEN}]"),  # of SQL
    (re.compile(r"input_value=.*?(?=, input_type=|$)", re.DOTALL), f"input_value={_HIDDEN}"),  # of models
    (
        re.compile(
            rf"((?:{_WORDS})[\w-]*[\"']?\s*[:=]\s*)(?!{re.escape(_HIDDEN)})[\"']?[^\s\"',;&}})]+", re.IGNORECASE
        ),
        rf"\1{_HIDDEN}",
    ),
)


def redacted(text: str) -> str:
    """Return the text with everything replaced that looks like a credential."""
    if _SUSPICIOUS.search(text):
        for pattern, instead in _SECRETS:
            text = pattern.sub(instead, text)
    return text


def bounded_json(_: Any, __: str, line: EventDict) -> EventDict:
    """As a processor of structlog: bound and redact all values. JSON itself escapes what is not plain text."""
    found = {name: line.pop(name) for name in _OWN if name in line}
    for name, value in (*found.items(), *line.items()):
        found[name] = _value(name, value)
    return found


def bounded_text(_: Any, __: str, line: EventDict) -> EventDict:
    """Do the same for a terminal: nothing in a line ends the line or controls the terminal. Lines of a traceback are
    indented, so that none of them looks like a line of the log."""
    for name, value in line.items():
        found = _value(name, value)
        if name == "exception":
            found = "\n".join(f"    {_one_line(each)}" for each in str(found).split("\n"))
        elif isinstance(found, str):
            found = printable(found)
        line[name] = found
    return line


def trace_ids(_: Any, __: str, line: EventDict) -> EventDict:
    """Name the span that is active, if this process traces at all."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"], line["span_id"] = f"{span.trace_id:032x}", f"{span.span_id:016x}"
    return line


def _value(name: str, value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    if name in _SAFE:
        return str(value)[:MAX_TEXT]
    if _SECRET_NAME.search(name):
        return _HIDDEN
    text = value if isinstance(value, str) else repr(value)
    if name == "exception":  # its end says most
        return redacted(text[-2 * MAX_TRACE :])[-MAX_TRACE:]
    if len(text) > MAX_TEXT:
        return redacted(text[: 2 * MAX_TEXT])[:MAX_TEXT] + "…"
    return redacted(text)


def _one_line(text: str) -> str:
    return " " * (len(text) - len(text.lstrip(" "))) + printable(text)
