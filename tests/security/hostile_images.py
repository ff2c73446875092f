"""Images of a few bytes, which a test spoils, put where the store would put an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.images import Image, Kind
from security.conftest import Target

LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
USR = {"/usr": "/usr:ro"}
"""Programs for an image of a few bytes."""


def small_image(place: Path) -> Path:
    root = place / "image" / "rootfs"
    for name in ("etc", "usr", "tmp", "dev", "proc", "sys"):
        (root / name).mkdir(parents=True)
    for name, link in LINKS.items():
        (root / name).symlink_to(link)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root


def put_in_place_of_any_image(target: Target, root: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
    """The store refuses hostile images when they come in. Here one got past it."""
    image = Image("evil", Kind.TAR, layers=(root,), **config)

    async def acquire(reference: str, sandbox_id: str) -> Image:
        return image

    monkeypatch.setattr(target.linux.layout.images, "acquire", acquire)
