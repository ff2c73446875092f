"""`atoll run` among other programs: what its parent asked for holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from atoll.settings import Settings


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_parent_ignores_ends_nothing(
    number: signal.Signals, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    """`nohup` ignores one for its program, and a script that starts a program with `&` the other."""
    need_engine("bubblewrap", session_settings)
    own = {"ATOLL_DATA_DIR": str(session_settings.data_dir), "ATOLL_RUN_DIR": str(session_settings.run_dir)}
    ignoring = ["sh", "-c", f'trap "" {number.name.removeprefix("SIG")}; exec "$@"', "sh"]
    run = [sys.executable, "-m", "atoll.cli", "run", "--engine", "bubblewrap", "--"]
    with subprocess.Popen(
        [*ignoring, *run, "sh", "-c", "echo up; read word; echo $word"],
        env={**os.environ, **own},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        print("on", file=process.stdin, flush=True)
        assert process.stdout.read() == "on\n"
        assert process.wait(30) == 0
