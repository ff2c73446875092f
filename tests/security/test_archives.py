"""Group G: hostile archives as images and as trees, through the calls that people use.

The extractor has its own tests, archive by archive; here the whole way is walked, up to a sandbox that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import os
import shutil
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.errors import ImageError, SandboxError
from atoll.guest.tree_copy import PartialCopyError
from atoll.images import ImageLimits, Images
from needs import not_applicable
from security.canaries import Canaries
from security.conftest import EVERY, RUNC, Target, inside
from unit.images.archives import directory, file, hard_link, pax, small_root, special, symlink, tar

pytestmark = pytest.mark.timeout(120)

USR = {"/usr": "/usr:ro"}
LINKS = [symlink(name, f"usr/{name}") for name in ("bin", "sbin", "lib", "lib64")]


@pytest.fixture
def place(folder: Path) -> Iterator[Path]:
    path = folder / f"g{os.urandom(3).hex()}"
    path.mkdir(mode=0o755)
    (path / "outside").mkdir(mode=0o777)
    (path / "outside" / "canary").write_text("as it was")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def images(place: Path) -> Images:
    return Images(place / "data", limits=ImageLimits(total_bytes=32 << 20, entries=5_000, timeout_s=60))


def untouched(place: Path) -> bool:
    outside = place / "outside"
    return os.listdir(outside) == ["canary"] and (outside / "canary").read_text() == "as it was"


def _chain(way_out: str) -> list[bytes]:
    """Links whose expansion is longer than PATH_MAX, so that a resolver in user space loses track (CVE-2025-4517)."""
    component, steps, path, entries = "d" * 247, "abcdefghijklmnop", "", []
    for step in steps:
        entries += [directory(f"{path}{component}"), symlink(f"{path}{step}", component)]
        path += f"{component}/"
    short = "/".join(steps)
    last = f"{short}/{'l' * 254}"
    return [*entries, symlink(last, "../" * len(steps)), symlink("escape", f"{last}/{way_out}")]


ESCAPES: dict[str, Callable[[Path], list[bytes]]] = {
    "parent": lambda out: [file("../" * 12 + f"{out}/canary".lstrip("/"), b"x")],
    "absolute": lambda out: [file(f"{out}/canary", b"x")],
    "below a link": lambda out: [symlink("l", str(out)), file("l/canary", b"x"), file("l/new", b"x")],
    "below a relative link": lambda out: [symlink("l", f"{'../' * 12}{out}"), file("l/new", b"x")],
    "hard link, then write": lambda out: [hard_link("h", f"{out}/canary"), file("h", b"x")],
    "link replaced by a directory": lambda out: [symlink("l", str(out)), directory("l"), file("l/new", b"x")],
    "long chain of links": lambda out: [
        *_chain(f"{'../' * 12}{out}"),
        file("escape/new", b"x"),
        file("escape/canary", b"x"),
    ],
    "whiteout outside": lambda out: [symlink("l", str(out)), file("l/.wh.canary", b"")],
    "opaque outside": lambda out: [symlink("l", str(out)), file("l/.wh..wh..opq", b"")],
}


@RUNC
@pytest.mark.parametrize("case", ESCAPES)
async def test_g01_g02_an_archive_writes_nothing_outside(
    target: Target, case: str, place: Path, images: Images
) -> None:
    (place / "a.tar").write_bytes(small_root(*ESCAPES[case](place / "outside")))
    with contextlib.suppress(SandboxError):
        await images.import_tar(place / "a.tar")
    with contextlib.suppress(SandboxError):
        async with target.sandbox(image=f"tar:{place / 'a.tar'}"):
            pass
    assert untouched(place)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", ["parent", "below a link", "hard link, then write"])
def test_g01_control(case: str, place: Path) -> None:
    """Python's own extractor, as people call it."""
    target = place / "outside" / "x"  # so that a wrong step lands where it is seen
    archive = io.BytesIO(tar(*ESCAPES[case](place / "outside")))
    (place / "dest").mkdir()
    with contextlib.suppress(Exception):
        with tarfile.open(fileobj=archive) as opened:
            opened.extractall(place / "dest", filter="fully_trusted")
    assert not target.exists()
    if case == "parent":  # twelve steps up are beyond the root: the name is the absolute path again
        assert (place / "outside" / "canary").read_text() == "x"
    else:
        assert not untouched(place)


