"""Processes: how they are started, fed, listened to and how they end."""

from __future__ import annotations

import errno
import hashlib
import os
import pwd
import resource
import signal
import struct

import pytest

from agent.client import EXIT, SIGNAL, Answer, Connection, eventually
from agent.conftest import Agent, Compile, wait_until_alone
from atoll.guest.frames import EventKind, Op, StartFlag, Tag, encode_fields
from needs import needs

STDIN, PTY, MERGE, STATUS = StartFlag.STDIN, StartFlag.PTY, StartFlag.MERGE, StartFlag.STATUS
STARTED, DETACH, FORGET = StartFlag.STARTED, StartFlag.DETACH, StartFlag.FORGET
needs_root = needs("root")


def listed(host: Connection) -> dict[bytes, bool]:
    """The processes that the agent knows, and whether they run."""
    data, found, at = host.call(Op.PROCESSES).body, {}, 0
    while at < len(data):
        (length,) = struct.unpack_from("<H", data, at)
        _, running, _ = struct.unpack_from("<QBQ", data, at + 2 + length)
        found[data[at + 2 : at + 2 + length]] = bool(running)
        at += 2 + length + 17
    return found


def release(host: Connection, id: str) -> Answer:
    return host.call(Op.RELEASE, [(Tag.ID, id)])


# --- the ordinary


def test_output_and_exit_code(host: Connection) -> None:
    answer = host.run("a", "echo out; echo err >&2; exit 3")
    assert (answer.stdout, answer.stderr, answer.exit_code, answer.cause) == (b"out\n", b"err\n", 3, EXIT)
    assert [answer.end.int(tag) for tag in (Tag.END_1, Tag.END_2, Tag.END_3)] == [4, 4, 0]
    assert answer.end.int(Tag.PID) > 1
    assert answer.end.int(Tag.DURATION_NS) > 0


def test_arguments_are_passed_as_they_are(host: Connection) -> None:
    words = ["printf", "%s|", "a b", "", "'", "$HOME", "\udcff"]
    fields: list[tuple[Tag, int | bytes | str]] = [(Tag.ID, "a"), *((Tag.ARG, word) for word in words)]
    assert host.call(Op.START, fields).stdout == b"a b||'|$HOME|\xff|"


def test_a_signal_is_reported(host: Connection) -> None:
    answer = host.run("a", "kill -SEGV $$")
    assert (answer.end.int(Tag.TERM_SIGNAL), answer.cause) == (signal.SIGSEGV, SIGNAL)
    assert Tag.EXIT_CODE not in answer.end


def test_merged_output_keeps_its_order(host: Connection) -> None:
    answer = host.run("a", "echo 1; echo 2 >&2; echo 3", flags=MERGE)
    assert (answer.stdout, answer.stderr) == (b"1\n2\n3\n", b"")


def test_input_reaches_the_process_and_ends(host: Connection) -> None:
    stream = host.start("a", "md5sum", flags=STDIN)
    host.data(stream, bytes(3_000_000))
    host.end(stream)
    assert host.finish(stream).stdout.split()[0].decode() == hashlib.md5(bytes(3_000_000)).hexdigest()
    assert host.run("b", "cat").stdout == b""  # without the flag there is nothing to read


def test_input_comes_through_whole(host: Connection) -> None:
    data = os.urandom(2_000_000)
    stream = host.start("a", "cat", flags=STDIN)
    host.data(stream, data)
    host.end(stream)
    assert host.finish(stream).stdout == data


def test_input_that_nobody_reads_does_not_get_stuck(host: Connection) -> None:
    stream = host.start("a", "exec <&-; sleep 0.2; echo done", flags=STDIN)
    host.data(stream, bytes(2_000_000))
    host.end(stream)
    assert host.finish(stream).stdout == b"done\n"


def test_environment_and_directory(host: Connection, agent: Agent) -> None:
    (agent.root / "sub").mkdir()
    fields = [(Tag.ID, "a"), (Tag.SHELL, 'echo "$A|$B|$ATOLL_TEST_MARK"; pwd'), (Tag.ENV, "A=1"), (Tag.ENV, "B=x=y")]
    answer = host.call(Op.START, [*fields, (Tag.ENV, "A=2"), (Tag.CWD, str(agent.root / "sub"))])
    assert answer.stdout.decode().split() == [f"2|x=y|{agent.mark}", str(agent.root / "sub")]
    assert host.run("b", "pwd").stdout.decode().strip() == str(agent.root)


