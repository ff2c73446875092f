"""The `process` engine with a real bubblewrap and a real agent."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from atoll import agent_binary
from atoll.engines.bubblewrap.engine import BubblewrapEngine
from atoll.engines.host import process_ref
from atoll.errors import ImageNotFoundError, SandboxGoneError, SpecError, UnsupportedError
from atoll.model import Cause, SandboxSpec, State
from atoll.settings import Settings
from atoll.waiting import Deadline, readable
from inside import run
from leftovers import leftovers
from needs import needs
from user_switch import as_user

root_only = needs("root")


async def test_a_sandbox_can_be_made_reached_listed_and_deleted(engine: BubblewrapEngine) -> None:
    spec = SandboxSpec.of(env={"GREETING": "hi"}, labels={"a": "b"})
    handle = await engine.create("one", spec)
    assert (await engine.inspect(handle)).state is State.RUNNING
    assert await engine.list() == [handle]
    assert await run(engine, handle, "echo $GREETING; pwd; id -un") == "hi\n/workspace\nuser\n"
    await engine.delete(handle)
    assert (await engine.inspect(handle)).state is State.MISSING
    assert await engine.list() == []
    await engine.delete(handle)


async def test_many_at_once(engine: BubblewrapEngine) -> None:
    handles = await asyncio.gather(*(engine.create(f"s{number}", SandboxSpec()) for number in range(12)))
    assert len({handle.details.get("uid", handle.sandbox_id) for handle in handles}) == 12
    said = await asyncio.gather(*(run(engine, handle, "echo $ATOLL_SANDBOX_ID") for handle in handles))
    assert said == [f"{handle.sandbox_id}\n" for handle in handles]
    await asyncio.gather(*(engine.delete(handle) for handle in handles for _ in range(2)))


async def test_nothing_of_our_environment_gets_in(engine: BubblewrapEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "tweet")
    handle = await engine.create("env", SandboxSpec())
    seen = await run(engine, handle, "env; cat /proc/[0-9]*/environ")
    await engine.delete(handle)
    assert "tweet" not in seen
    assert "HOME=/home/user" in seen


async def test_nothing_outside_can_be_written_or_seen(engine: BubblewrapEngine) -> None:
    handle = await engine.create("walls", SandboxSpec())
    attempts = "touch /x /usr/x /etc/x /dev/x /run/x /run/atoll/x; ls /root /var/lib /opt /sys /srv; unshare -U true"
    seen = await run(engine, handle, f"({attempts}) 2>&1 | grep -vcE 'Read-only|No such file|unshare failed|cannot'")
    assert seen == "0\n"
    assert await run(engine, handle, "ls /proc/sys/net/ipv4/conf") == "all\ndefault\nlo\n"
    assert await run(
        engine, handle, "grep -E 'Cap(Eff|Bnd|Amb)|NoNewPrivs' /proc/self/status | sort | tr -d '\\n\\t'"
    ) == ("CapAmb:0000000000000000CapBnd:0000000000000000CapEff:0000000000000000NoNewPrivs:1")
    await engine.delete(handle)


async def test_commands_get_no_descriptor_of_ours(engine: BubblewrapEngine) -> None:
    leaked = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        handle = await engine.create("fds", SandboxSpec(hostname="other"))
    finally:
        os.close(leaked)
    assert await run(engine, handle, "ls /proc/self/fd | wc -l") == "4\n"  # three, and the listing itself
    record = engine._records.read("fds")
    assert record is not None
    assert record.init is not None
    targets = [os.readlink(fd) for fd in Path(f"/proc/{record.init.pid}/fd").iterdir()] if os.geteuid() == 0 else []
    assert not [target for target in targets if target.startswith(("/etc", "/memfd"))]
    await engine.delete(handle)


@root_only
async def test_each_runs_as_a_user_of_its_own(engine: BubblewrapEngine) -> None:
    one, two = [await engine.create(name, SandboxSpec()) for name in ("one", "two")]
    uids = [int(handle.details["uid"]) for handle in (one, two)]
    assert uids[0] != uids[1]
    for handle, uid in zip((one, two), uids, strict=True):
        record = engine._records.read(handle.sandbox_id)
        assert record is not None
        for process in record.processes():
            assert f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}" in Path(f"/proc/{process.pid}/status").read_text()
            assert "Groups:\t \n" in Path(f"/proc/{process.pid}/status").read_text()
        assert (engine._records.home(handle.sandbox_id) / "work").stat().st_uid == uid
        await engine.delete(handle)


async def test_volumes_are_seen_and_read_only_ones_stay_as_they_are(
    engine: BubblewrapEngine, open_folder: Path
) -> None:
    for name in ("in", "out"):
        (open_folder / name).mkdir()
        (open_folder / name).chmod(0o777)
    (open_folder / "in/hello").write_text("hi")
    spec = SandboxSpec.of(
        volumes=[
            {"host": str(open_folder / "in"), "path": "/in", "read_only": True},
            {"host": str(open_folder / "out"), "path": "/workspace/out"},
        ]
    )
    handle = await engine.create("vol", spec)
    seen = await run(engine, handle, "cat /in/hello; touch /in/x; echo back >out/answer")
    await engine.delete(handle)
    assert "hi" in seen
    assert "Read-only file system" in seen
    assert (open_folder / "out/answer").read_text() == "back\n"
    assert os.listdir(open_folder / "in") == ["hello"]


async def test_a_volume_cannot_show_other_sandboxes(engine: BubblewrapEngine, settings: Settings) -> None:
    settings.engine_data_dir("process")
    for host in (settings.data_dir, settings.data_dir / "process", settings.data_dir.parent, Path("/")):
        with pytest.raises(SpecError, match="other sandboxes"):
            await engine.create("vol", SandboxSpec.of(volumes=[{"host": str(host), "path": "/data"}]))


async def test_open_files_are_limited(engine: BubblewrapEngine) -> None:
    handle = await engine.create("limits", SandboxSpec.of(limits={"open_files": 77}))
    assert await run(engine, handle, "ulimit -n; ulimit -Hn") == "77\n77\n"
    await engine.delete(handle)


async def test_a_lifetime_ends_it_whether_anybody_watches_or_not(engine: BubblewrapEngine, settings: Settings) -> None:
    handle = await engine.create("short", SandboxSpec.of(limits={"lifetime_s": 0.3}))
    record = engine._records.read("short")
    assert record is not None
    assert record.init is not None
    fd = record.init.open()
    if fd is not None:
        try:
            assert await readable({fd}, Deadline.after(20)), "nobody has looked"
        finally:
            os.close(fd)
    seen = await BubblewrapEngine(settings).inspect(handle)
    assert (seen.state, seen.cause, seen.reason) == (State.STOPPED, Cause.TIMEOUT, "its lifetime of 0.3 s was over")
    with pytest.raises(SandboxGoneError) as caught:
        await engine.connect(handle)
    assert caught.value.cause == Cause.TIMEOUT
    await engine.delete(handle)


async def test_a_lifetime_that_passes_during_a_pause_counts(engine: BubblewrapEngine) -> None:
    handle = await engine.create("short", SandboxSpec.of(limits={"lifetime_s": 1.5}))
    await engine.pause(handle)
    async with asyncio.timeout(20):
        while (seen := await engine.inspect(handle)).state is State.PAUSED:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (seen.state, seen.cause) == (State.STOPPED, Cause.TIMEOUT)
    await engine.delete(handle)


async def test_what_it_cannot_do_is_refused(engine: BubblewrapEngine) -> None:
    for limits in ({"memory_bytes": "64m"}, {"cpus": 1}, {"pids": 9}, {"disk_bytes": "64m"}, {"inodes": 99}):
        with pytest.raises(UnsupportedError, match="cannot enforce"):
            await engine.create("no", SandboxSpec.of(limits=limits))
    with pytest.raises(ImageNotFoundError, match="no image 'debian'"):
        await engine.create("no", SandboxSpec.of(image="debian"))
    with pytest.raises(UnsupportedError, match="cannot isolate by vm"):
        await engine.create("no", SandboxSpec.of(isolation="vm"))


async def test_a_name_can_be_used_once_at_a_time(engine: BubblewrapEngine) -> None:
    handle = await engine.create("one", SandboxSpec())
    with pytest.raises(SpecError, match="already"):
        await engine.create("one", SandboxSpec())
    assert (await engine.inspect(handle)).state is State.RUNNING
    await engine.delete(handle)
    await engine.delete(await engine.create("one", SandboxSpec()))


async def test_a_killed_agent_is_explained_and_stays_explained(engine: BubblewrapEngine, settings: Settings) -> None:
    handle = await engine.create("victim", SandboxSpec())
    record = engine._records.read("victim")
    assert record is not None
    assert record.init is not None
    os.kill(record.init.pid, 9)
    assert await process_ref.wait({record.init}, Deadline.after(10))
    for observer in (engine, BubblewrapEngine(settings)):
        seen = await observer.inspect(handle)
        assert (seen.state, seen.cause) == (State.STOPPED, Cause.KILLED)
        assert "SIGKILL" in seen.reason
        with pytest.raises(SandboxGoneError, match="SIGKILL") as caught:
            await observer.connect(handle)
        assert caught.value.cause == "killed"
    assert await engine.list() == [handle]
    await engine.delete(handle)
    with pytest.raises(SandboxGoneError, match="deleted"):
        await engine.connect(handle)


async def test_it_lives_on_without_the_process_outside(engine: BubblewrapEngine) -> None:
    handle = await engine.create("orphan", SandboxSpec())
    record = engine._records.read("orphan")
    assert record is not None
    assert record.monitor is not None
    os.kill(record.monitor.pid, 9)
    assert await run(engine, handle, "echo alive") == "alive\n"
    assert (await engine.inspect(handle)).state is State.RUNNING
    await engine.delete(handle)


def test_it_can_be_used_from_one_event_loop_after_another(engine: BubblewrapEngine) -> None:
    handle = asyncio.run(engine.create("loops", SandboxSpec()))
    assert asyncio.run(run(engine, handle, "echo hi")) == "hi\n"
    asyncio.run(engine.delete(handle))


async def test_deleting_takes_everything_that_runs_and_every_file(engine: BubblewrapEngine) -> None:
    handle = await engine.create("busy", SandboxSpec())
    await run(engine, handle, "setsid sleep 1000 >/dev/null 2>&1 & mkdir -p a/b; touch a/b/c; chmod 0 a/b a . ~")
    assert ((await engine.stats(handle)).pids or 0) >= 2
    await engine.delete(handle)
    assert (await engine.stats(handle)).pids is None


async def test_more_connections_than_the_queue_holds_wait(engine: BubblewrapEngine) -> None:
    handle = await engine.create("queue", SandboxSpec())
    record = engine._records.read("queue")
    assert record is not None
    assert record.init is not None
    os.kill(record.init.pid, 19)
    opening = [asyncio.create_task(engine.connect(handle)) for _ in range(140)]
    done, _ = await asyncio.wait(opening, timeout=0.2)
    assert 100 < len(done) < 140
    os.kill(record.init.pid, 18)
    streams: list[socket.socket] = []
    for task in opening:
        streams.append(await task)
        if len(streams) > 30:  # the agent serves only so many at once
            streams.pop(0).close()
    for stream in streams:
        stream.close()
    await engine.delete(handle)


@root_only
def test_it_works_without_being_root(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = open_folder / "own"
    own.mkdir()
    agent = own / "agent"
    agent.write_bytes(agent_binary.path().read_bytes())
    agent.chmod(0o755)
    monkeypatch.setattr(agent_binary, "path", lambda: agent)  # the package may lie where that user may not read
    settings = Settings(own / "data", own / "run")

    async def use() -> None:
        engine = BubblewrapEngine(settings)
        handle = await engine.create("mine", SandboxSpec())
        assert "uid" not in handle.details
        assert await run(engine, handle, "id -u; mkdir -p a/b; touch a/b/c; chmod 0 a/b a .") == "1000\n"
        assert engine._find_processes("mine")
        assert (await engine.stats(handle)).pids == 1
        await engine.delete(handle)
        assert await engine.list() == []

    as_user(own, lambda: asyncio.run(use()))
    assert leftovers(settings) == []
