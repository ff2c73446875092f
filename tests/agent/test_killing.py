"""The whole tree dies, whatever it does to get away, and the answer comes."""

from __future__ import annotations

import errno
import os
import signal
import time

import pytest

from agent.client import Connection, eventually
from agent.conftest import Agent, Compile, wait_until_alone
from atoll.guest.frames import EventKind, FrameType, Op, StartFlag, Tag

TIMEOUT, KILLED, LOST = 3, 4, 5

HOPPER = r"""
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
/* Forks, starts a session of its own and exits, as fast as it can: no process of it lives for a millisecond. */
int main(int argc, char **argv)
{
    int width = argc > 1 ? atoi(argv[1]) : 1;
    for (int i = 1; i < width; i++)
        if (fork() == 0)
            break;
    signal(SIGTERM, SIG_IGN);
    if (write(1, "up\n", 3) < 0)
        return 1;
    for (;;) {
        pid_t pid = fork();
        if (pid > 0)
            _exit(0);
        if (pid == 0)
            setsid();
    }
}
"""

THREADS = r"""
#include <pthread.h>
#include <unistd.h>
static void *begin(void *unused)
{
    if (fork() == 0)
        for (;;)
            pause();
    for (;;)
        pause();
    return unused;
}
int main(void)
{
    pthread_t thread;
    for (int i = 0; i < 5; i++)
        pthread_create(&thread, 0, begin, 0);
    sleep(1);
    if (write(1, "up\n", 3) < 0)
        return 1;
    for (;;)
        pause();
}
"""

STUBBORN = "trap '' TERM HUP INT; (setsid sh -c 'trap \"\" TERM; sleep 100 & sleep 100' &) ; echo up; sleep 100"


@pytest.mark.parametrize("how", ["kill", "deadline"])
def test_what_forked_away_and_ignores_signals_dies_too(agent: Agent, host: Connection, how: str) -> None:
    stream = host.start("a", STUBBORN, deadline_ms=300 if how == "deadline" else 0)
    host.until(stream, b"up\n")
    if how == "kill":
        assert host.kill("a").end is not None
        assert agent.others() == []
    assert host.finish(stream).cause == (KILLED if how == "kill" else TIMEOUT)
    assert agent.others() == []


def test_what_an_ended_process_left_behind_can_be_killed(agent: Agent, host: Connection) -> None:
    answer = host.run("a", "(setsid sleep 100 &); (sleep 100 &); echo done")
    assert (answer.stdout, answer.exit_code) == (b"done\n", 0)
    assert len(agent.others()) >= 3  # two and their supervisor
    assert host.kill("a").end is not None
    assert agent.others() == []
    assert host.kill("a").errno == errno.ESRCH


def test_a_process_that_left_something_is_forgotten_when_that_ends(agent: Agent, host: Connection) -> None:
    host.run("a", "(setsid sleep 0.2 &)", flags=StartFlag.FORGET)
    eventually(lambda: not host.call(Op.PROCESSES).body)


@pytest.mark.parametrize("width", ["1", "8"])
def test_a_fork_hopper_is_caught(agent: Agent, host: Connection, compiled: Compile, width: str) -> None:
    stream = host.start("a", compiled(HOPPER), width)
    host.until(stream, b"up\n")
    assert host.kill("a").end is not None
    assert host.finish(stream).last.type is FrameType.END
    assert agent.others() == []


def test_children_of_other_threads_are_found(agent: Agent, host: Connection, compiled: Compile) -> None:
    program = compiled("#define _GNU_SOURCE\n" + THREADS)
    stream = host.start("a", program, "x")
    host.until(stream, b"up\n")
    assert host.kill("a").end is not None
    assert host.finish(stream).cause == KILLED
    assert agent.others() == []


def test_a_fork_bomb_dies(agent: Agent, host: Connection) -> None:
    bomb = "for n in $(seq 200); do for i in 1 2 3; do (setsid sh -c 'sleep 100' &); done; sleep 0.01; done; sleep 100"
    answer = host.run("a", bomb, deadline_ms=500)
    assert answer.cause == TIMEOUT
    assert agent.others() == []


# --- attacks on the supervisor


def test_killing_the_supervisor_ends_everything(agent: Agent, host: Connection) -> None:
    answer = host.run("a", "(setsid sleep 100 &); echo up; kill -9 $PPID; sleep 100")
    assert (answer.stdout, answer.cause, answer.end.int(Tag.TERM_SIGNAL)) == (b"up\n", LOST, 9)
    assert agent.others() == []
    assert host.run("b", "echo fine").stdout == b"fine\n"


def test_killing_the_supervisor_while_others_run_harms_only_oneself(agent: Agent, host: Connection) -> None:
    other = host.start("other", "echo up; sleep 1; echo fine")
    host.until(other, b"up\n")
    for n in range(20):
        assert host.run(f"a{n}", "(setsid sleep 100 &); kill -9 $PPID; sleep 100").cause == LOST
    assert host.finish(other).stdout == b"fine\n"


def test_what_is_left_behind_cannot_escape_by_killing_the_supervisor(agent: Agent, host: Connection) -> None:
    command = 'S=$PPID; (setsid sh -c "sleep 0.2; kill -9 $S; sleep 100" &); echo done'
    assert host.run("a", command).exit_code == 0
    wait_until_alone(agent)
    eventually(lambda: host.kill("a").errno == errno.ESRCH)


def test_hopping_after_killing_the_supervisor_does_not_help(agent: Agent, host: Connection, compiled: Compile) -> None:
    answer = host.run("a", f"S=$PPID; {compiled(HOPPER)} 1 & kill -9 $S; sleep 100")
    assert answer.cause == LOST
    assert agent.others() == []


def test_a_stopped_supervisor_goes_on(agent: Agent, host: Connection) -> None:
    answer = host.run("a", "kill -STOP $PPID; echo out; exit 3")
    assert (answer.stdout, answer.exit_code) == (b"out\n", 3)


def test_stopping_everything_does_not_outlast_the_deadline(agent: Agent, host: Connection) -> None:
    answer = host.run("a", "kill -STOP $PPID; kill -STOP 0", deadline_ms=300)
    assert answer.cause == TIMEOUT
    assert agent.others() == []


def test_a_supervisor_that_is_killed_at_birth(agent: Agent, host: Connection) -> None:
    """Whenever it is hit, before or after its command runs: the answer comes, and nothing stays."""
    for n in range(60):
        stream = host.start(f"a{n}", "sleep 100")
        until = time.monotonic() + (n % 20) * 0.0002
        while not agent.children() or time.monotonic() < until:
            pass
        for pid in agent.children():
            os.kill(pid, signal.SIGKILL)
        assert host.finish(stream).last.type in (FrameType.END, FrameType.ERROR)
    wait_until_alone(agent)
    host.hello()


def test_many_deadlines_at_once(agent: Agent, host: Connection) -> None:
    streams = [host.start(f"a{n}", STUBBORN, deadline_ms=700) for n in range(60)]
    for stream in streams:
        assert host.finish(stream).cause == TIMEOUT
    assert agent.others() == []


def test_the_connection_is_lost_during_a_kill(agent: Agent) -> None:
    with agent.connect() as host:
        stream = host.start("a", STUBBORN, flags=StartFlag.STARTED)
        host.event(stream, EventKind.STARTED)
        host.open(Op.KILL, [(Tag.ID, "a")])
    wait_until_alone(agent)
    agent.connect().hello()
