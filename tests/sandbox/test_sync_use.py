"""The synchronous classes in the places where people use them: scripts, threads, notebooks, at the keyboard."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll import Cause, Sandbox, SandboxGoneError, SandboxTimeoutError
from atoll.settings import Settings


def test_a_script_reads_like_a_script(sync_sandbox: Sandbox, tmp_path: Path) -> None:
    result = sync_sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.success) == ("out\n", "err\n", 3, False)
    assert result.cause is Cause.EXIT
    sync_sandbox.write_file("notes/a.txt", "hi")
    assert sync_sandbox.run_command("cd notes && ls") == "a.txt"
    assert sync_sandbox.run_command("cat a.txt") == "hi"
    assert [info.path for info in sync_sandbox.walk()] == ["notes", "notes/a.txt"]
    sync_sandbox.copy_from("notes", tmp_path / "notes")
    assert (tmp_path / "notes/a.txt").read_text() == "hi"
    assert b"".join(sync_sandbox.read_stream("notes/a.txt")) == b"hi"
    sync_sandbox.write_stream("streamed", [b"a", b"b"])
    assert sync_sandbox.read_bytes("streamed") == b"ab"


def test_a_background_command_is_followed_fed_and_waited_for(sync_sandbox: Sandbox) -> None:
    command = sync_sandbox.start("while read -r line; do echo got $line; done", stdin=True)
    output = iter(command)
    command.send_stdin("one\n")
    assert next(output).text == "got one\n"
    command.close_stdin()
    assert list(output) == []
    assert command.wait().exit_code == 0
    assert sync_sandbox.start("exit 4").wait().exit_code == 4


def test_a_terminal_is_typed_into(sync_sandbox: Sandbox) -> None:
    terminal = sync_sandbox.open_terminal("read x; echo got-$x; exit 5")
    terminal.resize(30, 90)
    terminal.write("a\n")
    assert "got-a" in b"".join(terminal).decode()
    assert terminal.wait() == 5


def test_changes_are_watched(sync_sandbox: Sandbox) -> None:
    with sync_sandbox.watch() as events:
        sync_sandbox.exec("touch file")
        assert next(event for event in events if event.path == "file").kind == "created"


def test_leaving_an_iteration_early_is_fine(sync_sandbox: Sandbox) -> None:
    for _ in sync_sandbox.start("yes"):
        break
    assert sync_sandbox.exec("echo ok").stdout == "ok\n"


def test_many_threads_share_one_sandbox(sync_sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda number: sync_sandbox.exec(f"echo {number}").stdout, range(64))]
    assert answers == [f"{number}\n" for number in range(64)]


def test_each_thread_has_a_sandbox_of_its_own(settings: Settings) -> None:
    def work(number: int) -> str:
        with Sandbox(engine="bubblewrap", settings=settings) as sandbox:
            sandbox.write_file("number", str(number))
            return sandbox.exec("cat number").stdout

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, range(8))] == [str(number) for number in range(8)]


async def test_it_works_where_an_event_loop_runs_already(settings: Settings) -> None:
    """As in a notebook, whose cells run inside a loop."""
    assert asyncio.get_running_loop().is_running()
    with Sandbox(engine="bubblewrap", settings=settings) as sandbox:
        assert sandbox.exec("echo ok").stdout == "ok\n"
        assert sandbox.run_command("echo shell") == "shell"


def test_it_works_in_a_forked_child(settings: Settings) -> None:
    """The event loop's thread does not survive a fork; the child gets its own."""
    script = """
import os, sys, warnings
warnings.simplefilter("ignore")
from atoll import Sandbox
with Sandbox(engine="bubblewrap") as sandbox:
    print(sandbox.exec("echo parent").stdout, end="", flush=True)
pid = os.fork()
if pid == 0:
    with Sandbox(engine="bubblewrap") as sandbox:
        print(sandbox.exec("echo child").stdout, end="", flush=True)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = run_python(script, settings)
    assert (done.stdout, done.returncode) == ("parent\nchild\n", 0), done.stderr


def test_ctrl_c_kills_the_command_and_cleans_up(settings: Settings) -> None:
    mark = f"{os.getpid()}{threading.get_ident()}"[:9]
    script = f"""
from atoll import Sandbox
try:
    with Sandbox(engine="bubblewrap") as sandbox:
        print(sandbox.id, flush=True)
        sandbox.exec("sleep {mark}", on_stdout=print)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment(settings), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        sandbox_id = process.stdout.readline().strip()
        while not is_running(mark):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0] == "interrupted\n"
        assert not is_running(mark)
        assert not (settings.data_dir / "process" / sandbox_id).exists()
    finally:
        process.kill()
        process.communicate()


def test_a_timeout_and_an_end_are_raised_here_too(settings: Settings) -> None:
    with Sandbox(engine="bubblewrap", settings=settings) as sandbox:
        with pytest.raises(SandboxTimeoutError, match=r"timed out after 0\.2 seconds"):
            sandbox.run_command("sleep 100", 0.2)
        assert sandbox.exec("sleep 100", timeout=0.2).cause is Cause.TIMEOUT
        assert sandbox.exec("true", timeout=math.inf).success
    with pytest.raises(SandboxGoneError):
        sandbox.exec("true")


def environment(settings: Settings) -> dict[str, str]:
    own = {"ATOLL_DATA_DIR": str(settings.data_dir), "ATOLL_RUN_DIR": str(settings.run_dir)}
    return {**os.environ, **own}


def run_python(script: str, settings: Settings) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], env=environment(settings), capture_output=True, text=True, timeout=50
    )


def is_running(mark: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == f"sleep\0{mark}\0".encode():
                return True
        except OSError:
            continue
    return False
