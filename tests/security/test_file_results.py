"""Group F: what comes of calls on files: names, sizes, owners and bits, the file before or the file after."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from security.conftest import EVERY, NAMESPACES, REFUSED, RUNC, Target, inside

pytestmark = pytest.mark.timeout(120)


@EVERY
async def test_f11_no_special_bit_owner_or_attribute_comes_out(target: Target, place: Path) -> None:
    make = """
os.makedirs("/workspace/m/d")
for name, mode in (("suid", 0o6755), ("sticky", 0o1777), ("plain", 0o640)):
    open(f"/workspace/m/{name}", "w").write(name)
    os.chmod(f"/workspace/m/{name}", mode)
os.chmod("/workspace/m/d", 0o7777)
os.utime("/workspace/m/plain", (2**33, 2**33))
try:
    os.setxattr("/workspace/m/plain", "user.x", b"y")
    os.chown("/workspace/m/plain", 1000, 1000)
except OSError:
    pass
say(oct(os.stat("/workspace/m/suid").st_mode & 0o7777))
"""
    async with target.sandbox() as sandbox:
        assert await inside(sandbox, make) in ("0o6755", "0o755")
        await sandbox.copy_from("/workspace/m", place / "out")
        await sandbox.copy_from("/workspace/m/suid", place / "one")
    for path in (place / "one", *(place / "out").rglob("*")):
        info = path.lstat()
        assert info.st_mode & 0o7000 == 0, path
        assert (info.st_uid, info.st_gid) == (os.geteuid(), os.getegid())
        assert os.listxattr(path, follow_symlinks=False) == []


NAMES = (
    b"a\nb", b"\xff\xfe", b"-rf", b";id", b"%s%n", b"\x1b]0;x\x07", b"n" * 255, b"\xc3\xa9", b"e\xcc\x81", b"CON",
    b"dot.", b" ", b"\\", b"'\"", b"\xf0\x9f\x92\xa9", b"\xed\xa0\x80",
)  # fmt: skip


@EVERY
async def test_f12_any_name_is_listed_read_and_removed_exactly(target: Target, place: Path) -> None:
    async with target.sandbox() as sandbox:
        make = f"os.mkdir('n')\nfor name in {NAMES!r}:\n    open(b'/workspace/n/' + name, 'wb').write(name)\nsay(1)"
        await inside(sandbox, make)
        listed = await sandbox.list_files("n")
        assert sorted(os.fsencode(info.path) for info in listed) == sorted(NAMES)
        await sandbox.copy_from("n", place / "out")
        assert sorted(os.listdir(os.fsencode(place / "out"))) == sorted(NAMES)
        for info in listed:
            assert await sandbox.read_bytes(f"/workspace/n/{info.path}") == os.fsencode(info.path)
            await sandbox.remove(f"/workspace/n/{info.path}")
        assert await sandbox.list_files("n") == []


@EVERY
@pytest.mark.parametrize(
    ("files", "depth"),
    [
        pytest.param(5_000, 300, id="some"),
        pytest.param(200_000, 4000, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
    ],
)
async def test_f13_huge_listings_and_deep_trees_are_bounded(target: Target, files: int, depth: int) -> None:
    make = f"""
os.makedirs("/workspace/many")
os.chdir("/workspace/many")
for number in range({files}):
    os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY))
os.makedirs("/workspace/deep")
os.chdir("/workspace/deep")
for _ in range({depth}):
    os.mkdir("d")
    os.chdir("d")
os.symlink("..", "up")
say(1)
"""
    async with target.sandbox() as sandbox:
        await inside(sandbox, make, timeout=200)
        before = resident_bytes()
        count = 0
        async for _ in sandbox.walk("many", limit=50_000):
            count += 1
        assert count == min(files, 50_000)
        deep = [info async for info in sandbox.walk("deep")]
        assert len(deep) <= depth + 1
        assert len(deep) >= min(depth, 1000)
        assert resident_bytes() - before < 100 << 20
        await asyncio.wait_for(sandbox.remove("/workspace/deep"), 60)
        assert not await sandbox.exists("/workspace/deep")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@NAMESPACES
async def test_f14_files_belong_to_root_inside_who_is_nobody_outside(target: Target, place: Path) -> None:
    shared = place / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    os.chown(shared, 4321, 4321)
    async with target.sandbox(volumes={str(shared): "/v"}) as sandbox:
        await sandbox.write_file("/root/secret", "x", mode=0o600)
        denied = await inside(sandbox, "say(attempt(os.open, '/root/secret', os.O_RDONLY))", "1000")
        assert denied == "EACCES"
        assert (await sandbox.stat("/root/secret")).uid == 0
        # What root inside makes in a volume is the owner's on the host's disk, and gives nobody inside any right.
        await sandbox.exec("cp /usr/bin/id /v/id && chmod 4755 /v/id")
        assert (await sandbox.exec("/v/id -u", user="1000")).stdout == "1000\n"


KERNEL_FILES = (
    "/proc/self/mem", "/proc/1/mem", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname",
    "/proc/sysrq-trigger", "/dev/mem", "/dev/kmsg", "/sys/kernel/uevent_helper", "/sys/power/state",
    "/proc/1/oom_score_adj", "/proc/sys/vm/drop_caches",
)  # fmt: skip


@EVERY
async def test_f15_files_of_the_kernel_are_not_written(target: Target) -> None:
    """The settings of the host are compared around this module."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    async with target.sandbox() as sandbox:
        for path in KERNEL_FILES:
            for call in (sandbox.write_file(path, "1"), sandbox.append_file(path, "1")):
                if path in ("/dev/mem", "/dev/kmsg"):  # there is none: at best a plain file of that name appears
                    with contextlib.suppress(*REFUSED):
                        await call
                    continue
                with contextlib.suppress(*REFUSED) if target.is_virtual else pytest.raises(REFUSED):
                    await call  # a virtual kernel may take it, for itself
        for path in ("/dev/mem", "/dev/kmsg"):
            if await sandbox.exists(path):
                assert (await sandbox.stat(path)).kind == "file"
    assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern


WRITER = """
import asyncio, sys
from pathlib import Path
from atoll.engines.linux.oci_engine import OciEngine
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
async def main():
    settings = Settings(Path(sys.argv[1]), Path(sys.argv[2]))
    sandbox = await AsyncSandbox.attach(sys.argv[3], engine=OciEngine(settings, "runc"), settings=settings)
    print("go", flush=True)
    def pieces():
        for _ in range(64):
            yield b"n" * (1 << 20)
    await sandbox.write_stream("/workspace/big", pieces())
asyncio.run(main())
"""


@RUNC
async def test_f17_a_writer_that_is_killed_leaves_the_old_file_or_the_new(target: Target) -> None:
    async with target.sandbox() as sandbox:
        await sandbox.write_file("/workspace/big", b"o" * (1 << 20))
        words = [sys.executable, "-c", WRITER, str(target.settings.data_dir), str(target.settings.run_dir), sandbox.id]
        for delay_s in (0.0, 0.02, 0.06):
            writer = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
            assert writer.stdout is not None
            assert await asyncio.wait_for(writer.stdout.readline(), 30) == b"go\n"
            await asyncio.sleep(delay_s)
            with contextlib.suppress(ProcessLookupError):
                writer.kill()
            await writer.wait()
            size = (await sandbox.stat("/workspace/big")).size
            assert size in (1 << 20, 64 << 20), size
        # What was half written goes as well, as soon as the connection is seen to be lost.
        async with asyncio.timeout(20):
            while len(await sandbox.list_files("/workspace")) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert (await sandbox.list_files("/workspace"))[0].path == "big"
