"""Group F: calls on files see the sandbox and never the host, whatever the sandbox does to its files meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import SandboxError
from atoll.guest.tree_copy import PartialCopyError
from atoll.sandbox.sandbox import AsyncSandbox
from security.canaries import Canaries, WatchedSandbox
from security.conftest import EVERY, NAMESPACES, PRELUDE, PYTHON, REFUSED, WITH_GVISOR, Target, inside

pytestmark = pytest.mark.timeout(120)


def contents(folder: Path, canaries: Canaries) -> dict[str, tuple[int, int, str]]:
    """Mode, owner and digest of all that arrived, each file searched for canaries."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        canaries.search(data)
        found[str(path.relative_to(folder))] = (info.st_mode, info.st_uid, hashlib.sha256(data).hexdigest())
    return found


@WITH_GVISOR
async def test_f01_reading_through_a_link_reads_the_sandbox(
    target: Target, host_secret: Path, place: Path, canaries: Canaries
) -> None:
    async with target.sandbox() as sandbox:
        up = "../" * 20
        links = {"a": str(host_secret), "b": f"{up}{host_secret}", "c": f"/proc/1/root{host_secret}"}
        links |= {"d": str(host_secret.parent), "e": f"/proc/self/root{host_secret}", "f": "/proc/self/cwd"}
        for name, link in links.items():
            assert (await sandbox.exec(["ln", "-s", link, f"/workspace/{name}"])).success
            for path in (f"/workspace/{name}", f"/workspace/{name}/canary.txt"):
                with contextlib.suppress(*REFUSED):
                    await sandbox.read_bytes(path)
                with contextlib.suppress(*REFUSED):
                    await sandbox.list_files(path)
        with contextlib.suppress(*REFUSED):
            await sandbox.copy_from("/workspace", place / "out")
        with contextlib.suppress(*REFUSED):
            await sandbox.copy_from("/workspace/a", place / "a")
        contents(place, canaries)
        # The same link does lead somewhere when the sandbox has such a file of its own.
        await sandbox.exec(f"mkdir -p {host_secret.parent}; echo its own > {host_secret}")
        assert await sandbox.read_file("/workspace/a") == "its own\n"


def test_f01_control(place: Path, host_secret: Path, canaries: Canaries) -> None:
    """A naive reader, on a tree like the sandbox's."""
    (place / "a").symlink_to(host_secret)
    assert canaries.found_in((place / "a").read_bytes())


@EVERY
async def test_f02_writing_through_a_link_writes_the_sandbox(target: Target, place: Path) -> None:
    victim = place / "victim"
    victim.mkdir(mode=0o777)
    (victim / "kept").write_text("as it was")
    (place / "source").write_text("from the host")
    async with target.sandbox() as sandbox:
        for number, link in enumerate((str(victim), f"{'../' * 20}{victim}", f"/proc/1/root{victim}")):
            name = f"/workspace/d{number}"
            assert (await sandbox.exec(["ln", "-s", link, name])).success
            for call in (
                sandbox.write_file(f"{name}/new", "x"),
                sandbox.write_file(f"{name}/kept", "x"),
                sandbox.append_file(f"{name}/kept", "x"),
                sandbox.make_dir(f"{name}/folder"),
                sandbox.copy_to(place / "source", f"{name}/copied"),
                sandbox.chmod(f"{name}/kept", 0o777),
                sandbox.move(f"{name}/kept", f"{name}/moved"),
                sandbox.remove(f"{name}/kept"),
                sandbox.remove(name),
            ):
                with contextlib.suppress(*REFUSED):
                    await call
    assert os.listdir(victim) == ["kept"]
    assert (victim / "kept").read_text() == "as it was"
    assert stat.S_IMODE((victim / "kept").stat().st_mode) == 0o644


SWAP = """
os.chdir("/workspace")
os.makedirs("d", exist_ok=True)
os.makedirs("bait", exist_ok=True)
open("d/x", "w").write("inside")
open("bait/x", "w").write("bait")
os.symlink("VICTIM", "l")
os.symlink("/workspace/bait", "m")
count = 0
while not os.path.exists("/tmp/enough"):
    for other in (b"l", b"m"):
        LIBC.renameat2(-100, b"d", -100, other, 2)
        LIBC.renameat2(-100, b"d", -100, other, 2)
        count += 2
    if count % 20000 == 0:
        try:
            open("d/x", "w").write("inside")
        except OSError:
            pass
print(count)
"""


