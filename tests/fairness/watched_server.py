"""`atoll serve`, with a list of every step of its event loop that took long: one line of JSON each, in the file that
ATOLL_TEST_STEPS names.

What counts is the time on the processor that the thread of the loop used during the step: a machine that is busy with
something else makes a step late, but not long.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from asyncio import events
from collections.abc import Callable
from traceback import extract_stack

from atoll.cli import main

LONG_S = 0.05


class Watch:
    """Measures each step, and looks from another thread at what a long one is doing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._began = 0.0
        self._seen = ""
        self._loop_thread = threading.main_thread().ident or 0
        self._collecting = 0.0
        self._collected = 0.0
        gc.callbacks.append(self._on_collection)
        threading.Thread(target=self._look, daemon=True).start()

    def run(self, handle: events.Handle, plain: Callable[[events.Handle], None]) -> None:
        self._seen, self._collected, self._began = "", 0.0, time.monotonic()
        began = time.thread_time()
        plain(handle)
        took, self._began = time.thread_time() - began, 0.0
        if took > LONG_S:
            found = {"seconds": round(took, 4), "collecting": round(self._collected, 4), "step": _named(handle)}
            with open(self._path, "a") as file:
                file.write(json.dumps(found | {"seen": self._seen}) + "\n")

    def _look(self) -> None:
        while True:
            time.sleep(LONG_S / 3)
            if self._began and not self._seen and time.monotonic() - self._began > LONG_S / 2:
                frame = sys._current_frames().get(self._loop_thread)
                self._seen = "; ".join(
                    f"{each.name} {each.filename}:{each.lineno}" for each in extract_stack(frame)[-12:]
                )

    def _on_collection(self, phase: str, _: object) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            self._collected += time.thread_time() - self._collecting


def watch(path: str) -> None:
    plain, watched = events.Handle._run, Watch(path)
    events.Handle._run = lambda handle: watched.run(handle, plain)  # type: ignore[method-assign, assignment]


def _named(handle: events.Handle) -> str:
    callback = getattr(handle, "_callback", None)
    task = getattr(callback, "__self__", None)
    return f"{task.get_name()} {task.get_coro()!r}"[:500] if isinstance(task, asyncio.Task) else repr(callback)[:500]


if __name__ == "__main__":
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # its steps cannot be measured; asyncio's can
    watch(os.environ["ATOLL_TEST_STEPS"])
    sys.argv[0] = "atoll"
    main()
