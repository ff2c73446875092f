"""Terminals: echo, the end of input, all of the output, the owner, the interrupt key."""

from __future__ import annotations

import signal

from agent.client import Connection
from atoll.guest.frames import StartFlag, Tag, Verb
from needs import needs


def test_a_terminal(host: Connection) -> None:
    stream = host.start(
        "a", "tty; stty size; read line; echo got $line; stty size", flags=StartFlag.PTY, rows=11, cols=22
    )
    host.until(stream, b"11 22")
    host.control(stream, Verb.RESIZE, [(Tag.ROWS, 33), (Tag.COLS, 44)])
    host.data(stream, b"typed\n")
    answer = host.finish(stream)
    assert b"got typed\r\n33 44\r\n" in answer.stdout
    assert answer.exit_code == 0


def test_the_end_of_input_on_a_terminal(host: Connection) -> None:
    stream = host.start("a", "cat; echo over", flags=StartFlag.PTY)
    host.data(stream, b"line\n")
    host.end(stream)
    assert b"over\r\n" in host.finish(stream).stdout


def test_all_output_of_a_terminal_comes(host: Connection) -> None:
    answer = host.run("a", "for i in $(seq 5000); do echo line $i; done", flags=StartFlag.PTY)
    assert answer.stdout.splitlines()[-1] == b"line 5000"
    assert len(answer.stdout.splitlines()) == 5000


def test_a_terminal_that_somebody_holds_open_does_not_delay_for_ever(host: Connection) -> None:
    answer = host.run("a", "setsid sleep 100 & echo done", flags=StartFlag.PTY)
    assert answer.stdout == b"done\r\n"
    host.kill("a")


@needs("root")
def test_a_terminal_belongs_to_its_user(host: Connection) -> None:
    answer = host.run("a", "stat -c %u $(tty)", flags=StartFlag.PTY, user="12345", cwd="/")
    assert answer.stdout.strip() == b"12345"


def test_interrupting_from_the_keyboard(host: Connection) -> None:
    stream = host.start("a", "echo ready; sleep 100", flags=StartFlag.PTY)
    host.until(stream, b"ready")
    host.data(stream, b"\3")
    assert host.finish(stream).end.int(Tag.TERM_SIGNAL) == signal.SIGINT
