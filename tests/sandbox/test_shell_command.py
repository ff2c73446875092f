"""`atoll shell` on a real terminal: how it ends when it is told to."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from atoll import AsyncSandbox
from atoll.settings import Settings
from needs import needs

pytestmark = needs("setsid")


@contextmanager
def shell(settings: Settings, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int, str]]:
    """The program, its terminal from the other side, and what it showed until the prompt of the shell inside."""
    variables = {"ATOLL_DATA_DIR": str(settings.data_dir), "ATOLL_RUN_DIR": str(settings.run_dir)}
    own = {**os.environ, **variables}
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", sys.executable, "-W", "ignore", "-m", "atoll.cli", "shell", *arguments]
    with os.fdopen(ours, "r+b", buffering=0, closefd=False) as screen:
        with subprocess.Popen(command, env=own, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            try:
                shown = b""
                while not shown.endswith((b"$ ", b"# ")):
                    shown += screen.read(4096)
                yield process, ours, shown.decode()
            finally:
                process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_its_exit_code_says_which(settings: Settings, number: signal.Signals) -> None:
    with shell(settings, "--engine", "process") as (process, terminal, shown):
        assert not termios.tcgetattr(terminal)[3] & termios.ICANON
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert termios.tcgetattr(terminal)[3] & termios.ICANON
        os.close(terminal)
    assert not (settings.data_dir / "process" / made(shown)).exists()


def test_a_terminal_that_is_closed_ends_it(settings: Settings) -> None:
    with shell(settings, "--engine", "process") as (process, terminal, shown):
        os.close(terminal)
        assert process.wait(30) == 128 + signal.SIGHUP
    assert not (settings.data_dir / "process" / made(shown)).exists()


async def test_the_terminal_is_restored_after_a_shell_in_an_existing_sandbox(
    sandbox: AsyncSandbox, settings: Settings
) -> None:
    with shell(settings, sandbox.id) as (process, terminal, _):
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert termios.tcgetattr(terminal)[3] & termios.ICANON
        os.close(terminal)
    assert (await sandbox.exec("echo on")).stdout == "on\n"


def made(shown: str) -> str:
    found = re.search(r"sandbox (\S+) on engine", shown)
    assert found is not None
    return found[1]
