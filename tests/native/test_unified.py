"""Control groups v2: the sandbox is born in its group. On hosts whose controllers are on v1 the group has none; then
what needs none is tested: being born in it, freezing, killing, removing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.engines.host.cgroups import hierarchy
from atoll.engines.host.cgroups.group_limits import CgroupLimits
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy, parse_hierarchy
from atoll.engines.linux.native_engine import NativeEngine
from atoll.errors import UnsupportedError
from atoll.model import Capability, SandboxSpec, State
from atoll.settings import Settings
from native.conftest import output
from native.launchers import left_behind
from needs import missing


@pytest.fixture
def unified() -> Hierarchy:
    lines = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line]
    found = parse_hierarchy("\n".join(lines))
    if found.mode != "v2" or not found.writable():
        missing("no control groups v2 that can be written to")
    return found


@pytest.fixture
async def engine(
    settings: Settings, unified: Hierarchy, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[NativeEngine]:
    monkeypatch.setattr(hierarchy.Hierarchy, "find", classmethod(lambda cls: unified))
    made = NativeEngine(settings)
    yield made
    await made.aclose()
    assert left_behind(made) == []


async def test_a_sandbox_is_born_in_its_group_and_can_be_stopped(engine: NativeEngine, unified: Hierarchy) -> None:
    handle = await engine.create("a", SandboxSpec())
    group = engine.layout.group("a")
    assert engine.first_pid("a") in group.pids()
    assert "0::/\n" in await output(engine, handle, "cat /proc/self/cgroup")
    await engine.pause(handle)
    assert (await engine.inspect(handle)).state is State.PAUSED
    await engine.resume(handle)
    assert await output(engine, handle, "setsid sleep 1000 & echo on") == "on\n"
    await engine.delete(handle)
    assert not group.exists()


async def test_a_limit_without_its_controller_is_refused(engine: NativeEngine, unified: Hierarchy) -> None:
    for name, capability, value in (("memory_bytes", Capability.MEMORY, 1 << 27), ("pids", Capability.PIDS, 99)):
        spec = SandboxSpec.of(limits={name: value})
        if capability in (await engine.describe()).capabilities:
            await engine.delete(await engine.create("a", spec))
        else:
            with pytest.raises(UnsupportedError):
                await engine.create("a", spec)


def test_controllers_are_handed_down_to_the_groups_of_sandboxes(tmp_path: Path) -> None:
    """A group has only the controllers that all groups above it hand down."""
    hierarchy = Hierarchy("v2", dict.fromkeys(("memory", "pids", "freezer"), tmp_path))
    for directory in (tmp_path, tmp_path / "atoll-x"):
        directory.mkdir(exist_ok=True)
        (directory / "cgroup.subtree_control").write_text("")
    Group(hierarchy, "/atoll-x/a").create(CgroupLimits())
    for directory in (tmp_path, tmp_path / "atoll-x"):
        assert (directory / "cgroup.subtree_control").read_text() == ""  # nothing is asked of them
    Group(hierarchy, "/atoll-x/b").create(CgroupLimits(pids=5))
    for directory in (tmp_path, tmp_path / "atoll-x"):
        assert (directory / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (tmp_path / "atoll-x/b/pids.max").read_text() == "5"


def test_an_ordinary_user_finds_what_is_delegated_to_it(tmp_path: Path) -> None:
    table = f"35 24 0:30 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    own = tmp_path / "user.slice" / "me" / "app"
    own.mkdir(parents=True)
    assert hierarchy.delegated(table, "4:pids:/x\n0::/user.slice/me/app\n") is None
    for directory, handed in ((own, ""), (own.parent, "memory pids")):
        (directory / "cgroup.procs").write_text("")
        (directory / "cgroup.subtree_control").write_text(handed)
    found = hierarchy.delegated(table, "0::/user.slice/me/app\n")
    assert found is not None
    assert found.controllers == dict.fromkeys(("memory", "pids", "freezer", "cpuacct"), own.parent)
    (own.parent / "cgroup.subtree_control").write_text("")
    found = hierarchy.delegated(table, "0::/user.slice/me/app\n")
    assert found is not None
    assert found.controllers == dict.fromkeys(("freezer", "cpuacct"), own)
    assert hierarchy.delegated("", "0::/user.slice/me/app\n") is None