@pytest.mark.parametrize("bad", ["nothing", "=x", "A=\0"])
def test_a_bad_variable_is_refused(host: Connection, bad: str) -> None:
    assert host.call(Op.START, [(Tag.ID, "a"), (Tag.ARG, "true"), (Tag.ENV, bad)]).errno == errno.EINVAL
    assert listed(host) == {}


@pytest.mark.parametrize(
    "fields", [[], [(Tag.ID, "")], [(Tag.ID, "x" * 65)], [(Tag.ID, "a")], [(Tag.ID, "a"), (Tag.ARG, "")]]
)
def test_a_start_without_id_or_command_is_refused(host: Connection, fields: list[tuple[Tag, str]]) -> None:
    if Tag.ARG not in dict(fields) and dict(fields).get(Tag.ID) != "a":
        fields = [*fields, (Tag.ARG, "true")]
    assert host.call(Op.START, fields).errno == errno.EINVAL
    assert listed(host) == {}


# --- what cannot be started


def test_programs_that_cannot_be_executed(host: Connection, agent: Agent) -> None:
    (agent.root / "plain").write_text("not a program")
    for id, word, code, reason in (
        ("a", "no-such-program", 127, b"not found"),
        ("b", "./no-such-program", 127, b"not found"),
        ("c", "./plain", 126, b"Permission denied"),
        ("d", "/", 126, b"Permission denied"),
    ):
        answer = host.run(id, word, "x")
        assert (answer.exit_code, answer.cause) == (code, EXIT)
        assert answer.stderr.startswith(b"atoll: " + word.encode())
        assert reason in answer.stderr
    (agent.root / "plain").chmod(0o755)
    assert host.run("e", "./plain", "x").exit_code == 126
    assert b"not found" in host.run("f", "no-such-program", "x", flags=MERGE).stdout
    assert host.run("g", "no-such-shell-command").exit_code == 127


def test_too_long_an_argument_list_is_a_result(host: Connection) -> None:
    answer = host.run("a", *["x"] * 2, cwd="/", env="A=" + "x" * 131_070)
    assert answer.exit_code == 127
    answer = host.run("b", "true", "x" * 131_072)
    assert answer.exit_code == 126
    assert b"too long" in answer.stderr


def test_a_directory_that_does_not_work_is_an_error(host: Connection, agent: Agent) -> None:
    (agent.root / "file").write_text("")
    answer = host.run("a", "true", cwd="/no/such")
    assert answer.errno == errno.ENOENT
    assert b"/no/such" in answer.last.fields.bytes(Tag.MESSAGE)
    # The same ID at once again: what failed is not remembered.
    assert host.run("a", "true", cwd=str(agent.root / "file")).errno == errno.ENOTDIR
    assert host.run("a", "echo now").stdout == b"now\n"


def test_a_failed_start_can_be_repeated_with_the_same_id(host: Connection) -> None:
    for _ in range(50):
        bad = host.start("a", "true", cwd="/no/such")
        assert host.finish(bad).errno == errno.ENOENT
        answer = host.run("a", "echo now")
        assert answer.stdout == b"now\n"
        eventually(lambda: not listed(host)[b"a"])
        assert release(host, "a").end is not None
        eventually(lambda: b"a" not in listed(host))  # its supervisor may end a moment later


@needs_root
def test_users(host: Connection, agent: Agent) -> None:
    agent.root.chmod(0o755)
    nobody = pwd.getpwnam("nobody")
    show = "echo $(id -u):$(id -g):$(id -G):$HOME:$USER"
    assert host.run("a", show, user="nobody", cwd="/").stdout.decode().strip() == (
        f"{nobody.pw_uid}:{nobody.pw_gid}:{nobody.pw_gid}:{nobody.pw_dir}:nobody"
    )
    assert host.run("b", "id -u; id -g; id -G", user="12345", cwd="/").stdout.split() == [b"12345"] * 3
    assert host.run("c", "id -u; id -g; id -G", user="12345:54321", cwd="/").stdout.split() == [
        b"12345",
        b"54321",
        b"54321",
    ]
    for id, bad in enumerate(("", "no-such-user", "-1", "4294967295", "1:", "1:x", ":1")):
        assert host.run(f"bad{id}", "true", user=bad, cwd="/").errno == errno.EINVAL
    private = agent.root / "private"
    private.mkdir(mode=0o700)
    assert host.run("d", "true", user="nobody", cwd=str(private)).errno == errno.EACCES


