"""Group E: what must end does end, and the truth is told about how."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.engines.host.cgroups.groups import Group
from atoll.errors import SandboxError, SandboxGoneError
from atoll.model import Cause, SandboxSpec, State
from atoll.sandbox.sandbox import AsyncSandbox
from needs import not_applicable
from security.conftest import EVERY, NAMESPACES, PRELUDE, PYTHON, RUNC, WITH_GVISOR, Target, inside

pytestmark = pytest.mark.timeout(120)

RUNS = pytest.mark.parametrize(
    "runs", [pytest.param(10, id="10"), pytest.param(100, id="100", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)

STUBBORN = """
for number in range(1, 65):
    if number not in (9, 19, 32, 33):
        signal.signal(number, signal.SIG_IGN)
print("started", flush=True)
while True:
    time.sleep(0.01)
"""
DAEMON = """
(setsid sh -c 'sleep MARK & exec 0<&- 1>&- 2>&-; sleep MARK' &)
setsid setsid sleep MARK &
python3 -c "import os; os.fork() and os._exit(0); os.setsid(); os.fork() or os.execlp('sleep', 'sleep', 'MARK')"
sleep MARK
"""


async def marked(sandbox: AsyncSandbox, marks: list[str]) -> dict[str, int]:
    """How many processes inside have each mark in their arguments."""
    payload = f"""
found = dict.fromkeys({marks!r}, 0)
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{{pid}}/cmdline", "rb").read().decode(errors="replace")
    except OSError:
        continue
    for mark in found:
        found[mark] += mark in words
say(found)
"""
    found: dict[str, int] = await inside(sandbox, payload)
    return found


def marked_on_host(mark: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@WITH_GVISOR
async def test_e01_a_command_that_ignores_every_signal_ends_at_its_timeout(target: Target) -> None:
    async with target.sandbox() as sandbox:
        result = await asyncio.wait_for(sandbox.exec(PYTHON, stdin=PRELUDE + STUBBORN, timeout=2), 15)
        assert result.stdout == "started\n", "the attack itself did not start"
        assert (result.cause, result.exit_code) == (Cause.TIMEOUT, 124)


@EVERY
@RUNS
async def test_e02_what_detaches_itself_dies_with_its_command(target: Target, runs: int) -> None:
    if target.name in ("runsc", "process"):
        runs = min(runs, 3)
    async with target.sandbox() as sandbox:
        for _ in range(max(1, runs // 10)):
            marks = [f"9{secrets.randbelow(10**8):08}" for _ in range(min(runs, 10))]
            commands = [sandbox.exec(DAEMON.replace("MARK", mark), timeout=4) for mark in marks]
            running = asyncio.gather(*commands)
            await asyncio.sleep(2.5)
            seen = await marked(sandbox, marks)
            assert {result.cause for result in await asyncio.wait_for(running, 30)} == {Cause.TIMEOUT}
            assert min(seen.values()) >= 4, "nothing had detached itself, so nothing is proved"
            assert set((await marked(sandbox, marks)).values()) == {0}
            assert [mark for mark in marks if marked_on_host(mark)] == []


@EVERY
async def test_e03_a_child_that_holds_the_output_delays_nothing(target: Target) -> None:
    async with target.sandbox() as sandbox:
        result = await asyncio.wait_for(sandbox.exec("(sleep 60 &); echo done", timeout=30), 20)
        assert (result.stdout, result.exit_code, result.cause) == ("done\n", 0, Cause.EXIT)


HOPPER = """
def fork():
    while True:
        try:
            return os.fork()
        except OSError:
            pass
for _ in range(20):
    if fork() == 0:
        while True:
            if fork():
                os._exit(0)
