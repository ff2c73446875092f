"""Running processes go on where they were: after a rollback, in forks, and after a pause on the disk. On gVisor."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.runtimes import oci_runtimes
from atoll.errors import EngineError, ImageError, SandboxResourceError, SpecError, UnsupportedError
from atoll.guest.socket_tables import established
from atoll.model import State
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from checkpoints.conftest import MakeSandbox, emptied, engine_named

COUNTER = """
import os, time
n = 0
while True:
    n += 1
    with open("count.new", "w") as file:
        file.write(f"{n} {os.urandom(8).hex()} {os.getpid()}")
    os.rename("count.new", "count")
    while not os.path.exists(f"go-{n}") and not os.path.exists("go"):
        time.sleep(0.01)
"""


@pytest.fixture
async def gvisor(settings: Settings) -> AsyncIterator[LinuxEngine]:
    engine = engine_named("runsc", settings)
    yield engine
    await emptied(engine)


async def counting(sandbox: AsyncSandbox, number: int) -> str:
    """Let it count to a number; what it wrote then besides."""
    await sandbox.exec(f"for n in $(seq {number - 1}); do touch go-$n; done")
    result = await sandbox.exec(f"while ! grep -q '^{number} ' count; do sleep 0.02; done; cat count", timeout=30)
    assert result.success, result
    return result.stdout


@pytest.mark.timeout(120)
async def test_a_rollback_brings_processes_back(gvisor: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(gvisor) as sandbox:
        await sandbox.start(["python3", "-c", COUNTER])
        await counting(sandbox, 3)
        checkpoint = await sandbox.checkpoint("here", memory=True)
        assert checkpoint.memory
        first = await counting(sandbox, 4)
        await counting(sandbox, 5)
        for _ in range(2):
            await sandbox.rollback(checkpoint)
            again = await counting(sandbox, 4)
            assert again.split()[1] != first.split()[1]
            assert again.split()[2] == first.split()[2]
        assert (await sandbox.run_command("echo a shell")) == "a shell"


@pytest.mark.timeout(120)
async def test_a_saved_memory_is_written_down_and_removed_beside_the_event_loop(
    gvisor: LinuxEngine, sandbox_on: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, storage, ours = gvisor._checkpoints, gvisor._storage, threading.get_ident()
    written, remove, threads = checkpoints._written, storage.remove, dict[str, int]()

    def write(*args: Any, **options: Any) -> Any:
        threads["write"] = threading.get_ident()
        written(*args, **options)
        storage.records._path(args[1]).unlink()
        raise SandboxResourceError("it is too large")

    def removed(saved_id: str) -> None:
        threads["remove"] = threading.get_ident()
        remove(saved_id)

    async with sandbox_on(gvisor) as sandbox:
        monkeypatch.setattr(checkpoints, "_written", write)
        monkeypatch.setattr(storage, "remove", removed)
        with pytest.raises(SandboxResourceError, match="too large"):
            await sandbox.checkpoint("here", memory=True)
    assert set(threads) == {"write", "remove"}
    assert ours not in threads.values()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.slow)])
async def test_forks_count_on(gvisor: LinuxEngine, sandbox_on: MakeSandbox, count: int) -> None:
    async with sandbox_on(gvisor) as sandbox:
        await sandbox.start(["python3", "-c", COUNTER])
        await counting(sandbox, 7)
        forks = await sandbox.fork(count, memory=True)
        try:
            seen = [await counting(each, 8) for each in (sandbox, *forks)]
            assert {text.split()[0] for text in seen} == {"8"}
            assert len({text.split()[1] for text in seen}) == count + 1
            await forks[0].restart()
            assert (await counting(forks[0], 8)).split()[0] == "8"
        finally:
            for fork in forks:
                await fork.cleanup()


@pytest.mark.timeout(120)
async def test_asleep_on_the_disk(gvisor: LinuxEngine, sandbox_on: MakeSandbox, settings: Settings) -> None:
    async with sandbox_on(gvisor) as sandbox:
        await sandbox.start(["python3", "-c", COUNTER])
        await counting(sandbox, 2)
        await sandbox.pause(memory="disk")
        await sandbox.pause(memory="disk")
        assert (await sandbox.inspect()).state is State.PAUSED
        assert not gvisor.layout.group(sandbox.id).pids()
        assert await gvisor.gc() == []
        other = OciEngine(settings, "runsc")
        found = await AsyncSandbox.attach(sandbox.id, engine=other, settings=settings)
        await found.resume()
        await found.resume()
        assert (await counting(found, 3)).split()[0] == "3"
        await found.detach()
        await other.aclose()
        await sandbox.pause(memory="disk")
    assert await gvisor.list() == []


async def test_what_stands_in_the_way_is_told(
    gvisor: LinuxEngine, native: LinuxEngine, sandbox_on: MakeSandbox, settings: Settings
) -> None:
    async with sandbox_on(native) as sandbox:
        with pytest.raises(UnsupportedError, match=r"CRIU(.|\n)*gvisor"):
            await sandbox.checkpoint(memory=True)
        with pytest.raises(UnsupportedError, match="gvisor"):
            await sandbox.pause(memory="disk")
        assert (await sandbox.exec("true")).success
    async with sandbox_on(gvisor) as sandbox:
        await sandbox.checkpoint()
        other = await AsyncSandbox.attach(sandbox.id, engine=gvisor, settings=settings)
        await other.exec("true")
        with pytest.raises(EngineError, match="another client is connected"):
            await sandbox.checkpoint(memory=True)
        await other.detach()
        await asyncio.sleep(0)
        assert (await sandbox.checkpoint(memory=True)).memory
        assert (await sandbox.exec("true")).success


CONNECTED = """
import socket, time
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect(("198.18.0.1", 53))
listener = socket.create_server((probe.getsockname()[0], 7777))
connection = socket.create_connection(listener.getsockname())
print(listener.getsockname()[0], flush=True)
time.sleep(1000)
"""


@pytest.mark.timeout(120)
async def test_what_cannot_be_saved_is_told_before(gvisor: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(gvisor, network="all") as sandbox:
        assert await sandbox.open_connections() == []
        command = await sandbox.start(["python3", "-c", CONNECTED])
        address = (await anext(aiter(command))).data.decode().strip()
        assert f"{address}:7777" in await sandbox.open_connections()
        for refused in (
            sandbox.checkpoint(memory=True),
            sandbox.fork(1, memory=True),
            sandbox.pause(memory="disk"),
        ):
            with pytest.raises(UnsupportedError, match=f"{address}:7777"):
                await refused
        assert await sandbox.checkpoints() == []
        assert (await sandbox.inspect()).state is State.RUNNING
        assert (await sandbox.checkpoint(memory=True, drop_connections=True)).memory
        assert (await sandbox.exec("echo on")).stdout == "on\n"


def test_tables_of_connections_are_read_as_a_strangers() -> None:
    table = (
        "  sl  local_address rem_address   st\n"
        "   3: 0100007F:E68F 00000000:0000 0A 0\n"
        "   4: 0100007F:7EB5 0100007F:E68F 01 0\n"
        "   5: 0200000A:7EB5 08080808:01BB 01 0\n"
        "   6: 0000000000000000FFFF00000200000A:7EB5 0000000000000000FFFF00000100007F:0050 01 0\n"
        "   7: 00000000000000000000000001000000:7EB5 B80D0120000000000000000001000000:0050 01 0\n"
        "   8: zzz\n\0 : : : 01"
    )
    assert established(table) == ["8.8.8.8:443", "[2001:db8::1]:80"]


@pytest.mark.timeout(180)
async def test_processes_go_on_from_a_snapshot_also_elsewhere(
    gvisor: LinuxEngine, sandbox_on: MakeSandbox, tmp_path: Path, elsewhere: Settings
) -> None:
    """Elsewhere: another installation, which shares nothing with this one but the image."""
    async with sandbox_on(gvisor) as sandbox:
        await sandbox.start(["python3", "-c", COUNTER])
        await counting(sandbox, 4)
        with pytest.raises(SpecError, match="no memory"):
            await sandbox.snapshot("none", await sandbox.checkpoint(), memory=True)
        made = await sandbox.snapshot("counting", memory=True)
        assert made.memory
        assert not (await sandbox.snapshot("files", await sandbox.checkpoint(memory=True))).memory
        here = await counting(sandbox, 5)
    async with sandbox_on(gvisor, image="snapshot:counting") as restored:
        again = await counting(restored, 5)
        assert again.split()[0::2] == here.split()[0::2]
        assert again.split()[1] != here.split()[1]
        await restored.restart()
        assert (await counting(restored, 5)).split()[0] == "5"
    file = tmp_path / "moved"
    await gvisor.export_snapshot("counting", file)
    other = OciEngine(elsewhere, "runsc")
    assert (await other.import_snapshot(file, "trusted", memory=True)).memory
    assert not (await other.import_snapshot(file, "strange")).memory
    async with AsyncSandbox(engine=other, isolation="gvisor", image="snapshot:trusted") as there:
        seen = await counting(there, 5)
        assert seen.split()[0::2] == here.split()[0::2]
        assert seen.split()[1] not in (here.split()[1], again.split()[1])
    async with AsyncSandbox(engine=other, isolation="gvisor", image="snapshot:strange") as there:
        assert (await there.read_file("count")).split()[0] == "4"
        assert "python3" not in (await there.exec("cat /proc/*/comm")).stdout
    for number, (old, new) in enumerate(((b"runsc version", b"runsc Version"), (b"pages.img", b"pages.sh/"))):
        head, newline, rest = file.read_bytes()[:-65].partition(b"\n")
        body = head.replace(old, new) + newline + rest
        (tmp_path / "forged").write_bytes(body + hashlib.sha256(body).hexdigest().encode() + b"\n")
        with pytest.raises(ImageError):
            await other.import_snapshot(tmp_path / "forged", f"forged{number}", memory=True)
    assert {each.name for each in await other.snapshots()} == {"trusted", "strange"}
    await emptied(other)


@pytest.mark.timeout(180)
async def test_an_exported_memory_names_the_version_that_saved_it(
    gvisor: LinuxEngine, sandbox_on: MakeSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever version is installed by then, also if that was so before the memory was saved."""
    runsc, saved_by = (
        oci_runtimes.find("gvisor", gvisor.layout.settings.data_dir).program,
        gvisor._memory_format.version(),
    )
    newer = tmp_path / "runsc"
    newer.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo runsc version newer; exit; fi\nexec {runsc} "$@"\n'
    )
    newer.chmod(0o755)
    async with sandbox_on(gvisor) as sandbox:
        await sandbox.snapshot("before", memory=True)
        with monkeypatch.context() as upgrade:
            upgrade.setenv("ATOLL_RUNSC", str(newer))
            await sandbox.snapshot("after", await sandbox.checkpoint(memory=True), memory=True)
            for name in ("before", "after"):
                await gvisor.export_snapshot(name, tmp_path / name)
                header = json.loads((tmp_path / name).read_bytes().partition(b"\n")[0])
                assert header["memory"]["version"] == saved_by
                with pytest.raises(ImageError, match="this machine has 'runsc version newer'"):
                    await gvisor.import_snapshot(tmp_path / name, "moved", memory=True)
    assert (await gvisor.import_snapshot(tmp_path / "after", "moved", memory=True)).memory
    await gvisor.export_snapshot("moved", tmp_path / "again")
    assert json.loads((tmp_path / "again").read_bytes().partition(b"\n")[0])["memory"]["version"] == saved_by


@pytest.mark.timeout(120)
async def test_a_memory_of_an_unknown_version_is_not_exported(
    gvisor: LinuxEngine, sandbox_on: MakeSandbox, tmp_path: Path
) -> None:
    """As one that an earlier version of Atoll saved. It can still be used here, and a snapshot of that be exported."""
    async with sandbox_on(gvisor) as sandbox:
        await sandbox.snapshot("old", memory=True)
    saved = gvisor._snapshots.named("snapshot:old")
    (gvisor.layout.memory(saved.id) / "version").unlink()
    with pytest.raises(EngineError, match="which version of gVisor"):
        await gvisor.export_snapshot("old", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
    async with sandbox_on(gvisor, image="snapshot:old") as restored:
        await restored.snapshot("new", memory=True)
    await gvisor.export_snapshot("new", tmp_path / "file")
    assert (await gvisor.import_snapshot(tmp_path / "file", "moved", memory=True)).memory
