"""The agent as PID 1 of a namespace on this machine, in both its builds: the released one, and one that watches itself.

Tests here start what forks without end and does all it can to get away. So nothing may depend on the agent, nor on this
harness: when the agent dies the kernel kills all that is in its namespace, and when the process of these tests dies, in
whatever way, the kernel kills the agent (see `ENCLOSED`).

The sanitizer build makes every test here also a test for memory errors, undefined behaviour and leaks: any report fails
the test in which it was made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.client import Connection, eventually
from atoll import agent_binary
from atoll.guest.frames import Tag
from needs import need

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = REPOSITORY / "native"
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:exitcode=99:allocator_may_return_null=1:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
ENCLOSED = [
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"),
    *(() if os.geteuid() == 0 else ("--user", "--map-root-user")),
    "--",
]


@dataclass
class Agent:
    """Numbers of processes are those that this machine knows them by, not those that they see themselves."""

    build: str
    root: Path
    address: str
    log: Path
    mark: str
    enclosure: subprocess.Popen[bytes]
    pid: int
    handle: int
    """Of the agent itself: a number can be used again, and then a signal would hit somebody else."""
    connections: list[Connection] = field(default_factory=list)

    def connect(self, grant: bool = True) -> Connection:
        self.connections.append(Connection(dial(self.address), grant))
        return self.connections[-1]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def private_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))

    def sockets(self) -> int:
        """The listening one, connections, and ports that streams are joined to."""
        found = 0
        for number in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/{self.pid}/fd/{number}").startswith("socket:")
        return found

    def children(self) -> list[int]:
        """Supervisors, and whatever else is below the agent itself."""
        return children_of(self.pid)

    def others(self) -> list[int]:
        """Every process in the sandbox but the agent, dead or alive, by the number seen inside."""
        return [int(name) for name in os.listdir(f"/proc/{self.pid}/root/proc") if name.isdigit() and name != "1"]

    def finish(self) -> None:
        for connection in self.connections:
            connection.close()
        if self.enclosure.poll() is None:
            # What only the kernel's list of events points to looks leaked: let the connections go first.
            eventually(lambda: self.enclosure.poll() is not None or self.sockets() <= 1, "the end of all connections")
            if self.build == "sanitizer":  # it looks for leaks at its end
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.handle, signal.SIGTERM)
            else:
                self.enclosure.kill()
        code = self.enclosure.wait(timeout=30)
        report = self.log.read_text(errors="replace")
        assert code in (0, -signal.SIGKILL), f"the agent ended with {code}:\n{report}"
        assert not report, report

    def destroy(self) -> None:
        """Whatever has happened before."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        self.enclosure.kill()
        self.enclosure.wait()
        select.select([self.handle], [], [], 30)  # it ends when all else in its namespace has
        os.close(self.handle)


def dial(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    return sock


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="session")
def agent_builds() -> dict[str, Path]:
    need("cc", "make")
    (SOURCES / "build").mkdir(exist_ok=True)
    with (SOURCES / "build" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "-C", str(SOURCES), "agent"], check=True)
    return {
        "release": agent_binary.path(),
        "sanitizer": SOURCES / "build" / "atoll-agent-sanitizer",
    }


@contextlib.contextmanager
def running_agent(build: str, builds: dict[str, Path], folder: Path) -> Iterator[Agent]:
    root, address, log = folder / "work", str(folder / "agent"), folder / "log"
    root.mkdir()
    mark = f"atoll-test-{uuid.uuid4().hex}"
    # Nothing of the runner's environment: a command must see only what the test gave it.
    environment = {"PATH": os.environ["PATH"], "ATOLL_TEST_MARK": mark, **SANITIZER_OPTIONS}
    with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as messages:
        listener.bind(address)
        listener.listen(128)
        words = [str(builds[build]), "--listen-fd", str(listener.fileno()), "--work-dir", str(root)]
        enclosure = subprocess.Popen(
            [*ENCLOSED, *words],
            pass_fds=[listener.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
            start_new_session=True,  # as in a sandbox; a scheduler may give each session the same share
        )
    try:
        with Connection(dial(address)) as first:
            assert first.hello().int(Tag.PID) == 1, "it would not be alone"
        (pid,) = children_of(enclosure.pid)
        agent = Agent(build, root, address, log, mark, enclosure, pid, os.pidfd_open(pid))
    except BaseException:
        enclosure.kill()
        enclosure.wait()
        raise
    try:
        eventually(lambda: agent.sockets() == 1)
        yield agent
        agent.finish()
    finally:
        agent.destroy()


@pytest.fixture(params=["release", "sanitizer"])
def build(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where possible: some tests make thousands of files."""
    fast = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="at-", dir=fast if os.access(fast, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def agent(build: str, agent_builds: dict[str, Path], tmp_path: Path) -> Iterator[Agent]:
    with running_agent(build, agent_builds, tmp_path) as agent:
        yield agent


@pytest.fixture
def release_agent(agent_builds: dict[str, Path], tmp_path: Path) -> Iterator[Agent]:
    """For what a sanitizer distorts: memory and very many processes."""
    with running_agent("release", agent_builds, tmp_path) as agent:
        yield agent


@pytest.fixture
def host(agent: Agent) -> Connection:
    """A connection to the agent."""
    return agent.connect()


Compile = Callable[[str], str]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """`compiled(source)` is the path of a program made from that text."""
    folder = tmp_path_factory.mktemp("programs")

    def compile(source: str) -> str:
        program = folder / f"{abs(hash(source)):x}"
        if not program.exists():
            words = ["cc", "-O1", "-static", "-x", "c", "-o", str(program), "-"]
            subprocess.run(words, input=source.encode(), check=True)
        return str(program)

    return compile


def wait_until_alone(agent: Agent) -> None:
    """Nothing that a command started is left."""
    eventually(lambda: not agent.others(), "the end of everything that was started")
