"""Limits that nobody asked for: of each sandbox, of all sandboxes of an account, of all of an installation."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from atoll import AsyncSandbox
from atoll.engines.host.cgroups.group_limits import CgroupLimits
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.runtimes.oci_runtimes import locate
from atoll.errors import SandboxResourceError
from atoll.model import Cause, Handle, Limits, SandboxSpec
from atoll.resources import Ceilings, Resources, sized
from atoll.settings import Settings
from needs import missing, need

MIB = 1 << 20
SMALL = Resources(
    sandbox=Limits(memory_bytes=64 * MIB, pids=40, cpus=2, disk_bytes=32 * MIB, open_files=128),
    account=Ceilings(memory_bytes=96 * MIB, pids=60),
    installation=Ceilings(memory_bytes=200 * MIB, pids=100),
)
BOMB = """
import os, signal, sys
made = 0
try:
    while made < int(sys.argv[1]):
        if os.fork() == 0:
            signal.pause()
        made += 1
except OSError:
    pass
print(made, flush=True)
os._exit(0)
"""
"""Makes so many processes that stay, or as many as it can, and says how many."""
Engines = Callable[..., LinuxEngine]


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    """One for all: to make a pool takes longer than most of these tests."""
    need("root")
    folder = Path(tempfile.mkdtemp(prefix="al-", dir="/tmp"))
    folder.chmod(0o755)
    yield Settings(folder / "data", folder / "run")
    shutil.rmtree(folder)


@pytest.fixture
async def engines(settings: Settings) -> AsyncIterator[Engines]:
    made: list[LinuxEngine] = []

    def make(kind: type[NativeEngine | OciEngine] = NativeEngine, resources: Resources = SMALL) -> LinuxEngine:
        made.append(kind(replace(settings, resources=resources)))
        return made[-1]

    yield make
    for engine in made:
        for handle in await engine.list():
            await engine.delete(handle)
        await engine.gc()
        await engine.aclose()
        assert not [path.parent for path in engine.layout.group("x").directories() if path.parent.exists()]


async def sandbox(engine: LinuxEngine, stack: AsyncExitStack, account: str = "", **limits: object) -> AsyncSandbox:
    spec = SandboxSpec.of(account=account, limits=limits)
    return await stack.enter_async_context(AsyncSandbox(spec, engine=engine))


async def bomb(box: AsyncSandbox, processes: int = 100) -> int:
    return int((await box.exec(["python3", "-c", BOMB, str(processes)], timeout=30)).stdout)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(50):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", [NativeEngine, OciEngine])
async def test_a_sandbox_that_asks_for_no_limit_has_one(engines: Engines, kind: type[LinuxEngine]) -> None:
    async with AsyncExitStack() as stack:
        box = await sandbox(engines(kind), stack)
        used_up = await box.exec(["python3", "-c", "bytearray(200 << 20)"], timeout=30)
        assert used_up.cause is Cause.OUT_OF_MEMORY
        assert (await box.exec("head -c 64m /dev/zero >file", timeout=30)).cause is Cause.DISK_FULL
        assert (await box.exec("ulimit -n", timeout=10)).stdout == "128\n"
        assert 20 < await bomb(box) < 40


async def test_whoever_asks_gets_more(engines: Engines) -> None:
    async with AsyncExitStack() as stack:
        box = await sandbox(engines(), stack, memory_bytes=150 * MIB, pids=70, disk_bytes=80 * MIB, open_files=200)
        assert (await box.exec(["python3", "-c", "bytearray(100 << 20)"], timeout=30)).success
        assert (await box.exec("head -c 64m /dev/zero >file", timeout=30)).success
        assert (await box.exec("ulimit -n", timeout=10)).stdout == "200\n"
        assert await bomb(box, 50) == 50


async def test_more_can_be_given_to_one_that_runs_with_the_defaults(engines: Engines) -> None:
    engine = engines()
    async with AsyncExitStack() as stack:
        box = await sandbox(engine, stack)
        (handle,) = await engine.list()
        await engine.set_limits(handle, Limits(memory_bytes=150 * MIB, pids=70))
        assert (await box.exec(["python3", "-c", "bytearray(100 << 20)"], timeout=30)).success
        assert await bomb(box, 50) == 50


@pytest.mark.parametrize("kind", [NativeEngine, OciEngine])
async def test_the_processes_of_one_account_leave_room_for_another(engines: Engines, kind: type[LinuxEngine]) -> None:
    """40 for each of three sandboxes are more than the 60 of their account and the 100 of all."""
    engine = engines(kind)
    async with AsyncExitStack() as stack:
        greedy = [await sandbox(engine, stack, "aaa") for _ in range(3)]
        other = await sandbox(engine, stack, "bbb")
        for outcome in await asyncio.gather(*map(bomb, greedy), return_exceptions=True):
            # One that comes last may find no room for its first process.
            assert isinstance(outcome, int | SandboxResourceError), outcome
        together = sum([(await box.stats()).pids or 0 for box in greedy])
        assert 40 < together <= 60
        assert await bomb(other, 20) == 20


HOLD = "import sys, time; kept = bytearray(int(sys.argv[1]) << 20); time.sleep(1000)"


async def test_the_memory_of_one_account_is_not_taken_from_another(engines: Engines) -> None:
    """The kernel ends the largest process, but only among those of the account that is over its ceiling."""
    engine = engines()
    async with AsyncExitStack() as stack:
        other = await sandbox(engine, stack, "bbb")
        greedy = [await sandbox(engine, stack, "aaa") for _ in range(4)]
        await other.start(["python3", "-c", HOLD, "45"])

        async def holds() -> bool:
            return ((await other.stats()).memory_bytes or 0) > 45 * MIB

        await until(holds)
        for box in greedy:
            await box.start(["python3", "-c", HOLD, "30"])
        (untouched,) = [handle for handle in await engine.list() if handle.spec.account == "bbb"]

        async def somebody_paid() -> bool:
            return any([(await engine.limit_events(handle)).oom_kills for handle in await engine.list()])

        await until(somebody_paid)
        # Of the group above them: single figures, read one after another, are of no one moment.
        places = engine.layout
        group = Group(places.hierarchy, places.accounts.path("aaa"))
        peak = "memory.peak" if places.hierarchy.mode == "v2" else "memory.max_usage_in_bytes"
        assert 60 * MIB < int(group._read("memory", peak)) <= 96 * MIB
        assert (await engine.limit_events(untouched)).oom_kills == 0
        assert await holds()


async def test_all_sandboxes_together_end_at_the_ceiling_of_the_installation(engines: Engines) -> None:
    engine = engines()
    async with AsyncExitStack() as stack:
        boxes = [await sandbox(engine, stack, account) for account in ("aaa", "aaa", "bbb", "bbb", "")]
        await asyncio.gather(*map(bomb, boxes), return_exceptions=True)
        assert sum([(await box.stats()).pids or 0 for box in boxes]) <= 100


SPIN = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"


async def test_processor_time_is_shared_between_accounts_and_then_between_sandboxes(engines: Engines) -> None:
    """Four sandboxes on one processor, three of them of one account: the fourth gets half, not a quarter."""
    engine = engines()
    async with AsyncExitStack() as stack:
        greedy = [await sandbox(engine, stack, "aaa") for _ in range(3)]
        other = await sandbox(engine, stack, "bbb")

        async def used(*boxes: AsyncSandbox) -> float:
            return sum([(await box.stats()).cpu_s or 0.0 for box in boxes])

        for box in (*greedy, other):
            await box.start(["python3", "-c", SPIN])

        async def all_spin() -> bool:
            return all([await used(box) > 0.05 for box in (*greedy, other)])

        await until(all_spin)
        theirs, its = await used(*greedy), await used(other)

        async def enough() -> bool:
            return await used(*greedy) + await used(other) > theirs + its + 0.7

        await until(enough)
        theirs, its = await used(*greedy) - theirs, await used(other) - its
        assert its > 0.6 * theirs, f"three sandboxes of one account had {theirs:.2f} s, that of another {its:.2f} s"


async def test_idle_sandboxes_do_not_count_towards_the_ceiling_of_processes(engines: Engines) -> None:
    resources = replace(
        SMALL, account=Ceilings(pids=30, pids_for_each=2), installation=Ceilings(pids=50, pids_for_each=2)
    )
    engine = engines(resources=resources)

    def ceilings(handle: Handle) -> tuple[int, int]:
        directory = engine.layout.group(handle.sandbox_id).directory("pids")
        assert directory is not None
        account, total = ((each / "pids.max").read_text() for each in (directory.parent, directory.parent.parent))
        return int(account), int(total)

    first = await engine.create("first", SandboxSpec(account="aaa"))
    account, total = ceilings(first)
    assert 32 <= account < 100, "some are allowed for ahead"
    assert total - account == 20
    for number in range(30):
        await engine.create(f"more-{number}", SandboxSpec(account="aaa"))
    assert ceilings(first)[0] >= 30 + 2 * 31
    other = await engine.create("other", SandboxSpec(account="bbb"))
    assert ceilings(other)[0] == account
    assert ceilings(other)[1] >= 50 + 2 * 32
    own = await engine.create("own", SandboxSpec())
    directory = engine.layout.group(own.sandbox_id).directory("pids")
    assert directory is not None
    assert (directory.parent / "pids.max").read_text() == "max\n"


async def test_the_threads_of_virtual_kernels_do_not_count_either(engines: Engines) -> None:
    if locate("runsc", Path("/")) is None:
        missing("needs runsc")
    engine = engines(OciEngine, resources=replace(SMALL, account=Ceilings(pids=300, pids_for_each=1)))
    for number in range(2):
        handle = await engine.create(f"v{number}", SandboxSpec(account="aaa", isolation="gvisor"))
        directory = engine.layout.group(handle.sandbox_id).directory("pids")
        assert directory is not None
        assert int((directory.parent / "pids.max").read_text()) >= 300 + (number + 1) * 64


async def test_who_uses_the_machine_weighs_less_until_it_rests(engines: Engines) -> None:
    engine = engines()
    async with AsyncExitStack() as stack:
        greedy, other = [await sandbox(engine, stack, account) for account in ("aaa", "bbb")]

        def weight(box: AsyncSandbox) -> int:
            directory = engine.layout.group(box.id).directory("cpu")
            assert directory is not None
            name = "cpu.weight" if engine.layout.hierarchy.mode == "v2" else "cpu.shares"
            return int((directory.parent / name).read_text())

        async def balanced(condition: Callable[[], bool]) -> bool:
            await engine.balance()
            return condition()

        full = weight(other)
        assert weight(greedy) == full
        spinning = await greedy.start(["python3", "-c", "while True: pass"])
        await until(lambda: balanced(lambda: weight(greedy) < full * 0.6))
        await spinning.kill()
        await until(lambda: balanced(lambda: weight(greedy) == full))
        assert weight(other) == full


@pytest.mark.parametrize("kind", [NativeEngine, OciEngine])
async def test_no_account_maps_the_c_library_of_the_host(engines: Engines, kind: type[LinuxEngine]) -> None:
    """Whoever forks holds locks of the files that the process has mapped."""
    engine = engines(kind)

    def mapped(pid: str) -> set[str]:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {" ".join(line.split()[3:5]) for line in lines if "/libc.so.6" in line}

    async with AsyncExitStack() as stack:
        found = [mapped("self")]
        for account in ("", "aaa", "bbb"):
            box = await sandbox(engine, stack, account)
            await box.start(["python3", "-c", "import time; time.sleep(1000)"])
            group = engine.layout.group(box.id)

            async def runs(group: Group = group) -> bool:
                return any(mapped(str(pid)) for pid in group.pids())

            await until(runs)
            found.append(set().union(*(mapped(str(pid)) for pid in group.pids())))
        for one, other in itertools.combinations(found, 2):
            assert not one & other


async def test_a_sandbox_is_made_while_the_groups_above_it_are_removed(engines: Engines) -> None:
    engine, going = engines(), True

    def tidy() -> None:
        while going:
            engine.layout.accounts.remove_empty()
            time.sleep(0.001)  # without it, making all groups in between would be a matter of luck

    tidying = asyncio.create_task(asyncio.to_thread(tidy))
    try:
        for number in range(10):
            handle = await engine.create(f"s{number}", SandboxSpec(account="aaa"))
            directory = engine.layout.group(handle.sandbox_id).directory("pids")
            assert directory is not None
            assert (directory.parent / "pids.max").read_text() == "60\n"
            await engine.delete(handle)
    finally:
        going = False
        await tidying


async def test_groups_that_a_killed_process_left_go_when_the_next_manager_starts(engines: Engines) -> None:
    """What was killed closes nothing, and a manager does not collect what is shared by all."""
    engine = engines()
    top = Group(engine.layout.hierarchy, engine.layout.slice)
    engine.layout.accounts.ensure("aaa")
    assert top.exists()
    await engine.gc(shared=False)
    assert not top.exists()


async def test_a_sandbox_of_an_earlier_version_is_adopted_where_it_is(engines: Engines) -> None:
    """Its control group is directly in that of the installation, and its record knows of no account."""
    engine = engines()
    assert isinstance(engine, NativeEngine)
    handle = await engine.create("a", SandboxSpec(limits=Limits(pids=20)))
    as_it_was = Group(engine.layout.hierarchy, f"{engine.layout.slice}/a")
    as_it_was.create(CgroupLimits(pids=20))
    for old, new in zip(engine.layout.group("a").directories(), as_it_was.directories(), strict=True):
        if old.is_dir():
            (new / "cgroup.procs").write_text(f"{engine.first_pid('a')}\n")
    engine.layout.group("a").remove()
    path = engine.layout.records.home("a") / "record.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({name: record[name] for name in record.keys() - {"account", "defaults", "left_out"}}))
    later = engines()
    (found,) = await later.list()
    assert found.limits().limits == handle.spec.limits
    group = later.layout.group("a")
    assert group.path == f"{later.layout.slice}/a"
    assert group.pids()
    assert (await later.stats(found)).pids
    await later.delete(found)
    assert not group.exists()


async def test_the_defaults_that_hold_are_reported(engines: Engines) -> None:
    async with AsyncExitStack() as stack:
        box = await sandbox(engines(), stack, pids=30)
        found = await box.info()
        assert found.engine == "native"
        assert found.limits == SMALL.sandbox.model_copy(update={"pids": 30})
        assert found.limits_left_out == ()


async def test_a_default_that_cannot_be_enforced_is_left_out_and_reported(engines: Engines) -> None:
    engine = engines(OciEngine)
    found = await engine.default_limits(SandboxSpec(isolation="gvisor"))
    assert found.left_out == ("pids",)
    assert found.limits.memory_bytes == 64 * MIB
    asked = await engine.default_limits(SandboxSpec(isolation="gvisor", limits=Limits(pids=5)))
    assert asked.left_out == ()  # what was asked for is refused, not left out


def test_a_small_machine_leaves_room_for_its_host() -> None:
    for memory, cpus, processes in ((1 << 30, 1, 32_768), (8 << 30, 4, 32_768), (1 << 40, 128, 4_194_304)):
        found = sized(memory, cpus, processes, 100 << 30)
        sandbox, account, total = found.sandbox, found.account, found.installation
        assert sandbox.memory_bytes is not None
        assert account.memory_bytes is not None
        assert total.memory_bytes is not None
        assert total.pids is not None
        assert sandbox.memory_bytes >= 512 * MIB
        assert account.memory_bytes < total.memory_bytes <= memory - 512 * MIB
        assert account.pids is not None
        assert account.pids < total.pids < processes
        assert account.pids <= 512 * cpus, "more processes than that stop the machine when they fork"
        assert (sandbox.pids or 0) <= account.pids
        assert (sandbox.cpus or 0) <= cpus


def test_the_environment_sets_the_ceilings(tmp_path: Path) -> None:
    environ = {"ATOLL_SANDBOX_MEMORY": "256m", "ATOLL_SANDBOX_PIDS": "none", "ATOLL_USER_PIDS": "500", "HOME": "/root"}
    found = Settings.load(environ | {"ATOLL_DATA_DIR": str(tmp_path)}).resources
    assert (found.sandbox.memory_bytes, found.sandbox.pids) == (256 * MIB, None)
    assert found.account.pids == 500
    assert found.installation == Resources.of_machine().installation
