"""What the engine promises beyond the conformance suite: the walls as the kernel sees them, and sharing with `oci`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.engines import registry
from atoll.engines.linux.native.native_probe import broken_walls
from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.errors import EngineError, UnsupportedError
from atoll.model import SandboxSpec, State
from atoll.network.client import Gateway
from atoll.settings import Settings
from atoll.waiting import Deadline
from native.conftest import output


async def test_the_kernel_sees_every_wall(engine: NativeEngine) -> None:
    handle = await engine.create("a", SandboxSpec())
    process = Path(f"/proc/{engine.first_pid('a')}")
    assert broken_walls(process) == []
    assert (await engine.inspect(handle)).state is State.RUNNING


def test_a_process_without_walls_is_noticed() -> None:
    assert len(broken_walls(Path("/proc/self"))) > 8


async def test_nothing_of_the_host_is_left_in_its_mount_table(engine: NativeEngine) -> None:
    """Also above the sandbox's root directory, where only the host can look."""
    await engine.create("a", SandboxSpec())
    mounts = os.open(f"/proc/{engine.first_pid('a')}/ns/mnt", os.O_RDONLY)
    script = f"import ctypes, os; print(ctypes.CDLL(None).setns({mounts}, 0), sorted(os.listdir('/')))"
    looked = await asyncio.create_subprocess_exec(
        "/usr/bin/python3", "-c", script, pass_fds=(mounts,), stdout=asyncio.subprocess.PIPE
    )
    os.close(mounts)
    assert (await looked.communicate())[0] == b"0 ['dev', 'proc', 'rootfs']\n"


async def test_no_mount_table_inside_names_a_path_of_the_host(engine: NativeEngine) -> None:
    handle = await engine.create("a", SandboxSpec())
    table = await output(engine, handle, "cat /proc/self/mountinfo")
    assert "upperdir=" not in table
    roots = {line.split()[3] for line in table.splitlines()}
    assert all(root == "/" or root.startswith("/null") for root in roots), roots


async def test_covers_cannot_be_written_to_or_taken_away(engine: NativeEngine) -> None:
    handle = await engine.create("a", SandboxSpec())
    said = await output(engine, handle, "echo x > /proc/kallsyms; touch /proc/acpi/x /sys/kernel/x; umount /proc/acpi")
    assert said.count("Read-only") >= 2
    assert await output(engine, handle, "cat /proc/kallsyms; ls -A /proc/acpi /sys/kernel | grep -v :") == "\n"


async def test_nobody_inside_can_look_into_the_agent(engine: NativeEngine) -> None:
    handle = await engine.create("a", SandboxSpec())
    for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/maps"):
        assert "denied" in await output(engine, handle, f"head -c 1 {path} 2>&1")


async def test_a_large_environment_arrives(engine: NativeEngine) -> None:
    spec = SandboxSpec.of(env={f"V{number}": "x" * 100_000 for number in range(8)})
    handle = await engine.create("a", spec)
    assert await output(engine, handle, "echo ${#V7}") == "100000\n"


async def test_limits_are_exact_from_the_first_process_on(engine: NativeEngine) -> None:
    handle = await engine.create("a", SandboxSpec.of(limits={"pids": 3, "memory_bytes": "16m"}))
    assert (await engine.stats(handle)).pids == 1


async def test_the_engines_for_linux_share_ids_and_names_but_list_their_own(
    engine: NativeEngine, settings: Settings
) -> None:
    handle = await engine.create("a", SandboxSpec())
    other = OciEngine(settings)
    assert await other.list() == []
    assert await other.gc() == []
    assert await output(engine, handle, "echo alive") == "alive\n"
    await other.aclose()


