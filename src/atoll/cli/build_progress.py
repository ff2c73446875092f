"""What a build shows while it runs: in a terminal the last lines of each step that runs, elsewhere every line."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from atoll.printable import printable_lines

if TYPE_CHECKING:
    from atoll.builds import BuildEvent
    from atoll.errors import BuildError

_TAIL = 6
_END = 20
_MAX_LINE = 2000
_EVERY_S = 0.1


class BuildProgress:
    """Shows events on standard error or, `as_json`, as lines of JSON on standard output."""

    def __init__(self, *, as_json: bool = False) -> None:
        self._as_json = as_json
        self._live: Any = None
        self._running: dict[int, tuple[BuildEvent, float, deque[str]]] = {}
        self._rests: dict[tuple[int, int], str] = {}
        self._note = ""

    def __enter__(self) -> Self:
        if not self._as_json and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False, markup=False)
            self._live = Live("", console=console, transient=True, auto_refresh=True, get_renderable=self._picture)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the terminal as it was. May be repeated."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            self._live = None

    def add(self, event: BuildEvent) -> None:
        if self._as_json:
            self.print_json(dataclasses.asdict(event))
            return
        match event.kind:
            case "step":
                self._running[event.step] = (event, time.monotonic(), deque(maxlen=_TAIL))
                if self._live is None:
                    self._print(_title(event))
            case "cached":
                self._print(f"{_title(event)}  (known)")
            case "output":
                self._output(event)
            case "done":
                self._end_lines(event.step)
                self._running.pop(event.step, None)
                self._print(f"{_title(event)}  ({event.seconds:.1f} s)")
            case "progress":
                self._note = event.text
                if self._live is None and " 0 %" in event.text:
                    self._print(event.text)
            case "warning":
                self._print(f"warning: {event.text}")
            case "failed":
                for step in [*self._running]:
                    self._end_lines(step)

    def show_end_of(self, error: BuildError) -> None:
        """Show the last lines of the step that failed, where not all of its output was shown."""
        if self._live is not None and error.output:
            self._print("\n".join(f"  | {line}" for line in error.output.splitlines()[-_END:]))

    def print_json(self, value: dict[str, object]) -> None:
        print(json.dumps(value), flush=True)

    def _output(self, event: BuildEvent) -> None:
        key = event.step, event.channel
        *lines, rest = (self._rests.get(key, "") + event.text).split("\n")
        self._rests[key] = rest[-_MAX_LINE:]
        for line in lines:
            self._line(event.step, line[-_MAX_LINE:])

    def _end_lines(self, step: int) -> None:
        for key in [key for key in self._rests if key[0] == step]:
            if rest := self._rests.pop(key):
                self._line(step, rest)

    def _line(self, step: int, text: str) -> None:
        line = text.rstrip("\r").rpartition("\r")[2]
        if self._live is None:
            self._print(f"  | {line}")
        elif step in self._running:
            self._running[step][2].append(line)

    def _print(self, text: str) -> None:
        shown = printable_lines(text)
        if self._live is not None:
            self._live.console.print(shown)
        else:
            print(shown, file=sys.stderr, flush=True)

    def _picture(self) -> Any:
        from rich.text import Text

        lines = []
        for event, began, tail in self._running.values():
            lines.append(f"{_title(event)}  {time.monotonic() - began:.0f} s")
            lines += [f"  | {line}" for line in tail]
        if not self._running and self._note:
            lines.append(self._note)
        return Text(printable_lines("\n".join(lines)), no_wrap=True, overflow="ellipsis")


def _title(event: BuildEvent) -> str:
    stage = "" if event.stage.startswith("stage ") else f"{event.stage} "
    return f"[{stage}{event.step}/{event.steps}] {event.text}"