BOMBS: dict[str, Callable[[], bytes]] = {
    "zeros": lambda: gzip.compress(tar(file("zeros", bytes(100 << 20))), 9),
    "many members": lambda: gzip.compress(tar(*[file(f"d/{number}") for number in range(6_000)]), 1),
    "deep": lambda: tar(directory("d/" * 2000)),
    "sparse": lambda: tar(pax({"GNU.sparse.major": "1", "GNU.sparse.realsize": str(2**62)}), file("s")),
    "size that is a lie": lambda: tar(pax({"size": str(2**62)}), file("s", b"x")),
    "archive in an archive": lambda: gzip.compress(gzip.compress(gzip.compress(bytes(64 << 20), 9), 9), 9),
}


@pytest.mark.parametrize("case", BOMBS)
async def test_g04_a_bomb_is_refused_at_a_bounded_price(case: str, place: Path, images: Images) -> None:
    (place / "bomb.tar").write_bytes(BOMBS[case]())
    free, before, cpu = shutil.disk_usage(place).free, resident_bytes(), time.process_time()
    with pytest.raises(ImageError):
        await images.import_tar(place / "bomb.tar")
    assert time.process_time() - cpu < 20
    assert resident_bytes() - before < 64 << 20
    assert free - shutil.disk_usage(place).free < 2 << 30
    assert await images.ls() == []


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


CAPABILITY = bytes.fromhex("0100000280000000" + "00" * 12)


@RUNC
async def test_g06_devices_and_special_bits_of_an_image_give_nothing(target: Target, place: Path) -> None:
    program = Path("/usr/bin/id").read_bytes()
    entries = [
        *LINKS,
        directory("workspace"),
        directory("tmp", mode=0o1777),
        file("suid", program, mode=0o6755),
        pax({"SCHILY.xattr.security.capability": CAPABILITY}),
        file("capable", program, mode=0o755),
        special("disk", b"4", (254, 0)),
        special("memory", b"3", (1, 1)),
        special("pipe", b"6"),
    ]
    base = tar(directory("etc"), file("etc/passwd", b"root:x:0:0::/:/bin/sh\n"), directory("usr"), *entries)
    (place / "a.tar").write_bytes(base)
    try:
        async with target.sandbox(image=f"tar:{place / 'a.tar'}", volumes=USR) as sandbox:
            assert (await sandbox.exec("/suid -u", user="1000")).stdout == "1000\n"
            status = "/capable -u; grep CapEff /proc/self/status"
            assert (await sandbox.exec(status, user="1000")).stdout.split() == ["1000", "CapEff:", "0000000000000000"]
            said = await inside(sandbox, "say([attempt(os.open, path, os.O_RDONLY) for path in ('/disk', '/memory')])")
            assert set(said) <= {"EPERM", "EACCES", "ENOENT", "ENXIO"}
    except ImageError:
        pass  # refused as a whole: as good
    finally:
        await target.linux.layout.images.gc()


@RUNC
async def test_g07_marks_of_an_overlay_in_an_image_are_data_or_refused(target: Target, place: Path) -> None:
    """Attributes that would redirect a directory to another one, or make a lower one vanish."""
    attributes = {
        f"SCHILY.xattr.{prefix}.overlay.{name}": value
        for prefix in ("trusted", "user")
        for name, value in (("redirect", "/etc"), ("opaque", "y"), ("metacopy", ""), ("origin", "x"))
    }
    entries = [
        *LINKS,
        directory("workspace"),
        directory("etc"),
        file("etc/passwd", b"root:x:0:0::/:/bin/sh\n"),
        file("etc/inner", b"inner"),
        directory("usr"),
        pax(attributes),
        directory("redirected"),
        special("whiteout", b"3", (0, 0)),
    ]
    (place / "a.tar").write_bytes(tar(*entries))
    try:
        async with target.sandbox(image=f"tar:{place / 'a.tar'}", volumes=USR) as sandbox:
            assert (await sandbox.exec("ls -A /redirected")).stdout == ""
            payload = (
                "say([os.listxattr('/redirected'), attempt(os.setxattr, '/redirected', 'user.overlay.redirect', b'/')])"
            )
            found, _ = await inside(sandbox, payload)
            assert [name for name in found if "overlay" in name] == []
    except ImageError:
        pass
    finally:
        await target.linux.layout.images.gc()