@EVERY
@pytest.mark.parametrize(
    ("seconds", "swaps"),
    [
        pytest.param(2.0, 1_000, id="2s"),
        pytest.param(60.0, 100_000, id="60s", marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
    ],
)
async def test_f03_a_directory_that_is_swapped_for_a_link_all_the_time_leads_nowhere(
    target: Target, seconds: float, swaps: int, place: Path, canaries: Canaries
) -> None:
    victim = place / "victim"
    victim.mkdir(mode=0o777)
    (victim / "x").write_text(canaries.new("the victim of a race"))
    before = contents_unsearched(victim)
    (place / "source").write_text("copied")
    seen, rounds, end = set(), 0, asyncio.get_running_loop().time() + seconds
    async with target.sandbox() as sandbox:
        racing = await sandbox.start([*PYTHON[:2], "-c", PRELUDE + SWAP.replace("VICTIM", str(victim))], timeout=200)
        while asyncio.get_running_loop().time() < end:
            rounds += 1
            with contextlib.suppress(*REFUSED):
                seen.add(await sandbox.read_bytes("/workspace/d/x"))
            for call in (
                sandbox.write_file("/workspace/d/y", "y"),
                sandbox.copy_to(place / "source", "/workspace/d/z"),
                sandbox.copy_from("/workspace/d", place / "out"),
                sandbox.chmod("/workspace/d/x", 0o600),
                sandbox.remove("/workspace/d/y"),
                sandbox.list_files("/workspace/d"),
            ):
                with contextlib.suppress(*REFUSED):
                    await call
            contents(place / "out", canaries) if (place / "out").exists() else None
            shutil.rmtree(place / "out", ignore_errors=True)
        await sandbox.write_file("/tmp/enough", "")
        done = await asyncio.wait_for(racing.wait(), 30)
        assert int(done.stdout) >= swaps, done.stderr
    assert rounds > 1
    assert b"inside" in seen or b"bait" in seen, "nothing was read, so nothing is proved"
    assert contents_unsearched(victim) == before


def contents_unsearched(folder: Path) -> dict[str, tuple[int, int, str]]:
    return contents(folder, Canaries())


MAGIC = (
    "/proc/self/environ", "/proc/1/environ", "/proc/self/cmdline", "/proc/thread-self/fd/0", "/proc/self/fd/3",
    "/proc/self/fd/4", "/proc/self/maps", "/dev/fd/0", "/dev/fd/3", "/dev/stdin", "/proc/self/mountinfo",
    "/proc/net/unix", "/proc/self/root/etc/shadow", "/etc/shadow",
)  # fmt: skip


@EVERY
async def test_f04_the_magic_files_of_proc_are_the_sandboxs_own(target: Target, host_secret: Path) -> None:
    async with target.sandbox() as sandbox:
        for path in (
            *MAGIC,
            f"/proc/self/root{host_secret}",
            f"/proc/1/root{host_secret}",
            f"/proc/{os.getpid()}/environ",
        ):
            with contextlib.suppress(*REFUSED):
                data = await asyncio.wait_for(sandbox.read_bytes(path, length=1 << 20), 10)
                assert str(sys.executable).encode() not in data, path
        assert (await sandbox.exec("true")).success


def test_f04_control(canaries: Canaries) -> None:
    """The file that a process of the host would read in the sandbox's place holds a secret."""
    done = subprocess.run(["cat", "/proc/self/environ"], capture_output=True, timeout=10)
    assert canaries.found_in(done.stdout) == ["the engine's environment"]


@EVERY
async def test_f05_special_files_neither_block_nor_go_on_for_ever(target: Target, place: Path) -> None:
    make = """
mkdir /workspace/s; cd /workspace/s; mkfifo pipe; ln -s /dev/zero zero; ln -s /dev/urandom random; ln -s pipe to-pipe
python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('sock')"; echo x > file; truncate -s 4T sparse
ln -s loop loop
"""
    async with target.sandbox() as sandbox:
        assert (await sandbox.exec(make)).success
        for name in ("pipe", "zero", "random", "to-pipe", "sock", "sparse", "loop"):
            with contextlib.suppress(SandboxError, OSError):
                data = await asyncio.wait_for(sandbox.read_bytes(f"s/{name}", length=1 << 16), 10)
                assert len(data) <= 1 << 16
            if name != "sparse":
                with contextlib.suppress(SandboxError, OSError):
                    await asyncio.wait_for(sandbox.read_bytes(f"s/{name}"), 10)
                with contextlib.suppress(SandboxError, OSError):
                    await asyncio.wait_for(sandbox.write_file(f"s/{name}/below", "x"), 10)
        await sandbox.exec("rm /workspace/s/sparse")
        with contextlib.suppress(PartialCopyError):
            await asyncio.wait_for(sandbox.copy_from("s", place / "out"), 20)
        assert (place / "out" / "file").read_text() == "x\n"
        kinds = {path.name: stat.S_IFMT(path.lstat().st_mode) for path in (place / "out").iterdir()}
        assert set(kinds.values()) <= {stat.S_IFREG, stat.S_IFLNK}


PATHS = (
    "../../etc/passwd", "/../../..", "a/./../../b", "%2e%2e/%2e%2e/etc", "..\\..\\etc", "~root", "~", "//", "\0",
    "a\0b", "x" * 5000, "/".join(["y" * 200] * 30), "", ".", "..", "...", "/..", "./..", "a//b", "\n", "\x1b[2J",
    "-rf", "$(id)",
)  # fmt: skip


@EVERY
async def test_f07_odd_paths_are_refused_or_stay_inside(target: Target, host_secret: Path) -> None:
    async with target.sandbox() as sandbox:
        for path in (*PATHS, f"{'../' * 15}{host_secret}", f"/workspace/{'../' * 15}{host_secret}"):
            for call in (sandbox.read_bytes(path), sandbox.list_files(path), sandbox.stat(path)):
                with contextlib.suppress(*REFUSED):
                    await asyncio.wait_for(call, 10)
            if path.strip("./") and path not in ("//",):
                with contextlib.suppress(*REFUSED):
                    await sandbox.write_file(path, "x")
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"
    assert not Path("/b").exists()


@EVERY
async def test_f08_rights_are_given_to_the_file_that_was_written(target: Target, place: Path) -> None:
    """The sandbox replaces what is written by a link to the host, again and again, hoping to redirect the chmod."""
    victim = place / "victim"
    victim.write_text("as it was")
    victim.chmod(0o600)
    attack = f"""
os.chdir("/workspace")
os.symlink({str(victim)!r}, "link")
open("/tmp/ready", "w")
while not os.path.exists("/tmp/enough"):
    LIBC.renameat2(-100, b"up", -100, b"link", 2)
"""
    (place / "up").write_text("new")
    (place / "up").chmod(0o777)
    async with target.sandbox() as sandbox:
        racing = await sandbox.start([*PYTHON[:2], "-c", PRELUDE + attack], timeout=100)
        for _ in range(60):
            for call in (
                sandbox.write_file("/workspace/up", "x", mode=0o777),
                sandbox.copy_to(place / "up", "/workspace/up"),
                sandbox.chmod("/workspace/up", 0o777),
            ):
                with contextlib.suppress(*REFUSED):
                    await call
        await sandbox.write_file("/tmp/enough", "")
        await asyncio.wait_for(racing.wait(), 30)
    info = victim.stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid, victim.read_text()) == (0o600, os.geteuid(), "as it was")