async def test_what_cannot_be_collected_keeps_nothing_else_from_it(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await engine.create("a", SandboxSpec())
    teardown, erase = engine._teardown, engine._teardown.erase_held

    async def stuck(sandbox_id: str, deadline: Deadline) -> None:
        if sandbox_id == "b":
            raise EngineError("processes of sandbox 'b' do not end")
        await erase(sandbox_id, deadline)

    monkeypatch.setattr(teardown, "erase_held", stuck)
    monkeypatch.setattr(teardown, "_strays", lambda: ["b", "c"])
    saved = engine._storage.records
    abandoned = saved.directory / f".{'ab' * 12}.1-1"
    saved.directory.mkdir(exist_ok=True)
    abandoned.touch()
    assert await engine.gc(shared=False) == ["leftovers of c"]
    assert not abandoned.exists()
    assert (await engine.inspect(handle)).state is State.RUNNING


async def test_another_isolation_is_refused(engine: NativeEngine) -> None:
    with pytest.raises(UnsupportedError, match="gvisor"):
        await engine.create("a", SandboxSpec.of(isolation="gvisor"))
    assert await engine.list() == []


async def test_many_at_once(engine: NativeEngine) -> None:
    names = [f"s{number}" for number in range(16)]
    handles = await asyncio.gather(*(engine.create(name, SandboxSpec()) for name in names))
    assert sorted(handle.sandbox_id for handle in await engine.list()) == sorted(names)
    said = await asyncio.gather(*(output(engine, handle, "echo $ATOLL_SANDBOX_ID") for handle in handles))
    assert [text.strip() for text in said] == names
    await asyncio.gather(*(engine.delete(handle) for handle in handles))


async def test_cancelling_a_create_leaves_nothing(engine: NativeEngine) -> None:
    for delay_ms in range(0, 16, 1):
        task = asyncio.create_task(engine.create("a", SandboxSpec()))
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await engine.delete(await task)
        assert await engine.list() == []
        assert not engine.layout.group("a").exists()


async def test_a_policy_is_recorded_as_it_is_whoever_is_cancelled(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await engine.create("a", SandboxSpec())
    begun, go = threading.Event(), threading.Event()

    def slowly(self: Gateway, sandbox_id: str, policy: object) -> bool:
        begun.set()
        return go.wait(30)

    monkeypatch.setattr(Gateway, "change", slowly)
    changing = asyncio.create_task(engine.set_network(handle, "all"))
    await asyncio.to_thread(begun.wait, 30)
    changing.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await changing
    (found,) = await engine.list()
    assert found.spec.network == "all", "the gateway has it"


async def test_a_launcher_that_waited_and_died_is_replaced(engine: NativeEngine) -> None:
    await engine.delete(await engine.create("a", SandboxSpec()))
    launchers = engine.launcher.pool
    for _ in range(200):
        if launchers._spare is not None:
            break
        await asyncio.sleep(0.01)
    assert launchers._spare is not None
    os.kill(launchers._spare.pid, 9)
    await asyncio.to_thread(os.waitid, os.P_PID, launchers._spare.pid, os.WEXITED | os.WNOWAIT)
    handle = await engine.create("b", SandboxSpec())
    assert await output(engine, handle, "echo alive") == "alive\n"


def test_probe_says_what_is_missing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(release="5.4.0-generic", machine="x86_64"))
    found = NativeEngine.probe(settings, thorough=False)
    assert not found.available
    assert "5.12" in found.reasons[0]


def test_the_walls_are_tried_before_the_engine_is_first_chosen(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("atoll.engines.linux.native.native_probe.broken_walls", lambda process, wanted: ["a hole"])
        engine, reasons = registry.auto(settings)
        assert engine.name != "native"
        assert "a hole" in reasons[0]
    assert registry.auto(settings)[0].name == "native"
    monkeypatch.setattr("atoll.engines.linux.native.native_probe.try_walls", None)  # and not tried again
    assert registry.auto(settings)[0].name == "native"


def test_probe_tries_the_walls(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NativeEngine.probe(settings, thorough=True).available
    monkeypatch.setattr("atoll.engines.linux.native.native_probe.broken_walls", lambda process, wanted: ["a hole"])
    found = NativeEngine.probe(settings, thorough=True)
    assert not found.available
    assert "a hole" in found.reasons[0]
