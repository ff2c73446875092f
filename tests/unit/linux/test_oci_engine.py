"""The `oci` engine with the real runtimes. A runtime that is missing is a skip on a laptop and a failure in CI."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from atoll.engines.host import process_ref
from atoll.engines.linux import construction
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.runtimes.oci_runtimes import locate
from atoll.errors import (
    EngineError,
    EngineUnavailableError,
    ImageError,
    SandboxGoneError,
    SpecError,
    UnsupportedError,
)
from atoll.guest import Guest, StartRequest
from atoll.images import Image, Kind
from atoll.model import Cause, Handle, Observation, SandboxSpec, State
from atoll.settings import Settings
from atoll.waiting import Deadline
from leftovers import emptied, left_behind
from needs import missing, need


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    need("root")
    return Settings(tmp_path / "data", tmp_path / "run")


@pytest.fixture(params=["runc", pytest.param("crun", marks=pytest.mark.again), "runsc"])
async def engine(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[OciEngine]:
    found = locate(request.param, settings.data_dir)
    if found is None:
        missing(f"needs {request.param}")
    made = OciEngine(settings, None if request.param == "runsc" else request.param)
    made.isolation = "gvisor" if request.param == "runsc" else "namespaces"  # type: ignore[attr-defined]
    yield made
    await emptied(made)
    assert left_behind(made) == []


@pytest.fixture
async def runc(settings: Settings) -> AsyncIterator[OciEngine]:
    if locate("runc", settings.data_dir) is None:
        missing("needs runc")
    made = OciEngine(settings, "runc")
    yield made
    await emptied(made)
    assert left_behind(made) == []


def spec(engine: OciEngine, **values: object) -> SandboxSpec:
    return SandboxSpec.of(isolation=engine.isolation, **values)  # type: ignore[attr-defined]


async def output(engine: OciEngine, handle: Handle, command: str, user: str | None = None) -> str:
    guest = Guest(lambda: engine.connect(handle))
    try:
        request = StartRequest(id=os.urandom(4).hex().encode(), shell=command, user=user, merge=True)
        done = await guest.processes.run(request, limit_bytes=1 << 20)
        return done.stdout.value().decode()
    finally:
        await guest.aclose()


async def test_a_sandbox_lives_and_leaves_nothing(engine: OciEngine) -> None:
    handle = await engine.create("a", spec(engine))
    assert (await engine.inspect(handle)).state is State.RUNNING
    assert await output(engine, handle, "id -u; echo hi > /etc/x; cat /etc/x; hostname") == "0\nhi\nsandbox\n"
    assert await output(engine, handle, "id -u", user="1000:1000") == "1000\n"
    assert [found.sandbox_id for found in await engine.list()] == ["a"]
    await engine.delete(handle)
    await engine.delete(handle)
    assert (await engine.inspect(handle)).state is State.MISSING


async def test_another_process_of_ours_finds_and_uses_it(engine: OciEngine, settings: Settings) -> None:
    handle = await engine.create("a", spec(engine))
    await output(engine, handle, "echo kept > /workspace/f")
    other = OciEngine(settings)
    (found,) = await other.list()
    assert found == handle
    assert await output(other, found, "cat /workspace/f") == "kept\n"
    await other.delete(found)
    await other.aclose()
    assert (await engine.inspect(handle)).state is State.MISSING


async def test_two_sandboxes_share_no_ids_and_no_files(engine: OciEngine) -> None:
    first, second = await asyncio.gather(engine.create("a", spec(engine)), engine.create("b", spec(engine)))
    await output(engine, first, "touch /mine")
    assert "mine" not in await output(engine, second, "ls /")
    assert len(set(engine.layout.ids.owners())) == 2


async def test_pausing_stops_everything_and_resuming_goes_on(engine: OciEngine) -> None:
    handle = await engine.create("a", spec(engine))
    await engine.pause(handle)
    await engine.pause(handle)
    assert (await engine.inspect(handle)).state is State.PAUSED
    await engine.resume(handle)
    await engine.resume(handle)
    assert (await engine.inspect(handle)).state is State.RUNNING
    assert await output(engine, handle, "echo alive") == "alive\n"
    await engine.pause(handle)
    await engine.delete(handle)


async def test_a_lifetime_ends_it_and_is_the_cause(engine: OciEngine) -> None:
    handle = await engine.create("a", spec(engine, limits={"lifetime_s": 0.2}))
    await engine._watchers["a"]
    assert await engine.inspect(handle) == Observation(State.STOPPED, Cause.TIMEOUT, "its lifetime of 0.2 s was over")
    with pytest.raises(SandboxGoneError) as caught:
        await engine.connect(handle)
    assert caught.value.cause == "timeout"


async def test_a_lifetime_that_passed_while_nobody_watched_counts(engine: OciEngine, settings: Settings) -> None:
    handle = await engine.create("a", spec(engine, limits={"lifetime_s": 0.3}))
    await engine.aclose()
    await asyncio.sleep(0.3)
    other = OciEngine(settings)
    assert (await other.inspect(handle)).cause is Cause.TIMEOUT
    await other.delete(handle)
    await other.aclose()


async def test_limits_hold_and_are_counted(runc: OciEngine) -> None:
    limits = {"memory_bytes": "64m", "pids": 24, "disk_bytes": "16m", "open_files": 64, "cpus": 0.5}
    handle = await runc.create("a", SandboxSpec.of(limits=limits))
    assert "uota" in await output(runc, handle, "head -c 40M /dev/zero > /f; rm /f")
    assert await output(runc, handle, "ulimit -n; ulimit -Hn; ulimit -c") == "64\n64\n0\n"
    await output(runc, handle, "for i in $(seq 60); do sleep 5 & done 2>/dev/null; kill $(jobs -p)")
    await output(runc, handle, "python3 -c 'x = bytearray(200 << 20)'")
    events = await runc.limit_events(handle)
    assert events.pids_refused > 0
    assert events.oom_kills > 0


async def test_volumes_are_there_with_the_rights_asked_for(runc: OciEngine, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    os.chown(tmp_path / "shared", 4321, 4321)
    (tmp_path / "shared/file").write_text("from the host")
    host = str(tmp_path / "shared")
    volumes = [{"host": host, "path": "/data/in"}, {"host": host, "path": "/ro", "read_only": True}]
    handle = await runc.create("a", SandboxSpec.of(volumes=volumes))
    assert await output(runc, handle, "cat /data/in/file; echo new > /data/in/new; touch /ro/x 2>&1 | tail -c 22") == (
        "from the hostRead-only file system\n"
    )
    assert (tmp_path / "shared/new").read_text() == "new\n"


async def test_no_mount_table_inside_names_a_path_of_the_host(runc: OciEngine) -> None:
    handle = await runc.create("a", SandboxSpec())
    table = await output(runc, handle, "cat /proc/self/mountinfo")
    assert "upperdir=" not in table
    roots = {line.split()[3] for line in table.splitlines()}
    assert all(root == "/" or root.startswith("/null") for root in roots), roots


async def test_nobody_inside_can_look_into_the_agent(runc: OciEngine) -> None:
    handle = await runc.create("a", SandboxSpec())
    for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/maps"):
        assert "denied" in await output(runc, handle, f"head -c 1 {path} 2>&1")


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"isolation": "vm"}, EngineUnavailableError, "kata"),
        ({"limits": {"inodes": 100}}, UnsupportedError, "inodes"),
        ({"volumes": [{"host": "/does/not/exist", "path": "/v"}]}, SpecError, "does not exist"),
        ({"volumes": [{"host": "/tmp", "path": "/proc/x", "read_only": True}]}, SpecError, "cannot be mounted"),
    ],
)
async def test_what_cannot_be_is_refused_with_the_reason(
    runc: OciEngine, values: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await runc.create("a", SandboxSpec.of(**values))
    assert await runc.list() == []


@pytest.mark.parametrize("name", ["../x", "a/b", "-rf", ".", "a\n", "x" * 60, "", "a,upperdir=/etc"])
async def test_a_name_is_never_a_path_or_an_option(runc: OciEngine, name: str) -> None:
    with pytest.raises(SpecError, match="name of a sandbox"):
        await runc.create(name, SandboxSpec())


async def test_one_name_one_sandbox(runc: OciEngine) -> None:
    await runc.create("a", SandboxSpec())
    with pytest.raises(SpecError, match="already"):
        await runc.create("a", SandboxSpec())
    assert await output(runc, (await runc.list())[0], "echo still") == "still\n"


RUNTIMES = {
    "hangs": "sleep 600",
    "fails": "exit 3",
    "garbage": 'for a in "$@"; do case $a in */log) head -c 200000 /dev/urandom > $a;; esac; done; exit 1',
    "lies": "exit 0",
    "names somebody else": 'for a in "$@"; do case $a in */pid) echo 1 > $a;; esac; done; exit 0',
    "dies": "kill -9 $$",
    "daemonizes": "(setsid sleep 600 &); sleep 600",
    "fails after the start": 'RUNC "$@"; exit 1',
    "hangs after the start": 'RUNC "$@"; sleep 600',
}


@pytest.mark.parametrize("name", RUNTIMES)
async def test_a_broken_runtime_is_an_error_and_leaves_nothing(
    runc: OciEngine, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "runc"
    script.write_text("#!/bin/bash\n" + RUNTIMES[name].replace("RUNC", str(shutil.which("runc"))) + "\n")
    script.chmod(0o755)
    monkeypatch.setenv("ATOLL_RUNC", str(script))
    monkeypatch.setattr(construction, "_CREATE_S", 1.0)
    with pytest.raises(EngineError):
        await runc.create("a", SandboxSpec())
    assert await runc.list() == []
    assert not runc.layout.group("a").exists()
    assert not runc.layout.starting("a").exists()


async def test_cancelling_a_create_leaves_nothing(runc: OciEngine) -> None:
    for delay_ms in range(0, 60, 6):
        task = asyncio.create_task(runc.create("a", SandboxSpec()))
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await runc.delete(await task)
        assert await runc.list() == []
        assert not runc.layout.group("a").exists()


def _link_dev(root: Path, victim: Path) -> None:
    (root / "dev").symlink_to(victim)


def _link_proc(root: Path, victim: Path) -> None:
    (root / "proc").symlink_to(victim)


def _link_sys(root: Path, victim: Path) -> None:
    (root / "sys").symlink_to(victim)


def _file_for_dev(root: Path, victim: Path) -> None:
    (root / "dev").write_text("")


def _link_shm(root: Path, victim: Path) -> None:
    (root / "workspace").symlink_to(f"/../../../../../..{victim}")


@pytest.mark.parametrize("spoil", [_link_dev, _link_proc, _link_sys, _file_for_dev, _link_shm])
async def test_a_hostile_image_reaches_nothing_of_the_host(
    runc: OciEngine, tmp_path: Path, spoil: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, root = tmp_path / "victim", tmp_path / "image" / "rootfs"
    victim.mkdir()
    root.mkdir(parents=True)
    spoil(root, victim)
    image = Image("evil", Kind.TAR, layers=(root,))

    async def acquire(reference: str, sandbox_id: str) -> Image:
        return image

    # The store refuses such images when they come in; here one got past it.
    monkeypatch.setattr(runc.layout.images, "acquire", acquire)
    try:
        handle = await runc.create("a", SandboxSpec.of(image="tar:/evil"))
    except (ImageError, EngineError):
        pass
    else:
        await runc.delete(handle)
    assert os.listdir(victim) == []
    assert await runc.list() == []


async def test_gc_removes_what_nobody_owns_and_touches_nothing_else(runc: OciEngine) -> None:
    kept = await runc.create("kept", SandboxSpec())
    places = runc.layout
    places.layers.create_layer("stray", None)
    places.ids.claim("stray")
    places.starting("stray").directories()[0].mkdir(parents=True)
    foreign = places.settings.data_dir / "oci" / "notes.txt"
    foreign.write_text("mine")
    assert await runc.gc() == ["leftovers of stray"]
    assert await runc.gc() == []
    assert foreign.exists()
    assert await output(runc, kept, "echo alive") == "alive\n"


async def test_a_killed_sandbox_is_seen_as_ended(runc: OciEngine) -> None:
    handle = await runc.create("a", SandboxSpec())
    record = runc.layout.records.read("a")
    assert record is not None
    assert record.init is not None
    assert await process_ref.kill({record.init}, Deadline.after(5))
    assert (await runc.inspect(handle)).state is State.STOPPED
    with pytest.raises(SandboxGoneError):
        await runc.connect(handle)


async def test_a_record_of_an_earlier_boot_is_stopped_by_the_host(runc: OciEngine) -> None:
    handle = await runc.create("a", SandboxSpec())
    record = runc.layout.records.read("a")
    assert record is not None
    runc.layout.records.write(record.model_copy(update={"boot_id": "another"}))
    assert (await runc.inspect(handle)).cause is Cause.HOST
    await runc.delete(handle)