def test_limits_are_set(host: Connection) -> None:
    fields: list[tuple[Tag, int | bytes | str]] = [
        (Tag.ID, "a"),
        (Tag.SHELL, "ulimit -n; ulimit -f"),
        (Tag.RLIMIT, struct.pack("<QQQ", resource.RLIMIT_NOFILE, 77, 88)),
        (Tag.RLIMIT, struct.pack("<QQQ", resource.RLIMIT_FSIZE, 1024 * 4, 1024 * 4)),
    ]
    assert host.call(Op.START, fields).stdout.split() == [b"77", b"4"]
    for id, bad in (("b", b"123"), ("c", struct.pack("<QQQ", 99, 1, 1)), ("d", struct.pack("<QQQ", 7, 5, 3))):
        assert host.call(Op.START, [(Tag.ID, id), (Tag.ARG, "true"), (Tag.RLIMIT, bad)]).errno == errno.EINVAL
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = host.run("e", "ulimit -Sn; ulimit -Hn").stdout.decode().split()
    assert [word.replace("unlimited", str(resource.RLIM_INFINITY)) for word in shown] == [str(soft), str(hard)]


# --- what a process inherits


@pytest.mark.parametrize("flags", [0, STDIN, MERGE, STATUS, STDIN | STATUS, PTY, PTY | STATUS, STDIN | STARTED])
def test_a_process_inherits_its_own_descriptors_and_no_others(host: Connection, flags: int) -> None:
    host.start("other", "sleep 100", flags=STDIN | STATUS | STARTED)
    expected = {"0", "1", "2", "3"} | ({"9"} if flags & STATUS else set())  # 3 is how ls reads the directory
    stream = host.start("a", "ls", "/proc/self/fd", flags=flags)
    answer = host.finish(stream)
    assert set(answer.stdout.decode().split()) == expected