print("hopping", flush=True)
time.sleep(60)
"""


async def only_the_agent(group: Group) -> bool:
    """Within a second: what was killed may take a moment to be gone."""
    end = time.monotonic() + 1
    while len(group.pids()) > 1 and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return len(group.pids()) == 1


@NAMESPACES
@RUNS
async def test_e05_a_process_that_changes_its_number_all_the_time_is_caught(target: Target, runs: int) -> None:
    """Only where a limit of processes is enforced."""
    async with target.sandbox(pids=48) as sandbox:
        for _ in range(runs):
            result = await asyncio.wait_for(sandbox.exec(PYTHON, stdin=PRELUDE + HOPPER, timeout=0.4), 30)
            assert result.cause is not Cause.EXIT
            group = target.linux.layout.group(sandbox.id)
            assert await only_the_agent(group), f"left: {group.pids()}"


@NAMESPACES
@RUNS
async def test_e05_deleting_a_sandbox_full_of_hoppers_leaves_nothing(target: Target, runs: int) -> None:
    for _ in range(max(2, runs // 5)):
        sandbox = await target.sandbox(pids=48).create()
        group = target.linux.layout.group(sandbox.id)
        hopping = await sandbox.start([*PYTHON[:2], "-c", PRELUDE + HOPPER])
        async for _output in hopping:
            break
        assert len(group.pids()) > 5, "nothing hops"
        await asyncio.wait_for(sandbox.cleanup(), 30)
        assert group.pids() == set()
        assert not group.exists()


MAKER = """
import asyncio, os, sys, time
from pathlib import Path
from atoll.engines.linux.oci_engine import OciEngine
from atoll.model import SandboxSpec
from atoll.settings import Settings
async def main():
    engine = OciEngine(Settings(Path(sys.argv[1]), Path(sys.argv[2])), "runc")
    spec = SandboxSpec.of(limits={"pids": 32, **({"lifetime_s": float(sys.argv[4])} if len(sys.argv) > 4 else {})})
    handle = await engine.create(sys.argv[3], spec)
    if len(sys.argv) == 4:
        await engine.pause(handle)
    print("made", flush=True)
    time.sleep(60)
asyncio.run(main())
"""


def make_and_die(target: Target, *words: str) -> None:
    """A process that makes a sandbox and is killed at once."""
    folders = [str(target.settings.data_dir), str(target.settings.run_dir)]
    with subprocess.Popen([sys.executable, "-c", MAKER, *folders, *words], stdout=subprocess.PIPE) as maker:
        try:
            assert maker.stdout is not None
            assert maker.stdout.readline() == b"made\n"
        finally:
            maker.kill()


@RUNC
async def test_e06_a_lifetime_that_passes_while_nobody_watches_counts(target: Target) -> None:
    name = f"e06-{secrets.token_hex(4)}"
    await asyncio.to_thread(make_and_die, target, name, "1.5")
    (handle,) = [handle for handle in await target.engine.list() if handle.sandbox_id == name]
    await asyncio.sleep(1.6)
    seen = await target.engine.inspect(handle)
    assert (seen.state, seen.cause) == (State.STOPPED, Cause.TIMEOUT)
    assert target.linux.layout.group(name).pids() == set()
    await target.engine.delete(handle)


@EVERY
async def test_e07_a_paused_sandbox_can_be_deleted(target: Target) -> None:
    if target.name == "process":
        not_applicable("this engine cannot pause")
    sandbox = await target.sandbox().create()
    group = target.linux.layout.group(sandbox.id)
    await sandbox.start("while :; do :; done")
    await target.linux.pause(sandbox.access.handle())
    assert group.is_frozen()
    assert group.pids()
    await asyncio.wait_for(sandbox.cleanup(), 20)
    assert not group.exists()


@RUNC
async def test_e07_so_can_one_whose_maker_died_after_pausing_it(target: Target) -> None:
    name = f"e07-{secrets.token_hex(4)}"
    await asyncio.to_thread(make_and_die, target, name)
    (handle,) = [handle for handle in await target.engine.list() if handle.sandbox_id == name]
    assert (await target.engine.inspect(handle)).state is State.PAUSED
    await asyncio.wait_for(target.engine.delete(handle), 20)
    assert not target.linux.layout.group(name).exists()


@EVERY
async def test_e08_orphans_are_reaped(target: Target) -> None:
    payload = """
def zombies():
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            count += open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            pass
    return count
end = time.time() + 10
while zombies() > 5 and time.time() < end:
    time.sleep(0.05)
