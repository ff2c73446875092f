"""Sudo: the program asks the agent, which starts the command for those who may."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.client import Answer, Connection, eventually
from agent.conftest import Agent, wait_until_alone
from atoll.guest.frames import Op, Tag
from needs import needs

pytestmark = needs("root")
ACCOUNTS = "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\nother:x:1001:1001::/tmp:/bin/sh\n"
RUDE = """
import array, os, socket, struct, sys
line = socket.socket(socket.AF_UNIX)
line.connect("/run/atoll/sudo.socket")
sent, fds, forged = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
line.recv(1)
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * fds))] if fds else []
if forged >= 0:
    rights.append((socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("iII", os.getpid(), forged, forged)))
line.sendmsg([sent], rights)
line.shutdown(socket.SHUT_WR)
print(line.recv(100).hex() or "closed")
"""


@pytest.fixture
def sudo(agent: Agent, host: Connection, agent_builds: dict[str, Path], build: str) -> Iterator[str]:
    """The path of the program. The files that the agent makes and reads are in mounts of its own."""
    program, accounts = agent.root / "sudo", agent.root / "accounts"
    shutil.copy(agent_builds[build], program)
    accounts.write_text(ACCOUNTS)
    for path, mode in ((agent.root.parent, 0o755), (agent.root, 0o755), (program, 0o755), (accounts, 0o644)):
        path.chmod(mode)
    done = host.run("mounts", f"mount -t tmpfs tmpfs /run && mount --bind {accounts} /etc/passwd")
    assert done.exit_code == 0, done.stderr
    assert host.call(Op.SUDO, [(Tag.USER, "user")]).end is not None
    yield f"env ASAN_OPTIONS=detect_leaks=0 {program}" if build == "sanitizer" else str(program)
    assert host.call(Op.SUDO).end is not None


_NUMBERS = itertools.count()


def run(host: Connection, line: str, user: str = "user") -> Answer:
    """Each has an id of its own: one cannot be released as long as something of it still runs."""
    id = f"line-{next(_NUMBERS)}"
    answer = host.run(id, line, user=user, cwd="/tmp", env="TERM=vt100")
    host.call(Op.RELEASE, [(Tag.ID, id)])
    return answer


def test_the_user_becomes_root_and_others_do_not(host: Connection, sudo: str) -> None:
    assert run(host, f"{sudo} id -u").stdout == b"0\n"
    assert run(host, f"{sudo} id -u", user="0").stdout == b"0\n"
    refused = run(host, f"{sudo} id -u", user="other")
    assert (refused.stdout, refused.exit_code) == (b"", 1)
    assert refused.stderr == b"sudo: this user may not become another one in this sandbox\n"


def test_exit_codes_signals_and_streams_are_those_of_the_command(host: Connection, sudo: str) -> None:
    done = run(host, f"echo in | {sudo} sh -c 'cat; echo err >&2; exit 7'")
    assert (done.stdout, done.stderr, done.exit_code) == (b"in\n", b"err\n", 7)
    assert run(host, f"{sudo} sh -c 'kill -TERM $$'; echo $?").stdout == b"143\n"
    missing = run(host, f"{sudo} no-such-program")
    assert (missing.exit_code, missing.stderr) == (1, b"sudo: no-such-program: command not found\n")


OPTIONS = (
    ("-u other id -un", "other"),
    ("-u '#1001' -- id -u", "1001"),
    ("A=1 B=2 sh -c 'echo $A$B'", "12"),
    ("sh -c 'echo $KEPT-$TERM-$PATH'", "-vt100-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("-E sh -c 'echo $KEPT $HOME $USER'", "yes /root root"),
    ("--preserve-env=KEPT,X sh -c 'echo $KEPT'", "yes"),
    ("sh -c 'echo $SUDO_USER $SUDO_UID $SUDO_GID $SUDO_COMMAND'", "user 1000 1000 sh"),
    ("pwd", "/tmp"),
    ("-i -u other sh -c pwd", "/tmp"),
    ("-i echo 'a  b' '$HOME'", "a  b /root"),
    ("-s -- echo '$HOME;' x", "/root; x"),
    ("-nv && echo yes", "yes"),
    ("-k && echo yes", "yes"),
)


def test_the_options_of_sudo(host: Connection, sudo: str) -> None:
    for line, expected in OPTIONS:
        answer = run(host, f"export KEPT=yes; {sudo} {line}")
        assert answer.stdout.decode() == f"{expected}\n", (line, answer.stderr)


def test_a_signal_is_passed_on_and_a_dead_caller_ends_the_command(host: Connection, agent: Agent, sudo: str) -> None:
    line = "trap 'echo got; exit 3' TERM; echo up; while :; do sleep 0.02; done"
    stream = host.start("a", f'exec {sudo} sh -c "{line}"', user="user")
    host.until(stream, b"up")
    host.kill("a", 15)
    answer = host.finish(stream)
    assert (answer.stdout, answer.exit_code) == (b"got\n", 3)
    stream = host.start("b", f'exec {sudo} sh -c "echo up; setsid sleep 1000; true"', user="user")
    host.until(stream, b"up")
    host.kill("b")
    host.finish(stream)
    wait_until_alone(agent)


def test_a_terminal_of_its_own(host: Connection, sudo: str) -> None:
    """It has the size of the caller's, and Ctrl-C ends the command and not the caller's shell."""
    stream = host.start("t", "exec sh -i", flags=2, user="user", rows=33, cols=99)
    host.until(stream, b"$ ")
    # One program does all: a shell would go on if Ctrl-C came while the program before it was ending.
    show = "import os, time; size = os.get_terminal_size(0); print(size.lines, size.columns, os.ttyname(0), flush=True)"
    host.data(stream, f"{sudo} python3 -c '{show}; time.sleep(1000)'\n".encode())
    assert b"33 99" in host.until(stream, b"/dev/pts/")
    host.data(stream, b"\x03")
    host.until(stream, b"$ ")
    host.data(stream, b"echo after-$((1+1))\n")
    host.until(stream, b"after-2")
    host.kill("t")


RUDE_REQUESTS = (
    ("", 0),
    ("00" * 8, 3),  # no magic
    ("73756431" + "ffffffff", 3),  # too long
    ("73756431" + "08000000" + "0200010000ff7878", 3),  # a field that is longer than all
    ("73756431" + "07000000" + "020001000000" + "41", 0),  # no descriptors
    ("73756431" + "07000000" + "020001000000" + "41", 2),
    ("73756431" + "07000000" + "020001000000" + "41", 9),
)


def test_what_is_no_request_is_refused(host: Connection, agent: Agent, sudo: str) -> None:
    before = agent.descriptors()
    script = agent.root / "rude.py"
    script.write_text(RUDE)
    for sent, fds in RUDE_REQUESTS:
        answer = run(host, f"python3 {script} '{sent}' {fds} -1")
        assert answer.exit_code == 0, answer.stderr
        assert answer.stdout.strip() in (b"closed", b"0300000001000000", b"0400000047000000"), answer.stdout
        eventually(lambda: agent.descriptors() == before)
    assert run(host, f"{sudo} id -u").stdout == b"0\n"


def test_nobody_can_say_that_he_is_somebody_else(host: Connection, agent: Agent, sudo: str) -> None:
    script = agent.root / "rude.py"
    script.write_text(RUDE.replace("line.recv(1)", "line.recv(1) or print('closed')"))
    for forged in (-1, 1000, 0):
        answer = run(
            host, f"python3 {script} {'73756431' + '07000000' + '020001000000' + '41'} 3 {forged}", user="other"
        )
        assert b"01000000" not in answer.stdout, answer


def test_hundreds_of_calls_leave_nothing(host: Connection, agent: Agent, sudo: str, build: str) -> None:
    before, count = agent.descriptors(), 40 if build == "sanitizer" else 300
    line = f"for i in $(seq {count}); do {sudo} true || exit 1; done; echo done"
    assert run(host, line).stdout == b"done\n"
    eventually(lambda: agent.descriptors() == before)
    wait_until_alone(agent)


def test_many_callers_that_say_nothing_are_turned_away(host: Connection, agent: Agent, sudo: str) -> None:
    """They are given up after a while, and then others have their turn."""
    hold = "import socket, time\nlines = [socket.socket(socket.AF_UNIX) for _ in range(200)]\n"
    hold += "for line in lines:\n    line.setblocking(False)\n    try: line.connect('/run/atoll/sudo.socket')\n"
    hold += "    except OSError: pass\nprint('held', flush=True)\ntime.sleep(1000)"
    script = agent.root / "hold.py"
    script.write_text(hold)
    stream = host.start("hold", f"exec python3 {script}", user="user")
    host.until(stream, b"held")
    assert agent.descriptors() < 150
    host.kill("hold")
    host.finish(stream)
    assert run(host, f"{sudo} id -u").stdout == b"0\n"
