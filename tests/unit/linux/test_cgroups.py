from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.engines.host.cgroups.group_limits import CgroupLimits, settings
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import parse_hierarchy
from atoll.engines.limit_events import LimitEvents
from atoll.waiting import Deadline

V1 = """\
30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro
31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
"""
HYBRID = V1 + "34 30 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


def test_v1_is_found_controller_by_controller() -> None:
    found = parse_hierarchy(V1)
    assert found.mode == "v1"
    assert found.controllers["memory"] == Path("/sys/fs/cgroup/memory")
    assert found.controllers["cpu"] == found.controllers["cpuacct"]
    assert found.others == (Path("/sys/fs/cgroup/systemd"),)


def test_controllers_on_v1_make_a_hybrid_host_v1() -> None:
    found = parse_hierarchy(HYBRID)
    assert found.mode == "hybrid"
    assert Path("/sys/fs/cgroup/unified") not in found.controllers.values()
    assert Path("/sys/fs/cgroup/unified") in found.others


def test_v2_has_one_directory(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    found = parse_hierarchy(f"1 0 0:1 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    assert found.mode == "v2"
    assert set(found.controllers.values()) == {tmp_path}
    assert {"memory", "cpu", "pids", "freezer"} <= set(found.controllers)


def test_no_cgroups_is_a_mode_of_its_own() -> None:
    assert parse_hierarchy("").mode == "none"


def test_swap_is_closed_on_both_versions() -> None:
    limits = CgroupLimits(memory_bytes=100, cpu_quota_us=50_000, pids=3)
    assert ("memory", "memory.swap.max", "0") in settings("v2", limits)
    v1 = settings("v1", limits)
    assert v1.index(("memory", "memory.limit_in_bytes", "100")) < v1.index(
        ("memory", "memory.memsw.limit_in_bytes", "100")
    )
    assert ("cpu", "cpu.max", "50000 100000") in settings("v2", limits)


started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def ended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing that a test started outlives it; runs before the control group is removed."""
    if "group" in request.fixturenames:
        request.getfixturevalue("group")
    yield
    while started:
        with started.pop() as process:
            process.kill()


def spawn_in(group: Group, code: str) -> subprocess.Popen[str]:
    files = [str(directory / "cgroup.procs") for directory in group.directories() if directory.is_dir()]
    prelude = f"import os\nfor file in {files!r}:\n    open(file, 'w').write('0')\nprint('in', flush=True)\n"
    process = subprocess.Popen([sys.executable, "-c", prelude + code], stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    return process


async def test_memory_is_a_wall_and_the_kernel_counts_who_hit_it(group: Group) -> None:
    group.create(CgroupLimits(memory_bytes=48 << 20))
    process = spawn_in(group, "a = []\nfor _ in range(200):\n    a.append(bytearray(1 << 20))")
    assert process.wait(20) == -9
    assert group.events().oom_kills == 1


async def test_processes_are_counted_and_refused(group: Group) -> None:
    group.create(CgroupLimits(pids=5))
    process = spawn_in(
        group,
        "import time\nfor n in range(50):\n    try:\n        if os.fork() == 0:\n            time.sleep(30)\n"
        "    except BlockingIOError:\n        print(n, flush=True)\n        break\ntime.sleep(30)",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "4\n"
    assert group.events() == LimitEvents(pids_refused=1)
    assert group.stats().pids == 5
    await group.kill(Deadline.after(5))
    process.wait(5)


async def test_a_frozen_group_stands_still_and_goes_on(group: Group) -> None:
    group.create(CgroupLimits())
    process = spawn_in(group, "import time\nwhile True:\n    print(1, flush=True)\n    time.sleep(0.001)")
    assert process.stdout is not None
    await group.freeze(Deadline.after(5))
    assert group.is_frozen()
    before = group.stats().cpu_s
    await asyncio.sleep(0.05)
    assert group.stats().cpu_s == before
    group.thaw()
    assert not group.is_frozen()
    await group.kill(Deadline.after(5))
    process.wait(5)


async def test_kill_wins_against_processes_that_fork_away(group: Group) -> None:
    group.create(CgroupLimits(pids=200))
    hoppers = [
        spawn_in(group, "import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True:\n    if os.fork(): os._exit(0)")
        for _ in range(4)
    ]
    await group.kill(Deadline.after(10))
    assert group.pids() == set()
    for hopper in hoppers:
        hopper.wait(5)


async def test_kill_ends_what_is_frozen(group: Group) -> None:
    group.create(CgroupLimits())
    process = spawn_in(group, "import time\ntime.sleep(60)")
    await group.freeze(Deadline.after(5))
    await group.kill(Deadline.after(5))
    assert process.wait(5) == -9


async def test_a_removed_group_is_gone_and_may_be_removed_again(group: Group) -> None:
    group.create(CgroupLimits(pids=9))
    assert group.exists()
    await group.erase(Deadline.after(5))
    group.remove()
    assert not group.exists()
    assert group.pids() == set()
    assert group.stats().memory_bytes is None
    await group.kill(Deadline.after(1))


async def test_a_group_in_use_is_not_removed(group: Group) -> None:
    group.create(CgroupLimits())
    process = spawn_in(group, "import time\ntime.sleep(60)")
    with pytest.raises(OSError, match="busy"):
        group.remove()
    process.kill()
    process.wait(5)
    assert os.path.isdir(group.directories()[0])
