"""The store, through real processes that die at the worst moment."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError, SpecError
from atoll.images import Image, ImageLimits, Images, Kind, Progress
from atoll.images.tar_import import import_stream
from needs import missing, needs
from unit.images.archives import directory, file, fingerprint, small_root, symlink, tar
from unit.images.conftest import start, until

IMPORT = """
import asyncio, sys
from atoll.images import Images
asyncio.run(Images(sys.argv[1]).import_tar(sys.argv[2], "mine"))
"""


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path / "data")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "root.tar"
    path.write_bytes(small_root(directory("tmp", mode=0o1777), file("dev/null", b"not a device")))
    return path


@pytest.fixture
def slow_archive(tmp_path: Path) -> Path:
    """Takes about a second to unpack."""
    path = tmp_path / "slow.tar"
    path.write_bytes(small_root(*(file(f"d{number % 50}/f{number}", b"x" * 100) for number in range(20_000))))
    return path


@pytest.fixture
def passable() -> Iterator[Path]:
    """A directory that everybody can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as path:
        Path(path).chmod(0o755)
        yield Path(path)


def leftovers(images: Images) -> list[str]:
    """Everything in the store but the folders themselves."""
    return sorted(str(path.relative_to(images.store.directory)) for path in images.store.directory.glob("*/*"))


async def test_an_import_is_stored_under_its_content_and_found_by_its_name(images: Images, archive: Path) -> None:
    image = await images.import_tar(archive, "mine")
    assert image.root is not None
    assert image.root == images.store.directory / "roots" / image.digest.removeprefix("sha256:") / "rootfs"
    assert (image.root / "usr/bin/true").read_bytes() == b"#!"
    assert image.kind is Kind.OCI
    assert await images.ensure("mine") == image
    assert await images.get("docker.io/library/mine:latest") == image
    assert await images.ls() == [image]
    assert (await images.verify("mine")).digest == image.digest


async def test_equal_images_are_stored_once(images: Images, archive: Path) -> None:
    first, second = await images.import_tar(archive, "one"), await images.ensure(f"tar:{archive}")
    assert first.root == second.root
    await images.remove("one")
    assert second.root is not None
    assert second.root.is_dir()
    await images.remove(f"tar:{archive}")
    assert leftovers(images) == []


async def test_the_host_is_an_image_without_a_root(images: Images) -> None:
    assert await images.ensure("host") == Image("host", Kind.HOST)
    with pytest.raises(SpecError):
        await images.remove("host")


async def test_mount_points_are_made_and_what_they_would_hide_is_removed(images: Images, archive: Path) -> None:
    root = (await images.import_tar(archive)).root
    assert root is not None
    for name, mode in {"dev": 0o755, "proc": 0o555, "sys": 0o555, "tmp": 0o1777, "run": 0o755, "etc": 0o755}.items():
        info = (root / name).lstat()
        assert stat.S_ISDIR(info.st_mode)
        assert stat.S_IMODE(info.st_mode) == mode
    assert list((root / "dev").iterdir()) == []


@pytest.mark.parametrize("name", ["dev", "proc", "sys", "etc", "tmp", "run"])
@pytest.mark.parametrize("kind", ["link", "file"])
async def test_an_image_whose_mount_point_is_not_a_directory_is_refused(
    name: str, kind: str, images: Images, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "canary").touch()
    before = fingerprint(victim)
    entry = symlink(name, str(victim)) if kind == "link" else file(name)
    (tmp_path / "bad.tar").write_bytes(tar(directory("usr"), entry))
    with pytest.raises(ImageError, match=f"/{name} of the image is a"):
        await images.import_tar(tmp_path / "bad.tar", "bad")
    assert fingerprint(victim) == before
    assert leftovers(images) == []


