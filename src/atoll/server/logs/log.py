"""The log of one process: one chain of processors for the lines of structlog, of `logging` and of the interpreter."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import structlog
from structlog.processors import ExceptionRenderer, JSONRenderer, TimeStamper
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
from structlog.typing import FilteringBoundLogger, Processor

from atoll.server.logs import contents
from atoll.server.logs.log_writer import LogWriter

Level = Literal["debug", "info", "warning", "error"]
_log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_JSON = json.JSONEncoder(default=repr, check_circular=False)
"""Made once: that costs as much as a line. `contents` leaves nothing that could contain itself."""
_EXTRA = ("sandbox_id", "user_id")
"""What calls of `logging` may add to a line, with `extra`."""


@dataclass(frozen=True, slots=True)
class Log:
    requests: FilteringBoundLogger
    """For the lines about requests."""
    writer: LogWriter


@contextmanager
def open_log(level: Level, form: Literal["auto", "json", "console"], fd: int = 2) -> Iterator[Log]:
    """Send everything that this process logs to a file descriptor, until the end of the block.

    `level` is for Atoll's own lines. Those of libraries are shown from `warning` on, as some log headers below that.
    """
    is_terminal = os.isatty(fd)
    chain = _chain("console" if form == "auto" and is_terminal else form, colors=is_terminal)

    def line_of(level: str, event: str, **values: object) -> str:
        found: Any = {"event": event, "level": level, **values}
        for processor in chain:
            found = processor(None, level, found)
        return str(found)

    writer = LogWriter(fd, lambda count: line_of("warning", "lines are missing here: nothing read them", count=count))
    number = logging.getLevelNamesMapping()[level.upper()]
    requests: FilteringBoundLogger = structlog.wrap_logger(
        _Sink(writer),
        processors=[structlog.contextvars.merge_contextvars, add_log_level, *chain],
        wrapper_class=structlog.make_filtering_bound_logger(number),
    ).bind()
    handler = _Handler(writer, chain, line_of)
    root, own = logging.getLogger(), logging.getLogger("atoll")
    own_level, threads, unraisable = own.level, threading.excepthook, sys.unraisablehook
    root.addHandler(handler)
    own.setLevel(number)
    logging.captureWarnings(True)
    threading.excepthook = lambda failed: _log_failure("a thread failed", failed)
    sys.unraisablehook = lambda failed: _log_failure("an error could not be raised", failed)
    try:
        yield Log(requests, writer)
    finally:
        threading.excepthook, sys.unraisablehook = threads, unraisable
        logging.captureWarnings(False)
        own.setLevel(own_level)
        root.removeHandler(handler)
        writer.close(_CLOSE_S)


def _chain(form: str, *, colors: bool) -> list[Processor]:
    """Return what a line passes once it is known who logs it and whom it is about."""
    first: list[Processor] = [
        TimeStamper("iso", utc=True),
        contents.trace_ids,
        ExceptionRenderer(),
    ]
    if form != "console":
        return [*first, contents.bounded_json, JSONRenderer(serializer=lambda line, **_: _JSON.encode(line))]
    text = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
    return [*first, contents.bounded_text, text]


def _log_failure(event: str, failed: Any) -> None:
    if failed.exc_type is not None and not issubclass(failed.exc_type, SystemExit):
        _log.error(event, exc_info=(failed.exc_type, failed.exc_value, failed.exc_traceback))


class _Sink:
    """What structlog calls with a finished line, by the name of its level."""

    def __init__(self, writer: LogWriter) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = writer.put


class _Handler(logging.Handler):
    """Gives records of `logging` the same form. It holds no lock while it does, because a thread that waits for the
    interpreter in the middle of it would hold up the event loop."""

    def __init__(self, writer: LogWriter, chain: list[Processor], line_of: Any) -> None:
        super().__init__()
        self._writer, self._line_of = writer, line_of
        self.setFormatter(
            ProcessorFormatter(
                processors=[ProcessorFormatter.remove_processors_meta, *chain],
                foreign_pre_chain=[
                    structlog.contextvars.merge_contextvars,
                    add_log_level,
                    add_logger_name,
                    ExtraAdder(_EXTRA),
                ],
            )
        )

    def handle(self, record: logging.LogRecord) -> bool:
        if (passed := self.filter(record)) and record.levelno >= self.level:
            self.emit(record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a wrong call of `logging` must not break what it is about
            line = self._line_of("error", "a line could not be made", logger=record.name, reason=repr(error))
        self._writer.put(line)
