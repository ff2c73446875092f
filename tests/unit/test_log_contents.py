"""What lines of a server's log may contain, and how they are written."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import re
import threading
from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from atoll.server.logs.contents import MAX_TEXT, MAX_TRACE, redacted
from atoll.server.logs.log import open_log
from atoll.server.logs.log_writer import MAX_WAITING_BYTES, LogWriter

_log = logging.getLogger("atoll.test")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for fd in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(fd)


def everything(fd: int) -> bytes:
    found = b""
    while piece := os.read(fd, 1 << 16):
        found += piece
    return found


@pytest.mark.parametrize(
    "text",
    [
        "key atoll_0123456789ab_SECRETabcdefghijkl is bad",
        "atolls_0123456789abcdef01234567_ab12.99_SECRET0123456789",
        "atollc_0123456789abcdef01234567_SECRET0123456789",
        "eyJhbGciOiJIUzI1NiJ9.eyJzSECRET.SECRET",
        "Authorization: Bearer SECRET-abcdef",
        "authorization='Basic SECRETabcdef='",
        "postgresql://user:SECRET@host/name failed",
        "https://host/path?a=1&b=SECRET#x",
        "GET /path?key=SECRET HTTP/1.1",
        '{"password": "SECRET"}',
        "registry_password=SECRET, ok",
        "X-Api-Key: SECRET",
        "Set-Cookie: SECRET; Path=/",
        "[parameters: ('a', 'SECRET')]",
        "name\n  Input [type=x, input_value={'a': 'SECRET'}, input_type=dict]",
        "-----BEGIN PRIVATE KEY-----\nSECRET\n-----END PRIVATE KEY-----",
        f"https://h/.atoll/~99.abc.{'5ec4e7' * 10}abcd",
    ],
)
def test_what_looks_like_a_credential_is_replaced(text: str) -> None:
    assert "SECRET" not in redacted(text)
    assert "5ec4e7" not in redacted(text)
    assert "[redacted]" in redacted(text)


def test_ordinary_words_stay() -> None:
    text = "sandbox 0123456789abcdef01234567 could not be paused: no answer within 2 s (native, atoll-agent, /a/b?)"
    assert redacted(text) == text


@settings(max_examples=10, deadline=None)
@given(texts=st.lists(st.text(max_size=100), max_size=40), form=st.sampled_from(["json", "console"]))
def test_every_text_becomes_one_line(texts: list[str], form: Literal["json", "console"]) -> None:
    reading, writing = os.pipe()
    with open_log("debug", form, writing) as log:
        for text in texts:
            log.requests.info("event", value=text)
    os.close(writing)
    lines = everything(reading).decode().split("\n")[:-1]
    os.close(reading)
    assert len(lines) == len(texts)
    assert all(line.isprintable() for line in lines)


def test_a_terminal_gets_text_and_everything_else_json() -> None:
    leader, terminal = pty.openpty()
    with open_log("info", "auto", terminal) as log:
        log.requests.info("request", route="/a")
        log.requests.debug("not shown")
    os.close(terminal)
    shown = os.read(leader, 4096).decode()
    os.close(leader)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert re.fullmatch(r"\S+ \[info +\] request +route=/a\r\n", plain)


def test_a_traceback_for_people_is_indented(pipe: tuple[int, int]) -> None:
    """What an error quotes cannot look like a line of the log."""
    reading, writing = pipe
    with open_log("info", "console", writing):
        try:
            raise ValueError("a\n2030-01-01T00:00:00Z [info] forged\x1b[2J")
        except ValueError:
            _log.exception("failed")
    os.close(writing)
    first, *rest = everything(reading).decode().splitlines()
    assert "failed" in first
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_long_values_and_tracebacks_are_cut_and_wrong_calls_are_reported(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    with open_log("debug", "json", writing) as log:
        log.requests.info("long", value="x" * 1_000_000, more={"a": "y" * 1_000_000}, api_key="hidden")
        try:
            raise ValueError("z" * 30_000)
        except ValueError:
            _log.exception("failed", extra={"sandbox_id": "abc", "unknown": "not shown"})
        wrong_call = logging.LogRecord("atoll.test", logging.WARNING, "", 1, "%d", ("no number",), None)
        logging.getLogger().handlers[-1].handle(wrong_call)
        thread = threading.Thread(target=lambda: [][1], name="t")
        thread.start()
        thread.join()
    os.close(writing)
    long, failed, wrong, dead = map(json.loads, everything(reading).splitlines())
    assert len(long["value"]) == len(long["more"]) == MAX_TEXT + 1
    assert long["api_key"] == "[redacted]"
    assert len(failed["exception"]) == MAX_TRACE
    assert (failed["sandbox_id"], "unknown" in failed) == ("abc", False)
    assert (wrong["level"], wrong["logger"]) == ("error", "atoll.test")
    assert "IndexError" in dead["exception"]


def test_lines_of_a_span_name_its_trace(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    with open_log("info", "json", writing) as log:
        with trace.use_span(TracerProvider().get_tracer("test").start_span("work")) as span:
            log.requests.info("inside")
            _log.warning("below")
        log.requests.info("outside")
    os.close(writing)
    inside, below, outside = map(json.loads, everything(reading).splitlines())
    assert inside["trace_id"] == below["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert "trace_id" not in outside


def test_what_nobody_reads_is_dropped_and_counted(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LogWriter(writing, lambda count: f"missing {count}")
    line = "x" * 1023
    count = 2 * MAX_WAITING_BYTES // 1024
    for _ in range(count):
        writer.put(line)
    assert 0 < writer.dropped < count
    reader_got: list[bytes] = []
    reader = threading.Thread(target=lambda: reader_got.append(everything(reading)))
    reader.start()
    writer.close(30)
    os.close(writing)
    reader.join(30)
    *kept, last = reader_got[0].decode().splitlines()
    assert kept == [line] * (count - writer.dropped)
    assert last == f"missing {writer.dropped}"


def test_a_reader_that_stopped_or_is_gone_does_not_hold_up_the_end(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LogWriter(writing, str)
    for _ in range(1000):
        writer.put("x" * 1000)
    writer.close(0.05)  # it is stuck in the middle of writing
    os.close(reading)
    writer.close(30)  # now nobody can ever read it
    assert writer.dropped
    writer.put("more")
