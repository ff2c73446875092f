"""The supervisor of set-id bits on volumes: it is limited like its sandbox, gives nothing away, and ends with it."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.waiting import Deadline, readable
from security.conftest import Target, inside
from security.owned_volumes import MAPPED, SUPERVISED, special, volume_of

SEEN = r"""
seen = []
for flags, mode in ((os.O_RDONLY, 0), (os.O_CREAT, 0o4644)):
    with open(os.open("/proc/sys/net/ipv4/conf/lo/tag", flags, mode)) as file:
        seen.append(file.read())
say(seen)
"""


@SUPERVISED
async def test_a_supervisor_opens_no_file_of_the_hosts_network_for_its_caller(target: Target, place: Path) -> None:
    """What is below /proc/sys/net is that of the network of whoever opens it. The kernel makes no use of this one."""
    tag = Path("/proc/sys/net/ipv4/conf/lo/tag")
    before = tag.read_text()
    tag.write_text("4711")
    try:
        async with target.sandbox(volumes={str(volume_of(place)): "/v"}) as sandbox:
            assert await inside(sandbox, SEEN) == ["0\n", "0\n"]
    finally:
        tag.write_text(before)


LANDLOCK = r"""
sys_create, sys_restrict = 444, 446
said, kind = "no Landlock", call(sys_create, None, 0, 1)
if kind[0] > 0:
    READ_FILE = 1 << 2
    rules = struct.pack("<Q", READ_FILE)
    ruleset = call(sys_create, rules, len(rules), 0)[0]
    assert call(sys_restrict, ruleset, 0)[0] == 0
    said = "closed"
    try:
        os.open("/etc/passwd", os.O_CREAT, 0o4644)
        said = "opened"
    except PermissionError:
        pass
say(said)
"""


@SUPERVISED
async def test_a_supervisor_gives_nobody_back_what_landlock_took(target: Target, place: Path) -> None:
    async with target.sandbox(volumes={str(volume_of(place)): "/v"}) as sandbox:
        assert await inside(sandbox, LANDLOCK) == "no Landlock"
    async with target.sandbox() as sandbox:
        assert await inside(sandbox, LANDLOCK) in {"no Landlock", "closed"}, "the kernel may have none"


@MAPPED
async def test_what_a_supervisor_does_counts_for_its_sandbox(target: Target, place: Path) -> None:
    assert isinstance(target.engine, NativeEngine | OciEngine)
    async with target.sandbox(volumes={str(volume_of(place)): "/v"}) as sandbox:
        assert (await sandbox.exec("touch /v/x && chmod 4755 /v/x")).success
        (supervisor,) = supervisors(sandbox.id)
        record = target.engine.layout.records.read(sandbox.id)
        assert record is not None
        assert record.init is not None
        assert groups(supervisor) == groups(record.init.pid)


def groups(pid: int) -> dict[str, str]:
    """By hierarchy: where limits are."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    alone = len(lines) == 1
    return {names: path for _, names, path in lines if alone or {"memory", "pids", "cpu"} & set(names.split(","))}


@SUPERVISED
async def test_without_its_supervisor_no_bit_is_set_and_all_else_goes_on(target: Target, place: Path) -> None:
    volume = volume_of(place)
    async with target.sandbox(volumes={str(volume): "/v"}) as sandbox:
        (supervisor,) = supervisors(sandbox.id)
        os.kill(supervisor, 9)
        result = await sandbox.exec("cp /usr/bin/cat /v/cat; chmod 4755 /v/cat; chmod 700 /v/cat && stat -c %a /v/cat")
        assert result.stdout == "700\n", result
        assert "Function not implemented" in result.stderr
    assert special(volume) == []


@SUPERVISED
async def test_a_supervisor_ends_with_its_sandbox_however_that_ends(target: Target, place: Path) -> None:
    assert isinstance(target.engine, NativeEngine | OciEngine)
    volume = volume_of(place)
    async with target.sandbox() as plain:
        assert supervisors(plain.id) == [], "only a sandbox with a writable volume has one"
        await plain.exec("true")
    sandbox = target.peer(volumes={str(volume): "/v"})
    await sandbox.create()
    (supervisor,) = supervisors(sandbox.id)
    ended = os.pidfd_open(supervisor)
    record = target.engine.layout.records.read(sandbox.id)
    assert record is not None
    assert record.init is not None
    os.kill(record.init.pid, 9)
    try:
        assert await readable({ended}, Deadline.after(20))
    finally:
        os.close(ended)
    await sandbox.cleanup()


def supervisors(sandbox_id: str) -> list[int]:
    """They are in a control group of their sandbox. Each has a child for the moment in which it carries out a call."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            groups = (path / "cgroup").read_text()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if words[1:2] == [b"supervise"] and sandbox_id in groups:
            found[int(path.name)] = parent
    return [pid for pid, parent in found.items() if parent not in found]
