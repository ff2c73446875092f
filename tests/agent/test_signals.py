"""Deadlines and signals: what they kill, what they spare, and who waits for that."""

from __future__ import annotations

import errno
import signal

from agent.client import KILLED, TIMEOUT, Connection, eventually, open_bytes
from agent.conftest import Agent
from atoll.guest.frames import EventKind, FrameType, Op, StartFlag, Tag, Verb, encode_fields


def test_the_deadline_kills(host: Connection) -> None:
    answer = host.run("a", "echo before; trap '' TERM; sleep 100; echo after", deadline_ms=200)
    assert (answer.cause, answer.stdout, answer.end.int(Tag.TERM_SIGNAL)) == (TIMEOUT, b"before\n", 9)


def test_the_deadline_with_grace_asks_first(host: Connection) -> None:
    polite = "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.01; done"
    answer = host.run("a", polite, deadline_ms=200, grace_ms=5000)
    assert (answer.cause, answer.stdout, answer.exit_code) == (TIMEOUT, b"up\nbye\n", 5)
    stubborn = host.run("b", "trap '' TERM; while :; do sleep 0.01; done", deadline_ms=100, grace_ms=100)
    assert (stubborn.cause, stubborn.end.int(Tag.TERM_SIGNAL)) == (TIMEOUT, 9)


def test_grace_does_not_spare_what_the_process_leaves(agent: Agent, host: Connection) -> None:
    command = "setsid sleep 100 & trap 'exit 0' TERM; while :; do sleep 0.01; done"
    assert host.run("a", command, deadline_ms=100, grace_ms=5000).cause == TIMEOUT
    assert agent.others() == []


def test_signals(host: Connection) -> None:
    stream = host.start("a", "trap 'echo usr1' USR1; echo up; while :; do sleep 0.01; done")
    host.until(stream, b"up\n")
    assert host.kill("a", signal.SIGUSR1).end is not None
    host.until(stream, b"usr1\n")
    host.control(stream, Verb.SIGNAL, [(Tag.SIGNAL, signal.SIGUSR1)])
    host.until(stream, b"usr1\n")
    assert host.kill("a", 65).errno == errno.EINVAL
    assert host.kill("nobody").errno == errno.ENOENT
    assert host.kill("a", signal.SIGTERM).end is not None
    assert host.finish(stream).end.int(Tag.TERM_SIGNAL) == signal.SIGTERM
    assert host.kill("a", signal.SIGTERM).errno == errno.ESRCH
    eventually(lambda: host.kill("a").last.type is FrameType.ERROR)
    assert host.kill("a").errno == errno.ESRCH


def test_sparing_kills_only_what_the_process_started(host: Connection) -> None:
    command = 'sleep 100 & setsid sh -c "sleep 100 & sleep 100" & echo up; wait; echo alone; read x; echo $x'
    stream = host.start("a", command, flags=StartFlag.STDIN)
    host.until(stream, b"up\n")
    seen = b""
    while b"alone" not in seen:
        assert host.kill("a", 9, flags=1).end is not None
        host.hello()
        frame = host.next(stream)
        seen += frame.payload
    host.data(stream, b"still here\n")
    assert host.finish(stream).stdout == b"still here\n"


def test_many_wait_for_one_kill(host: Connection) -> None:
    stream = host.start("a", "sleep 100", flags=StartFlag.STARTED)
    host.event(stream, EventKind.STARTED)
    kill = encode_fields([(Tag.ID, "a"), (Tag.SIGNAL, 9)])
    host.sock.sendall(b"".join(open_bytes(10 + n, Op.KILL, kill) for n in range(12)))
    ends = [host.finish(10 + n).last.type for n in range(12)]
    assert ends.count(FrameType.END) >= 8
    assert host.finish(stream).cause == KILLED