say(zombies())
"""
    async with target.sandbox() as sandbox:
        made = await sandbox.exec("for i in $(seq 200); do (sleep 0 &); done; echo made", timeout=60)
        assert made.stdout == "made\n"
        assert await inside(sandbox, payload) <= 5


@EVERY
async def test_e09_a_sandbox_that_attacks_its_own_agent_harms_only_itself(target: Target) -> None:
    async with target.sandbox() as sandbox:
        for attack in ("kill -9 1", "kill -STOP 1; kill -9 1", "kill -9 -1", "kill -SEGV 1; kill -TERM 1; kill -INT 1"):
            with contextlib.suppress(SandboxError):
                await asyncio.wait_for(sandbox.exec(attack, timeout=5), 30)
        try:
            result = await asyncio.wait_for(sandbox.exec("echo alive", timeout=5), 30)
            assert result.stdout == "alive\n"
        except SandboxGoneError:
            assert (await sandbox.inspect()).state is State.STOPPED


ENDS = {
    "a code like a signal's": ("exit 137", Cause.EXIT, 137),
    "its own signal": ("kill -9 $$", Cause.SIGNAL, 137),
    "a crash": ("kill -SEGV $$", Cause.SIGNAL, 139),
    "more than a byte": ("exit 256", Cause.EXIT, 0),
    "a timeout's code": ("exit 124", Cause.EXIT, 124),
    "success": ("true", Cause.EXIT, 0),
}


@WITH_GVISOR
async def test_e11_every_end_is_told_as_it_was(target: Target) -> None:
    async with target.sandbox() as sandbox:
        for name, (command, cause, code) in ENDS.items():
            result = await sandbox.exec(command, timeout=20)
            assert (result.cause, result.exit_code) == (cause, code), name
        timed_out = await sandbox.exec("sleep 60", timeout=0.5)
        assert (timed_out.cause, timed_out.exit_code) == (Cause.TIMEOUT, 124)
        killed = await sandbox.start("sleep 60")
        await killed.kill()
        assert (await asyncio.wait_for(killed.wait(), 15)).cause is Cause.KILLED


@NAMESPACES
async def test_e11_running_out_of_memory_is_told(target: Target) -> None:
    async with target.sandbox(memory="64m") as sandbox:
        result = await sandbox.exec(["python3", "-c", "x = bytearray(200 << 20)"], timeout=30)
        assert result.cause is Cause.OUT_OF_MEMORY
        assert not result.success
        assert (await sandbox.exec("exit 137")).cause is Cause.EXIT, "only the command that did it"


@pytest.mark.parametrize(
    "target",
    [
        "runc",
        "process",
        pytest.param("crun", marks=pytest.mark.slow),
        pytest.param("runsc", marks=pytest.mark.slow),
    ],
    indirect=True,
)
async def test_e13_deleting_during_everything_is_clean(target: Target, folder: Path) -> None:
    source = folder / f"e13-{target.name}"
    source.mkdir()
    (source / "big").write_bytes(os.urandom(8 << 20))
    sandbox = await target.sandbox().create()
    work = [
        asyncio.ensure_future(sandbox.exec("sleep 30", timeout=40)),
        asyncio.ensure_future(sandbox.copy_to(source, "/workspace/in")),
        asyncio.ensure_future(sandbox.exec("yes", timeout=40, max_output_bytes=1 << 16)),
        asyncio.ensure_future(sandbox.write_file("/workspace/x", b"x" * (8 << 20))),
    ]
    await asyncio.sleep(0.05)
    handle = sandbox.access.handle()
    await asyncio.wait_for(asyncio.gather(*(target.engine.delete(handle) for _ in range(3))), 30)
    done = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 60)
    allowed = (SandboxError, OSError, type(None))
    assert [each for each in done if isinstance(each, BaseException) and not isinstance(each, allowed)] == []
    await sandbox.cleanup()
    assert (await target.engine.inspect(handle)).state is State.MISSING


@RUNC
async def test_e13_one_name_made_twice_at_once_is_one_sandbox(target: Target) -> None:
    name, spec = f"e13-{secrets.token_hex(4)}", SandboxSpec.of(limits={"pids": 32})
    done = await asyncio.gather(*(target.engine.create(name, spec) for _ in range(4)), return_exceptions=True)
    assert sum(not isinstance(each, BaseException) for each in done) == 1
    assert [handle.sandbox_id for handle in await target.engine.list()] == [name]