async def test_a_failed_import_leaves_nothing(images: Images, tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(small_root()[:-1200])
    with pytest.raises(ImageError, match="cut off"):
        await images.import_tar(tmp_path / "bad.tar", "bad")
    assert leftovers(images) == []
    with pytest.raises(ImageNotFoundError):
        await images.get("bad")


async def test_a_missing_archive_and_one_that_is_no_file_are_refused(images: Images, tmp_path: Path) -> None:
    with pytest.raises(ImageNotFoundError):
        await images.ensure(f"tar:{tmp_path}/nothing.tar")
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(ImageError, match="is not a file"):
        await images.ensure(f"tar:{tmp_path}/pipe.tar")


async def test_a_changed_archive_is_imported_again(images: Images, archive: Path) -> None:
    first = await images.ensure(f"tar:{archive}")
    archive.write_bytes(small_root(file("more")))
    second = await images.ensure(f"tar:{archive}")
    assert second.digest != first.digest
    assert (await images.gc()).digests == (first.digest,)


@pytest.mark.parametrize("name", ["host", "debian:bookworm", "python", "docker:x", "snapshot:1", "Bad Name"])
async def test_an_import_cannot_take_a_name_that_means_something_else(name: str, images: Images, archive: Path) -> None:
    with pytest.raises(SpecError):
        await images.import_tar(archive, name)


@pytest.mark.parametrize("change", ["content", "mode", "added", "removed"])
async def test_verify_sees_every_change(change: str, images: Images, archive: Path) -> None:
    root = (await images.import_tar(archive, "mine")).root
    assert root is not None
    target = root / "usr/bin/true"
    if change == "content":
        target.write_bytes(b"#?")
    elif change == "mode":
        target.chmod(0o4755)
    elif change == "added":
        (root / "etc/added").touch()
    else:
        target.unlink()
    with pytest.raises(ImageError, match="changed on disk"):
        await images.verify("mine")


async def test_an_image_in_use_is_neither_removed_nor_collected(images: Images, archive: Path) -> None:
    image = await images.import_tar(archive, "mine")
    assert (await images.acquire("mine", "sandbox-1")).digest == image.digest
    assert await images.leases() == {"sandbox-1": image.digest}
    with pytest.raises(ImageError, match="sandbox-1"):
        await images.remove("mine")
    archive.write_bytes(small_root(file("other")))
    await images.import_tar(archive, "mine")
    assert (await images.gc()).digests == ()
    assert image.root is not None
    assert image.root.is_dir()
    await images.release("sandbox-1")
    await images.release("sandbox-1")
    assert (await images.gc()).digests == (image.digest,)
    assert not image.root.exists()


@pytest.mark.parametrize("sandbox_id", ["", "../x", "a/b", ".", "..", "a\n", "-rf", "x" * 200])
async def test_a_lease_cannot_be_written_outside_its_folder(sandbox_id: str, images: Images, archive: Path) -> None:
    image = await images.import_tar(archive, "mine")
    with pytest.raises(SpecError):
        await images.lease(sandbox_id, image.digest)
    with pytest.raises(ImageNotFoundError):
        await images.lease("sandbox", "sha256:" + "0" * 64)


async def test_an_unreadable_record_stops_gc_rather_than_lose_an_image(images: Images, archive: Path) -> None:
    image = await images.import_tar(archive, "mine")
    record = next((images.store.directory / "names").iterdir())
    record.write_text("{")
    with pytest.raises(ImageError, match="cannot be read"):
        await images.gc()
    assert image.root is not None
    assert image.root.is_dir()


@pytest.mark.timeout(240)
async def test_a_process_killed_while_importing_leaves_nothing_after_gc(
    images: Images, slow_archive: Path, tmp_path: Path
) -> None:
    tmp = images.store.directory / "tmp"
    outcomes = set()
    for delay_s in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2):
        process = start(IMPORT, str(tmp_path / "data"), str(slow_archive))
        await until(lambda: list(tmp.glob("*")))
        # Not a wait for a condition: the moment of death is what this test varies.
        await asyncio.sleep(delay_s)
        busy = await images.gc()
        assert process.poll() is not None or busy.leftovers == 0
        process.send_signal(signal.SIGKILL)
        process.wait()
        await images.gc()
        found = await images.ls()
        if found:
            await images.verify("mine")
            await images.remove("mine")
        outcomes.add(bool(found))
        assert leftovers(images) == []
    assert False in outcomes


