"""Runs a program whose output is an archive, and makes sure that it ends when we do.

The child gets SIGKILL when the thread that started it dies. As root it also gets a process namespace of its own, so
its death takes everything it started with it, whatever that did to get away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.printable import printable

_KEPT_LINES = 40
_MAX_LINE = 1000
_GRACE_S = 10.0


class Program:
    """The standard output of a running program. Use `running`."""

    def __init__(self, process: subprocess.Popen[bytes], on_line: Callable[[str], None]) -> None:
        self._process, self._on_line = process, on_line
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        """The last it wrote to standard error."""
        self._listener = threading.Thread(target=self._listen, daemon=True, name="atoll-program")
        self._listener.start()

    def read(self, size: int, /) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.read(size)

    def status(self) -> int:
        """Wait for the end. Call after reading to the end of the output."""
        code = self._process.wait()
        self._listener.join(_GRACE_S)
        return code

    def kill(self) -> None:
        """End it and everything it started, and wait until the last of them is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join(_GRACE_S)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while raw := self._process.stderr.readline(_MAX_LINE):
                line = printable(raw, instead="")
                if line:
                    self.lines.append(line)
                    self._on_line(line)


@contextlib.contextmanager
def running(
    argv: Sequence[str], env: Mapping[str, str], work: Work, on_line: Callable[[str], None], hint: str
) -> Iterator[Program]:
    """Start a program. It is dead at the end, and as soon as the work is cancelled. `hint` says how to install it."""
    path = shutil.which(argv[0])
    if path is None:
        raise ImageError(f"{argv[0]} is not on this machine", hint=hint)
    process = subprocess.Popen(
        [*_tether(), path, *argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env),
        cwd="/",
        start_new_session=True,
    )
    program = Program(process, on_line)

    def interrupt() -> None:
        os.killpg(process.pid, signal.SIGKILL)

    try:
        with work.on_cancel(interrupt):
            yield program
            work.check()
    finally:
        program.kill()


def _tether() -> list[str]:
    tether = []
    if setpriv := shutil.which("setpriv"):
        tether += [setpriv, "--pdeathsig", "KILL", "--"]
    if os.geteuid() == 0 and (unshare := shutil.which("unshare")):
        tether += [unshare, "--pid", "--fork", "--kill-child=KILL", "--"]
    return tether