@NAMESPACES
async def test_f09_a_hard_link_is_no_way_to_a_shared_file(target: Target, place: Path) -> None:
    (place / "ro").mkdir()
    (place / "ro" / "f").write_text("as it was")
    before = hashlib.sha256(Path("/usr/bin/true").read_bytes()).hexdigest()
    async with target.sandbox(volumes={str(place / "ro"): "/ro:ro"}) as sandbox:
        payload = "say([attempt(os.link, '/usr/bin/true', '/workspace/h'), attempt(os.link, '/ro/f', '/workspace/h2')])"
        assert set(await inside(sandbox, payload)) <= {"EXDEV", "EPERM"}
        # A file of the image below: written in the sandbox's own layer.
        await sandbox.exec("ln /etc/hosts /workspace/h3")
        await sandbox.write_file("/workspace/h3", "changed")
        await sandbox.append_file("/etc/hosts", "changed")
        for path in ("/usr/bin/true", "/ro/f"):
            with pytest.raises(OSError, match=r"[Rr]ead-only|[Pp]ermission|[Dd]enied"):
                await sandbox.write_file(path, "x")
    async with target.sandbox() as other:
        assert "changed" not in await other.read_file("/etc/hosts")
    assert (place / "ro" / "f").read_text() == "as it was"
    assert hashlib.sha256(Path("/usr/bin/true").read_bytes()).hexdigest() == before


async def test_every_call_on_files_is_searched() -> None:
    """The sandboxes of this suite look at what comes out of them. A new call that returns content has to be added."""
    returning = {"exec", "read_bytes", "list_files", "walk"}
    assert returning <= vars(WatchedSandbox).keys()
    assert AsyncSandbox.read_file is WatchedSandbox.read_file, "it reads by read_bytes"
