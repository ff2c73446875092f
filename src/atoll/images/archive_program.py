"""Running a program whose output is an archive, so that it cannot outlive this process.

The child gets SIGKILL when the thread that started it dies. As root, it also runs in its own PID namespace, so that the
kernel kills everything that it started, too, and in its own mount namespace, so that what it has mounted is gone with
it. mmdebstrap mounts the host's /dev/shm into the tree that it makes: whoever removed that tree later would empty it.
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
    """A running program whose standard output can be read. Created by `running`."""

    def __init__(self, process: subprocess.Popen[bytes], on_line: Callable[[str], None]) -> None:
        self._process, self._on_line = process, on_line
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        """The last lines that it wrote to standard error."""
        self._listener = threading.Thread(target=self._listen, daemon=True, name="atoll-program")
        self._listener.start()

    def read(self, size: int, /) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.read(size)

    def status(self) -> int:
        """Wait for the program to end and return its exit status. Read its output to the end before."""
        code = self._process.wait()
        self._listener.join(_GRACE_S)
        return code

    def kill(self) -> None:
        """Kill the program and its process group, wait for it, and close its pipes."""
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
    """Start a program, and kill it at the end of the context or when the work is cancelled.

    `hint` is the hint of the error that is raised if the program is not installed.
    """
    path = shutil.which(argv[0])
    if path is None:
        raise ImageError(f"{argv[0]} is not installed", hint=hint)
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
        tether += [unshare, "--mount", "--pid", "--fork", "--kill-child=KILL", "--"]
    return tether
