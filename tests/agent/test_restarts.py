"""Processes that the agent starts again when they end."""

from __future__ import annotations

import errno
import os
import signal
import struct
from pathlib import Path

import pytest

from agent.client import EXIT, KILLED, Connection, eventually
from agent.conftest import Agent, wait_until_alone
from atoll.guest.frames import Op, RestartPolicy, StartFlag, Tag

ALWAYS, ON_FAILURE = int(RestartPolicy.ALWAYS), int(RestartPolicy.ON_FAILURE)
ENDED, RUNS, WAITS = 0, 1, 2
DETACHED = int(StartFlag.DETACH)


def restarts(host: Connection) -> dict[bytes, tuple[int, int, int, int]]:
    """How often each was started again, its state, and the cause and status of its last end."""
    data, found, at = host.call(Op.RESTARTS).body, {}, 0
    while at < len(data):
        (length,) = struct.unpack_from("<H", data, at)
        found[data[at + 2 : at + 2 + length]] = struct.unpack_from("<IBBH", data, at + 2 + length)
        at += 2 + length + 8
    return found


def counted(host: Connection, id: bytes = b"web") -> int:
    return restarts(host)[id][0]


def output(host: Connection, id: str = "web") -> bytes:
    """What it has written so far, on stderr."""
    stream = host.open(Op.ATTACH, [(Tag.ID, id)])
    text = host.until(stream, b"starts again", channel=2)
    host.send(6, stream)
    host.finish(stream)
    return text


def test_a_process_that_ends_is_started_again(host: Connection, tmp_path: Path) -> None:
    line = f"echo run >> {tmp_path}/runs; exit 3"
    host.run("web", line, flags=DETACHED, restart=ALWAYS)
    eventually(lambda: counted(host) >= 2 and (tmp_path / "runs").read_text().count("run\n") >= 3)
    assert restarts(host)[b"web"][2:] == (EXIT, 3 << 8)
    assert b"ended with exit code 3; it starts again in 0.2 s" in output(host)


def test_it_is_started_again_although_nobody_is_connected(agent: Agent, tmp_path: Path) -> None:
    with agent.connect() as host:
        host.run("web", f"echo run >> {tmp_path}/runs; exit 0", flags=DETACHED, restart=ALWAYS)
    eventually(lambda: (tmp_path / "runs").exists() and (tmp_path / "runs").read_text().count("run\n") >= 3)


def test_the_waits_grow(host: Connection) -> None:
    host.run("web", "exit 1", flags=DETACHED, restart=ALWAYS)
    stream = host.open(Op.ATTACH, [(Tag.ID, "web")])
    said = host.until(stream, b"in 0.8 s", channel=2)
    assert said.index(b"in 0.2 s") < said.index(b"in 0.4 s") < said.index(b"in 0.8 s")


def test_success_ends_what_is_restarted_on_failure_only(host: Connection, tmp_path: Path) -> None:
    line = f"echo run >> {tmp_path}/runs; test $(wc -l < {tmp_path}/runs) -ge 2"
    answer = host.run("web", line, restart=ON_FAILURE)
    assert (answer.exit_code, answer.cause) == (0, EXIT)
    assert (tmp_path / "runs").read_text() == "run\nrun\n"
    assert restarts(host)[b"web"] == (1, ENDED, EXIT, 0)


def test_a_program_that_does_not_exist_is_not_tried_again(host: Connection) -> None:
    answer = host.run("web", "no-such-program", "argument", restart=ALWAYS)
    assert answer.exit_code == 127
    assert restarts(host)[b"web"][:2] == (0, ENDED)


def test_what_it_left_running_is_ended_first(host: Connection, agent: Agent) -> None:
    host.run("web", "setsid sleep 1000 & exit 1", flags=DETACHED, restart=ALWAYS)
    eventually(lambda: counted(host) >= 2)
    host.kill("web")
    wait_until_alone(agent)


@pytest.mark.parametrize("line", ["exit 1", "sleep 1000"], ids=["waiting", "running"])
def test_a_kill_ends_it_for_good(host: Connection, agent: Agent, line: str) -> None:
    host.run("web", line, flags=DETACHED, restart=ALWAYS)
    state = WAITS if line == "exit 1" else RUNS
    eventually(lambda: restarts(host)[b"web"][1] == state)
    assert host.kill("web").end is not None
    assert host.call(Op.ATTACH, [(Tag.ID, "web")]).cause == KILLED
    assert restarts(host)[b"web"][1] == ENDED
    wait_until_alone(agent)
    assert host.call(Op.RELEASE, [(Tag.ID, "web")]).end is not None
    assert restarts(host) == {}


def test_another_signal_restarts_it(host: Connection) -> None:
    host.run("web", "exec sleep 1000", flags=DETACHED, restart=ALWAYS)
    eventually(lambda: restarts(host)[b"web"][1] == RUNS)
    host.kill("web", signal.SIGTERM)
    eventually(lambda: restarts(host)[b"web"][:2] == (1, RUNS))
    assert restarts(host)[b"web"][3] == signal.SIGTERM


def test_the_death_of_its_supervisor_restarts_it(host: Connection, agent: Agent, tmp_path: Path) -> None:
    host.run("web", f"echo $PPID > {tmp_path}/parent; exec sleep 1000", flags=DETACHED, restart=ALWAYS)
    eventually(lambda: (tmp_path / "parent").exists() and (tmp_path / "parent").read_text())
    host.run("kill", f"kill -9 {(tmp_path / 'parent').read_text()}")
    eventually(lambda: restarts(host)[b"web"][:2] == (1, RUNS))
    host.kill("web")
    wait_until_alone(agent)


def test_an_attached_stream_sees_the_output_of_all_runs(host: Connection, tmp_path: Path) -> None:
    stream = host.start("web", f"echo run $(wc -l < {tmp_path}/n); echo >> {tmp_path}/n; exit 1", restart=ALWAYS)
    (tmp_path / "n").touch()
    seen = host.until(stream, b"run 2\n")
    assert seen.index(b"run 1\n") < seen.index(b"run 2\n")
    host.kill("web")
    assert host.finish(stream).cause == KILLED


def test_what_needs_input_or_has_a_deadline_cannot_be_restarted(host: Connection) -> None:
    assert host.run("a", "true", restart=ALWAYS, flags=int(StartFlag.STDIN)).errno == errno.EINVAL
    assert host.run("b", "true", restart=ALWAYS, flags=int(StartFlag.PTY)).errno == errno.EINVAL
    assert host.run("c", "true", restart=ALWAYS, deadline_ms=100).errno == errno.EINVAL
    assert host.run("d", "true", restart=7).errno == errno.EINVAL
    assert restarts(host) == {}


def test_a_work_directory_that_vanished_is_waited_for(host: Connection, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    host.run("web", "test -e stay && exec sleep 1000; exit 1", flags=DETACHED, restart=ALWAYS, cwd=os.fsencode(folder))
    folder.rmdir()
    eventually(lambda: counted(host) >= 2)
    folder.mkdir()
    (folder / "stay").touch()
    eventually(lambda: restarts(host)[b"web"][1] == RUNS)
    host.kill("web")


def test_many_restarts_leave_nothing(host: Connection, agent: Agent) -> None:
    """Many at once, each with a buffer that is bounded."""
    for number in range(20):
        host.run(f"flood-{number}", "head -c 100000 /dev/zero; exit 1", flags=DETACHED, restart=ALWAYS, keep=4096)
    eventually(lambda: min(counted(host, f"flood-{number}".encode()) for number in range(20)) >= 2)
    for number in range(20):
        host.kill(f"flood-{number}")
    wait_until_alone(agent)
