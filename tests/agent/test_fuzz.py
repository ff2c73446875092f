"""Noise that is almost sense, against the build that watches itself.

`ATOLL_FUZZ_S` says for how long, `ATOLL_FUZZ_SEED` from where. The agent runs in bubblewrap: namespaces of its own, a
root that exists only in memory, and nothing of this machine that it could write to but its messages. It must not be
root outside either, under whatever name inside: the devices in there are this machine's own, and their owner may
change their modes.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent.client import PATIENCE_S, Connection, eventually
from agent.conftest import SANITIZER_OPTIONS, children_of, dial
from agent.fuzzing import Fuzzer
from needs import need

SECONDS = float(os.environ.get("ATOLL_FUZZ_S", "60"))
SEED = int(os.environ.get("ATOLL_FUZZ_SEED", "0")) or random.SystemRandom().getrandbits(30) * 1000
SESSIONS_PER_AGENT = 200
HOSTS = 4
"""At once."""
PREPARE = (
    "mkdir -p d/e; echo content > f; head -c 3000000 /dev/zero > big; ln -s d l; ln -s loop loop; mkfifo fifo; exec"
)


NOBODY = 65534


def enclosure(binary: Path, listener: int) -> list[str]:
    somebody_else = (
        ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"] if os.geteuid() == 0 else []
    )
    here = ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc/passwd", "/etc/passwd", "--ro-bind", str(binary), "/agent"]
    for name in ("bin", "sbin", "lib", "lib64"):
        here += ["--symlink", f"usr/{name}", f"/{name}"]
    walls = [
        "--unshare-all",
        "--unshare-user",
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--cap-drop",
        "ALL",
        "--die-with-parent",
    ]
    here += ["--proc", "/proc", "--dev", "/dev", "--size", str(256 << 20), "--tmpfs", "/work", "--chdir", "/work"]
    agent = f"{PREPARE} /agent --listen-fd {listener} --work-dir /work"
    return [*somebody_else, "bwrap", *walls, *here, "--as-pid-1", "--new-session", "--", "/bin/sh", "-c", agent]


@contextlib.contextmanager
def enclosed_agent(binary: Path, folder: Path) -> Iterator[str]:
    """Gives the address of an agent that is watched until its end."""
    address, log = str(folder / "agent"), folder / "log"
    folder.mkdir()
    binary = Path(shutil.copy(binary, folder / "binary"))  # where anybody can reach it
    options = SANITIZER_OPTIONS | {"ASAN_OPTIONS": SANITIZER_OPTIONS["ASAN_OPTIONS"] + ":hard_rss_limit_mb=3000"}
    with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as messages:
        listener.bind(address)
        listener.listen(128)
        words = enclosure(binary, listener.fileno())
        process = subprocess.Popen(
            words,
            pass_fds=[listener.fileno()],
            env={"PATH": "/usr/bin:/bin", **options},
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
        )
    try:
        with Connection(dial(address)) as first:
            first.hello()
        (pid,) = children_of(process.pid)
        handle = os.pidfd_open(pid)
        try:
            yield address
            eventually(lambda: process.poll() is not None or sockets(pid) <= 1, "the end of all connections")
            assert len(os.listdir(f"/proc/{pid}/fd")) < 200, "descriptors are lost"
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            code = process.wait(PATIENCE_S)
            assert code == 0, f"the agent ended with {code}:\n{log.read_text(errors='replace')}"
        finally:
            process.kill()
            process.wait()
            select.select([handle], [], [], PATIENCE_S)
            os.close(handle)
    except Exception as error:
        error.add_note(log.read_text(errors="replace")[-6000:])
        raise
    finally:
        process.kill()
        process.wait()


def sockets(pid: int) -> int:
    found = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    return found


def say(address: str, words: bytes, chance: random.Random) -> None:
    """In pieces, listening now and then; the end comes at any time."""
    with dial(address) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
        sock.settimeout(0.03)
        at, deaf = 0, chance.random() < 0.3
        while at < len(words):
            length = chance.choice([1, 11, 12, 13, 100, 5000, 100_000, 1 << 20])
            sock.sendall(words[at : at + length])
            at += length
            while not deaf and select.select([sock], [], [], 0)[0]:
                if not sock.recv(1 << 18):
                    return
        if chance.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 18):
                pass
        elif chance.random() < 0.3:
            time.sleep(chance.random() * 0.05)


def devices() -> dict[str, int]:
    return {name: os.stat(f"/dev/{name}").st_mode for name in ("null", "zero", "full", "random", "urandom", "tty")}


def session(address: str, seed: int) -> None:
    try:
        say(address, Fuzzer(seed).session(), random.Random(~seed))
        if seed % 10 == 0:
            with Connection(dial(address)) as host:
                host.hello()
    except Exception as error:
        error.add_note(f"session {seed}")
        raise


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_the_agent_survives_everything_that_is_said_to_it(agent_builds: dict[str, Path], tmp_path: Path) -> None:
    need("bwrap")
    tmp_path.chmod(0o755)
    before = devices()
    until, seed, rounds = time.monotonic() + SECONDS, SEED, 0
    with ThreadPoolExecutor(HOSTS) as hosts:
        while time.monotonic() < until:
            try:
                with enclosed_agent(agent_builds["sanitizer"], tmp_path / str(rounds)) as address:
                    for _ in range(0, SESSIONS_PER_AGENT, HOSTS * 5):
                        list(hosts.map(session, [address] * HOSTS * 5, range(seed, seed + HOSTS * 5)))
                        seed += HOSTS * 5
            except Exception as error:
                error.add_note(f"ATOLL_FUZZ_SEED={seed - seed % SESSIONS_PER_AGENT}")
                raise
            rounds += 1
            assert devices() == before, "it reached this machine's devices"
    print(f"{seed - SEED} sessions with {rounds} agents, seed {SEED}")