def test_a_process_starts_with_default_signals(agent: Agent, host: Connection) -> None:
    status = dict(
        line.split(":\t", 1) for line in host.run("a", "cat", "/proc/self/status").stdout.decode().splitlines()
    )
    assert {status[name].strip("0") for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")} == {""}


def test_a_process_leads_its_own_session(host: Connection) -> None:
    words = host.run("a", "cat", "/proc/self/stat").stdout.rsplit(b")", 1)[1].split()
    pid = host.run("b", "echo $$").end.int(Tag.PID)
    assert words[2] == words[3]  # group and session
    assert host.run("c", "echo $$; ps -o sid= $$ 2>/dev/null || true").stdout.split()[0] != str(pid).encode()


# --- identity


def test_starting_the_same_id_again_attaches(host: Connection, agent: Agent) -> None:
    first = host.run("a", "echo once >> count; echo out")
    again = host.run("a", "echo once >> count; echo out")
    assert first.stdout == again.stdout == b"out\n"
    assert again.event(EventKind.ATTACHED).int(Tag.PID) == first.end.int(Tag.PID)
    assert (agent.root / "count").read_text() == "once\n"


def test_processes_are_listed_and_released(host: Connection) -> None:
    host.run("a", "true")
    stream = host.start("b", "sleep 100", flags=STARTED)
    host.event(stream, EventKind.STARTED)
    eventually(lambda: listed(host) == {b"a": False, b"b": True})
    assert release(host, "b").errno == errno.EBUSY
    assert release(host, "a").end is not None
    eventually(lambda: listed(host) == {b"b": True})
    assert release(host, "a").errno == errno.ENOENT
    assert host.call(Op.ATTACH, [(Tag.ID, "a")]).errno == errno.ENOENT
    assert host.call(Op.PROCESSES).end.int(Tag.CAPACITY) == 4096


def test_forgotten_processes_vanish(host: Connection) -> None:
    for n in range(20):
        host.run(f"a{n}", "true", flags=FORGET)
    eventually(lambda: listed(host) == {})


def test_a_detached_process_goes_on(host: Connection) -> None:
    for id, flags in (("a", STARTED | DETACH), ("b", DETACH)):
        answer = host.run(id, "sleep 0.1; echo late; exit 4", flags=flags)
        assert answer.event(EventKind.STARTED).int(Tag.PID) > 1
        attached = host.call(Op.ATTACH, [(Tag.ID, id)])
        assert (attached.stdout, attached.exit_code) == (b"late\n", 4)


def test_a_process_survives_its_connection(agent: Agent) -> None:
    with agent.connect() as host:
        host.until(host.start("a", "echo early; sleep 0.2; echo late"), b"early\n")
    answer = agent.connect().call(Op.ATTACH, [(Tag.ID, "a")])
    assert (answer.stdout, answer.exit_code) == (b"early\nlate\n", 0)


def test_a_second_stream_takes_over(agent: Agent) -> None:
    one, two = agent.connect(), agent.connect()
    stream = one.start("a", "echo hi; sleep 0.3; echo there", flags=FORGET)
    one.until(stream, b"hi\n")
    answer = two.call(Op.ATTACH, [(Tag.ID, "a")])
    assert one.finish(stream).errno == errno.ESTALE
    assert answer.stdout == b"hi\nthere\n"


def test_taking_over_a_process_that_has_ended_and_is_to_be_forgotten(agent: Agent) -> None:
    """Its first stream has no credit left, so it is kept; the second gets all of it."""
    slow = agent.connect(grant=False)
    slow.start("a", "head -c 600000 /dev/zero", flags=FORGET)
    host = agent.connect()
    eventually(lambda: listed(host) == {b"a": False})
    assert len(host.call(Op.ATTACH, [(Tag.ID, "a")]).stdout) == 600_000
    eventually(lambda: listed(host) == {})


def test_releasing_a_process_ends_its_stream(agent: Agent) -> None:
    slow, host = agent.connect(grant=False), agent.connect()
    stream = slow.start("a", "head -c 600000 /dev/zero", flags=FORGET)
    eventually(lambda: listed(host) == {b"a": False})
    assert release(host, "a").end is not None
    assert slow.finish(stream).errno == errno.ESTALE


# --- many


def test_three_hundred_at_once(agent: Agent, host: Connection) -> None:
    streams = [host.start(f"p{n}", f"echo {n}; sleep 0.3; echo {n} >&2", flags=FORGET) for n in range(300)]
    for n, stream in enumerate(streams):
        answer = host.finish(stream)
        assert answer.stdout == answer.stderr == f"{n}\n".encode()
    eventually(lambda: listed(host) == {})
    wait_until_alone(agent)


def test_the_oldest_ended_process_makes_way(host: Connection) -> None:
    """The agent keeps 4,096; running ones are never dropped."""
    keep = encode_fields([(Tag.KEEP, 0)])
    runner = host.start("runner", "sleep 100", flags=STARTED)
    host.event(runner, EventKind.STARTED)
    last = 0
    for first in range(0, 4097, 64):
        streams = [
            host.open_raw(Op.START, encode_fields([(Tag.ID, f"p{n}"), (Tag.ARG, "/no/such")]) + keep)
            for n in range(first, min(first + 64, 4097))
        ]
        for stream in streams:
            host.finish(stream)
        last = streams[-1]
    assert last
    known = listed(host)
    assert len(known) == 4096
    assert b"runner" in known
    assert b"p0" not in known
    assert b"p4096" in known


def test_no_zombies(agent: Agent, host: Connection) -> None:
    for n in range(30):
        host.run(f"a{n}", "sleep 0.001 & true; (sleep 0.001 & ) ; exit 0", flags=FORGET)
    eventually(lambda: agent.children() == [])
    assert agent.others() == []


def test_statistics(agent: Agent, host: Connection) -> None:
    before = host.call(Op.STATS).end
    host.run("a", "head -c 12345 /dev/zero")
    after = host.call(Op.STATS).end
    assert after.int(Tag.OUTPUT_BYTES) - before.int(Tag.OUTPUT_BYTES) == 12345
    assert after.int(Tag.CONNECTIONS) == 1
    assert after.int(Tag.STREAMS) == 1
    assert after.int(Tag.PROCESSES) == 1 + len(agent.others())


def test_the_compiled_fixture_is_static(compiled: Compile, host: Connection) -> None:
    program = compiled("int main(void) { return 7; }")
    assert host.run("a", program, "x").exit_code == 7
