"""An image of two layers with all kinds of entries, and what two images have to have in common to be equal."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from atoll.archive.overlay import mark_opaque, white_out
from atoll.archive.work import Work
from atoll.images import Image, ImageConfig, Images, Kind
from atoll.walking import walk
from unit.images.archives import directory, file, hard_link, small_root, symlink

CONFIG = ImageConfig(
    env={"PATH": "/bin", "GREETING": "a=b c"},
    entrypoint=("/bin/entry", "-x"),
    cmd=("serve",),
    work_dir="/srv",
    user="1000:1000",
    labels={"team": "a", "odd": "ü\n"},
    exposed_ports=("53/udp", "8000/tcp"),
    volumes=("/data",),
    stop_signal="SIGINT",
    shell=("/bin/bash", "-c"),
    healthcheck={"Test": ["CMD", "true"], "Interval": 1_000_000_000},
    history=("FROM somewhere", "COPY . /srv", "RUN make"),
)
ROOT = small_root(
    directory("srv", mode=0o750, uid=1000, gid=1000),
    file("srv/data", bytes(range(256)) * 2000, mode=0o640, uid=1000, gid=1000),
    hard_link("srv/same", "srv/data"),
    symlink("srv/link", "../etc/os-release"),
    file(b"srv/\xff\xfe odd", b"bytes"),
    file("srv/" + "long" * 60, b"long"),
    directory("old"),
    file("old/a", b"a"),
    file("old/b", b"b"),
    file("gone", b"gone"),
)


async def stacked(images: Images, tmp_path: Path) -> Image:
    """An image of two layers, the upper one of which removes, hides and adds."""
    (tmp_path / "root.tar").write_bytes(ROOT)
    base = await images.import_tar(tmp_path / "root.tar", "base")

    def add(work: Work) -> Image:
        with images.store.draft(work) as draft:
            top = draft.rootfs
            fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
            white_out(fd, "gone")
            os.close(fd)
            (top / "old").mkdir()
            (top / "old" / "c").write_bytes(b"c")
            fd = os.open(top / "old", os.O_RDONLY | os.O_DIRECTORY)
            mark_opaque(fd)
            os.close(fd)
            (top / "srv").mkdir(mode=0o700)
            (top / "srv" / "new").write_bytes(b"new")
            image = Image("docker.io/library/mine:1", Kind.OCI, config=CONFIG)
            return images.store.commit(draft, image, work, below=base.digest)

    return await images.work(add)


def merged(images: Images, image: Image) -> dict[bytes, tuple[object, ...]]:
    """All that a sandbox of the image sees: types, modes, owners, link targets and content."""
    found: dict[bytes, tuple[object, ...]] = {}
    with images.view(image.reference) as fd:
        for parent, name, path, info in walk(fd):
            content = b""
            if stat.S_ISREG(info.st_mode):
                with open(name, "rb", opener=lambda text, flags, fd=parent: os.open(text, flags, dir_fd=fd)) as file:  # type: ignore[misc]
                    content = file.read()
            elif stat.S_ISLNK(info.st_mode):
                content = os.fsencode(os.readlink(name, dir_fd=parent))
            found[path] = (info.st_mode, info.st_uid, info.st_gid, content)
    return found


def assert_equal(images: Images, image: Image, other_images: Images, other: Image) -> None:
    assert merged(images, image) == merged(other_images, other)
    assert other.config == image.config
