"""Group D, as far as it is an attack on us: floods of output, kernel objects, the out-of-memory score.

Bombs of processes, memory, disk and descriptors have tests of their own beside the engine's.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import pytest

from atoll.model import Cause
from security.conftest import EVERY, NAMESPACES, PRELUDE, PYTHON, WITH_GVISOR, Target, inside

pytestmark = pytest.mark.timeout(120)


FLOODS = {
    "lines": "yes",
    "no line break": "cat /dev/zero",
    "both streams": "yes >&2 & exec yes",
    "one write": "python3 -c \"import os; os.write(1, b'A' * (1 << 28))\"; exec cat /dev/zero",
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@EVERY
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(3, id="3s"), pytest.param(30, id="30s", marks=[pytest.mark.slow, pytest.mark.timeout(400)])],
)
async def test_d10_a_flood_of_output_costs_bounded_memory_and_can_be_ended(target: Target, seconds: int) -> None:
    limit = 1 << 20
    async with target.sandbox() as sandbox:
        await sandbox.exec("true")
        before = resident_bytes()
        floods = (sandbox.exec(command, timeout=seconds, max_output_bytes=limit) for command in FLOODS.values())
        for result in await asyncio.gather(*floods):
            assert result.cause is Cause.TIMEOUT
            assert result.truncated
            assert max(len(result.stdout_bytes), len(result.stderr_bytes)) <= limit + 4096
        assert resident_bytes() - before < 64 << 20
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"


@WITH_GVISOR
async def test_d10_what_was_left_out_is_counted_exactly(target: Target) -> None:
    async with target.sandbox() as sandbox:
        result = await sandbox.exec("head -c 5000000 /dev/zero | tr '\\0' a", max_output_bytes=100_000)
        assert result.truncated
        (left_out,) = re.findall(r"\[(\d+) bytes left out\]", result.stdout)
        assert len(re.findall("a{100,}", result.stdout)) == 2
        assert sum(map(len, re.findall("a{100,}", result.stdout))) + int(left_out) == 5_000_000


OBJECTS = """
made = {}
def until_refused(name, make, most):
    count = 0
    try:
        for count in range(most):
            make(count)
    except OSError as error:
        made[name] = [count, errno.errorcode[error.errno]]
    else:
        made[name] = [most, ""]
watch = LIBC.inotify_init()
os.makedirs("/tmp/w")
os.chdir("/tmp/w")
def add(number):
    os.mkdir(str(number))
    if LIBC.inotify_add_watch(watch, str(number).encode(), 2) < 0:
        raise OSError(ctypes.get_errno(), "")
until_refused("watches", add, 5000)
queue = call(240, b"q", os.O_CREAT | os.O_RDWR | os.O_NONBLOCK, 0o666, 0)[0]
def send(number):
    if call(242, queue, b"x" * 8192, 8192, 0, 0)[0] < 0:
        raise OSError(ctypes.get_errno(), "")
until_refused("messages", send, 100000)
def queue_up(number):
    result, why = call(240, f"q{number}".encode(), os.O_CREAT | os.O_RDWR, 0o666, 0)
    if result < 0:
        raise OSError(getattr(errno, why), "")
until_refused("queues", queue_up, 2000)
pairs = []
def fill(number):
    pairs.append(socket.socketpair())
    pairs[-1][0].setblocking(False)
    try:
        while True:
            pairs[-1][0].send(bytes(65536))
    except BlockingIOError:
        pass
until_refused("sockets", fill, 5000)
say(made)
"""


@NAMESPACES
async def test_d05_objects_of_the_kernel_are_counted_and_limited(target: Target) -> None:
    async with target.sandbox(memory="96m") as sandbox:
        result = await sandbox.exec(PYTHON, stdin=PRELUDE + OBJECTS, timeout=60)
        # Either each kind met a limit of its own, or all of them together the sandbox's memory.
        if result.success:
            made = json.loads(result.stdout)
            assert made["messages"][1] in ("EAGAIN", "ENOMEM")
            assert made["queues"][1] in ("EMFILE", "ENOSPC", "ENOMEM")
            assert made["sockets"][1] in ("EMFILE", "ENOMEM", "ENOBUFS")
        stats = await sandbox.stats()
        assert stats.memory_bytes is not None
        assert stats.memory_bytes <= 96 << 20
        assert (await sandbox.exec("echo alive", timeout=20)).stdout == "alive\n"


@NAMESPACES
async def test_d17_the_score_of_others_cannot_be_changed_nor_ones_own_lowered(target: Target) -> None:
    payload = """
def score(pid, value):
    file = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY)
    os.write(file, value)
say([attempt(score, 1, b"1000"), attempt(score, 1, b"-1000"), attempt(score, "self", b"-1000")])
"""
    async with target.sandbox() as sandbox:
        (init, *_) = sorted(target.linux.layout.group(sandbox.id).pids())
        before = Path(f"/proc/{init}/oom_score_adj").read_text()
        for user in ("0", "1000"):
            assert set(await inside(sandbox, payload, user)) <= {"EACCES", "EPERM"}
        assert Path(f"/proc/{init}/oom_score_adj").read_text() == before