async def test_g09_a_broken_archive_leaves_nothing(place: Path, images: Images) -> None:
    whole = small_root(*[file(f"f{number}", os.urandom(3000)) for number in range(20)])
    packed = gzip.compress(whole)
    broken = [packed[: len(packed) * part // 20] for part in range(20)]
    broken += [
        packed[:at] + bytes([packed[at] ^ 0xFF]) + packed[at + 1 :] for at in range(20, len(packed), len(packed) // 15)
    ]
    broken += [packed[:-8] + bytes(8), whole[: len(whole) // 2], whole[:700] + bytes(512) + whole[1212:]]
    for data in broken:
        (place / "a.tar").write_bytes(data)
        with pytest.raises(ImageError):
            await images.import_tar(place / "a.tar")
    assert await images.ls() == []
    await images.gc()
    drafts = [path for path in (place / "data").rglob("*") if path.name.startswith("f") and path.is_file()]
    assert drafts == []


@EVERY
async def test_g01_a_hostile_tree_of_the_host_is_copied_as_it_is(target: Target, place: Path) -> None:
    """Links stay links and are never followed; what is no file is left out."""
    source = place / "source"
    source.mkdir()
    (source / "link").symlink_to(place / "outside" / "canary")
    (source / "up").symlink_to("../outside")
    (source / "suid").write_text("x")
    (source / "suid").chmod(0o6755)
    os.mkfifo(source / "pipe")
    if os.geteuid() == 0:
        os.mknod(source / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    async with target.sandbox() as sandbox:
        with pytest.raises(PartialCopyError):
            await asyncio.wait_for(sandbox.copy_to(source, "/workspace/in"), 20)
        assert (await sandbox.stat("in/link", follow=False)).kind == "link"
        assert (await sandbox.stat("in/suid")).mode & 0o7000 == 0
        assert not await sandbox.exists("in/pipe")
        assert not await sandbox.exists("in/null")


@EVERY
async def test_g01_a_hostile_tree_of_a_sandbox_lands_where_it_was_sent(
    target: Target, place: Path, canaries: Canaries, host_secret: Path
) -> None:
    """The target of the host holds links from an earlier copy; a second one must not write through them."""
    out = place / "out"
    async with target.sandbox() as sandbox:
        await sandbox.exec(
            f"mkdir t; ln -s {place}/outside t/d; ln -s {host_secret} t/f; ln -s {place}/outside/canary t/c"
        )
        await sandbox.copy_from("t", out)
        await sandbox.exec("rm t/*; mkdir t/d; echo x > t/d/canary; echo x > t/d/new; echo x > t/f; echo x > t/c")
        with contextlib.suppress(SandboxError, OSError):
            await sandbox.copy_from("t", out)
    assert untouched(place)
    assert canaries.found_in(host_secret.read_bytes())


def test_g02_this_python_is_why_we_have_an_extractor_of_our_own(place: Path) -> None:
    """Its filter `data` lets this one out on 3.11.7. Where it does not, nothing is lost."""
    archive = io.BytesIO(tar(*_chain("../outside"), file("escape/new", b"x")))
    (place / "dest").mkdir()
    with contextlib.suppress(Exception):
        with tarfile.open(fileobj=archive) as opened:
            opened.extractall(place / "dest", filter="data")
    if untouched(place):
        not_applicable(f"the filter of Python {sys.version.split()[0]} holds")