@pytest.mark.timeout(120)
async def test_of_two_processes_one_makes_the_image_and_the_other_waits(
    images: Images, slow_archive: Path, tmp_path: Path
) -> None:
    steps: list[Progress] = []
    process = start(IMPORT, str(tmp_path / "data"), str(slow_archive))
    locks = images.store.directory / "locks"
    await until(lambda: [path for path in locks.glob("*") if path.name != "store"])
    image = await images.ensure("mine", steps.append)
    assert process.wait() == 0
    assert steps == [Progress("wait", "another process is making docker.io/library/mine:latest")]
    assert await images.ls() == [image]
    assert leftovers(images) == sorted(
        [f"names/{path.name}" for path in (images.store.directory / "names").iterdir()]
        + [f"roots/{image.digest.removeprefix('sha256:')}"]
    )


async def test_callers_of_one_process_share_the_work(images: Images, slow_archive: Path) -> None:
    steps: list[Progress] = []
    found = await asyncio.gather(*(images.ensure(f"tar:{slow_archive}", steps.append) for _ in range(20)))
    assert len({image.digest for image in found}) == 1
    assert sum(step == Progress("check", "writing to disk", step.done_bytes) for step in steps) == 1


async def test_cancelling_ends_at_once_and_leaves_nothing(images: Images, slow_archive: Path) -> None:
    task = asyncio.create_task(images.import_tar(slow_archive, "mine"))
    await until(lambda: list(images.store.directory.glob("tmp/*/root/rootfs/d1")))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert leftovers(images) == []


async def test_cancelling_one_that_waits_for_another_process_ends_at_once(images: Images, archive: Path) -> None:
    with images.store.making(f"tar:{archive}", Work()):
        waiting = asyncio.Event()
        task = asyncio.create_task(images.ensure(f"tar:{archive}", lambda step: waiting.set()))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_work_that_takes_too_long_is_ended(slow_archive: Path, tmp_path: Path) -> None:
    images = Images(tmp_path / "data", limits=ImageLimits(timeout_s=0.1))
    with pytest.raises(ImageError, match="was not ready within"):
        await images.import_tar(slow_archive, "mine")
    assert leftovers(images) == []


async def test_a_data_directory_that_cannot_be_used_is_an_error_with_a_reason(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    images = Images(tmp_path / "data")
    with pytest.raises(ImageError, match="Not a directory"):
        await images.import_tar(archive, "mine")
    assert await images.ls() == []


@needs("root")
async def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, archive: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    mount = await asyncio.create_subprocess_exec("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(data))
    if await mount.wait():
        missing("tmpfs cannot be mounted here")
    try:
        archive.write_bytes(small_root(file("big", os.urandom(8 << 20))))
        images = Images(data)
        with pytest.raises(ImageError, match="No space left") as caught:
            await images.import_tar(archive, "mine")
        assert "gc" in (caught.value.hint or "")
        assert leftovers(images) == []
    finally:
        await (await asyncio.create_subprocess_exec("umount", str(data))).wait()


def test_gc_does_not_touch_what_a_living_process_makes(images: Images) -> None:
    with images.store.draft(Work()) as draft:
        import_stream(io.BytesIO(small_root()), draft, ImageLimits(), Work())
        assert images.store.gc(Work()).leftovers == 0
        assert (draft.rootfs / "usr/bin/true").exists()
    assert leftovers(images) == []


@needs("root")
def test_an_ordinary_user_can_import_and_remove_read_only_directories(passable: Path) -> None:
    """In a process of its own, since a user cannot be taken back."""
    data = passable / "data"
    data.mkdir()
    os.chown(data, 65534, 65534)
    archive = passable / "root.tar"
    archive.write_bytes(
        small_root(directory("ro", mode=0o555), file("ro/f", mode=0o000, uid=7), file("su", mode=0o4755))
    )
    script = (
        "import asyncio, concurrent.futures.thread, os, sys, atoll.images.maker; from atoll.images import Images\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "async def main():\n"
        "    images = Images(sys.argv[1]); image = await images.import_tar(sys.argv[2], 'mine')\n"
        "    assert (image.root / 'ro/f').stat().st_uid == 65534\n"
        "    await images.verify('mine'); await images.remove('mine')\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(data), str(archive)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(data.glob("images/roots/*")) == []
    assert list(data.glob("images/tmp/*")) == []
