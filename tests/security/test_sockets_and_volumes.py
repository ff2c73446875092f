"""Group B: sockets of the host, and what volumes cover and lead to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from atoll.errors import EngineError, ImageError, SandboxError, SpecError
from atoll.model import Volume
from atoll.sandbox.sandbox import AsyncSandbox
from security.conftest import IDS, NAMESPACES, PYTHON, RUNC, Target, inside
from security.hostile_images import put_in_place_of_any_image, small_image
from security.weak import Weak

pytestmark = pytest.mark.timeout(90)


SOCKETS = """
found = []
for top in ("/run", "/var", "/tmp", "/dev", "/root", "/home", "/workspace", "/etc", "/srv", "/mnt", "/opt"):
    for folder, _, names in os.walk(top):
        found += [f"{folder}/{name}" for name in names if stat.S_ISSOCK(os.lstat(f"{folder}/{name}").st_mode)]
names = [line.split()[-1] for line in open("/proc/net/unix").read().splitlines()[1:]]
found += [name for name in names if "@" in name or "/" in name]
said = []
for name in GIVEN:
    with socket.socket(socket.AF_UNIX) as each:
        said.append(attempt(each.connect, name))
say([found, said])
"""


@NAMESPACES
async def test_b12_no_control_socket_can_be_reached(target: Target) -> None:
    beacon_name = f"\0atoll-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as beacon:
        beacon.bind(beacon_name)
        beacon.listen()
        async with target.sandbox() as sandbox:
            agent = str(target.linux.layout.socket(sandbox.id))
            given = [beacon_name, agent, "/run/docker.sock", "/run/containerd/containerd.sock"]
            found, said = await inside(sandbox, SOCKETS.replace("GIVEN", repr(given)))
            assert set(said) <= {"ECONNREFUSED", "ENOENT"}
            assert [name for name in found if str(target.settings.run_dir) in name or "docker" in name] == []


def test_b12_control(weak: Weak) -> None:
    said = weak.run(PYTHON, stdin=b"import os, stat; print(stat.S_ISSOCK(os.stat('/run/docker.sock').st_mode))")
    assert said.text == "True\n"


@pytest.mark.parametrize(
    "text",
    ["../../etc:/x", "/a/../../etc:/x", "./relative:/x", "/a:x", "/a:/b/../..", "/a:/x:rw,exec", "/a", ":/x", "/\0:/x"],
)
def test_b14_a_volume_is_named_by_whole_paths(text: str) -> None:
    with pytest.raises((SpecError, ValueError)):
        Volume.parse(text)


@IDS
@pytest.mark.parametrize("path", ["/", "/proc", "/proc/sys", "/sys/fs/cgroup", "/dev", "/dev/shm"])
async def test_b14_a_volume_covers_no_wall(target: Target, path: str, place: Path) -> None:
    with pytest.raises((SpecError, EngineError, ImageError)):
        async with target.sandbox(volumes={str(place): f"{path}:ro"}):
            pass


@NAMESPACES
async def test_b14_a_volume_lands_inside_whatever_the_image_links_to(
    target: Target, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, shared, root = place / "victim", place / "shared", small_image(place)
    victim.mkdir()
    shared.mkdir()
    os.chown(shared, 4321, 4321)
    (shared / "file").write_text("from the host")
    (root / "data").symlink_to(f"../../../../../../..{victim}")
    put_in_place_of_any_image(target, root, monkeypatch)
    with contextlib.suppress(SandboxError):
        async with target.sandbox(image="tar:/evil", volumes={"/usr": "/usr:ro", str(shared): "/data/in"}) as sandbox:
            assert (await sandbox.exec("cat /data/in/file")).stdout == "from the host"
    assert os.listdir(victim) == []


SWAP = """
os.chdir("/vol")
os.makedirs("a/b", exist_ok=True)
os.symlink("TARGET", "l")
count, end = 0, time.time() + 60
while not os.path.exists("/tmp/enough") and time.time() < end:
    LIBC.renameat2(-100, b"a", -100, b"l", 2)
    count += 1
say(count)
"""


@RUNC
async def test_b15_a_directory_inside_a_shared_volume_is_never_a_way_out(target: Target, place: Path) -> None:
    """The first sandbox may write to the volume and swaps a directory of it for a link to the host's files."""
    shared, victim = place / "shared", place / "victim"
    (shared / "a" / "b").mkdir(parents=True)
    (victim / "b").mkdir(parents=True)
    (victim / "b" / "outside").write_text("")
    for path in (shared, shared / "a", shared / "a" / "b", victim / "b"):
        os.chown(path, 4321, 4321)
    async with target.sandbox(volumes={str(shared): "/vol"}) as first:
        attack = asyncio.create_task(inside(first, SWAP.replace("TARGET", str(victim)), timeout=70))
        seen: set[str] = set()
        end = time.monotonic() + 5
        while time.monotonic() < end and "outside" not in "".join(seen):
            with contextlib.suppress(SandboxError):
                async with target.sandbox(volumes={str(shared / "a" / "b"): "/in"}) as second:
                    seen.add((await second.exec("ls /in")).stdout)
        await first.write_file("/tmp/enough", "")
        assert await attack > 100, "nothing was swapped"
    assert "outside\n" not in seen


@RUNC
async def test_b14_a_read_only_volume_is_read_only(target: Target, place: Path) -> None:
    shared = place / "shared"
    shared.mkdir(mode=0o777)
    (shared / "file").write_text("as it was")
    payload = """
say([attempt(lambda: open("/in/file", "w")), attempt(os.unlink, "/in/file"), attempt(os.chmod, "/in/file", 0o777),
     attempt(os.link, "/in/file", "/in/l"), attempt(os.mkdir, "/in/d"), attempt(os.utime, "/in/file"),
     call(165, None, b"/in", None, 32 | 4096, None)[1]])
"""
    async with AsyncSandbox(
        engine=target.engine, settings=target.settings, volumes={str(shared): "/in:ro"}, pids=64
    ) as sandbox:
        assert set(await inside(sandbox, payload)) <= {"EROFS", "EPERM"}
    assert (shared / "file").read_text() == "as it was"
