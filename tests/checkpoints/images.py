"""A small image that runs: busybox, a few users, and a few files to change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from atoll.archive.work import Work
from atoll.images import Image, ImageConfig, Images, Kind
from needs import need

PROGRAMS = (
    "sh",
    "cat",
    "chmod",
    "chown",
    "dd",
    "echo",
    "id",
    "ln",
    "ls",
    "mkdir",
    "mkfifo",
    "mv",
    "rm",
    "stat",
    "touch",
)
PASSWD = "root:x:0:0:root:/root:/bin/sh\nbob:x:1000:1000::/home/bob:/bin/sh\n"


def make_image(images: Images, name: str = "small", config: ImageConfig | None = None) -> Image:
    """Store an image, as if it had been pulled."""
    need("root", "busybox")
    found = shutil.which("busybox")
    assert found is not None
    store = images.store
    with store.draft(Work()) as draft:
        root = draft.rootfs
        for folder in ("bin", "etc", "home/bob", "keep", "gone"):
            (root / folder).mkdir(parents=True)
        shutil.copy2(found, root / "bin/busybox")
        for program in PROGRAMS:
            (root / "bin" / program).symlink_to("busybox")
        (root / "etc/passwd").write_text(PASSWD)
        (root / "etc/group").write_text("root:x:0:\nstaff:x:50:bob\n")
        (root / "etc/machine-id").write_text("0" * 32 + "\n")
        for path in ("keep/one", "keep/two", "gone/file"):
            (root / path).write_text(path)
        os.chown(root / "home/bob", 1000, 1000)
        image = Image(f"docker.io/library/{name}:latest", Kind.OCI, config=config or ImageConfig())
        return store.commit(draft, image, Work())


def files(top: Path) -> dict[str, tuple[int, int, int, object]]:
    """The type and mode, owner and group of everything in a tree, and what is in it."""
    found: dict[str, tuple[int, int, int, object]] = {}
    for path in sorted(top.rglob("*")):
        info = path.lstat()
        content: object = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(top))] = (info.st_mode, info.st_uid, info.st_gid, content)
    return found
