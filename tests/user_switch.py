"""Running a piece of a test as a user without rights, also when the tests run as root."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

UID = 12345


def as_user(owned: Path, work: Callable[[], object]) -> None:
    """Call `work` in a child process that is not root and owns `owned`. Raises AssertionError with its traceback.

    Whatever it needs must be imported before: the user may not be able to read where the packages are.
    """
    if os.geteuid() == 0:
        for folder, _, files in os.walk(owned):
            os.chown(folder, UID, UID)
            for file in files:
                os.chown(f"{folder}/{file}", UID, UID, follow_symlinks=False)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of any fork beside threads
        child = os.fork()
    if child == 0:
        _be_child(writing, work)
    os.close(writing)
    with open(reading, errors="replace") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, said


def _be_child(writing: int, work: Callable[[], object]) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
        work()
        status = 0
    except BaseException:
        os.write(writing, traceback.format_exc().encode())
    finally:
        os._exit(status)
