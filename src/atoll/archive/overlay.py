"""The format of an overlay's layer: how a directory says what it removes from, and hides of, the layers below it.

A removed name is a character device 0/0 (a *whiteout*). A directory that hides the one below is marked *opaque*. The
writable layers of sandboxes and the layers of images have this format. Those who write them are not trusted, so no link
is followed here, and of the extended attributes only the opaque mark counts.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

OPAQUE = "user.overlay.opaque"
"""Overlays in sandboxes are mounted with `userxattr`, because root inside may not use `trusted` attributes."""
_OPAQUE_NAMES = (OPAQUE, "trusted.overlay.opaque")


def is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(parent: int, name: str | bytes) -> bool:
    """Return whether a directory of a layer, given by its open parent and its name, hides the one below."""
    return _marked(b"/proc/self/fd/%d/%s" % (parent, os.fsencode(name)), follow=False)


def is_opaque_directory(fd: int) -> bool:
    return _marked(fd, follow=True)


def is_opaque_path(path: Path) -> bool:
    return _marked(os.fsencode(path), follow=False)


def mark_opaque(fd: int) -> None:
    os.setxattr(fd, OPAQUE, b"y")


def white_out(parent: int, name: str | bytes) -> None:
    os.mknod(name, stat.S_IFCHR, 0, dir_fd=parent)


def _marked(path: int | bytes, *, follow: bool) -> bool:
    for attribute in _OPAQUE_NAMES:
        with contextlib.suppress(OSError):
            value = os.getxattr(path, attribute) if follow else os.getxattr(path, attribute, follow_symlinks=False)
            if value == b"y":
                return True
    return False
