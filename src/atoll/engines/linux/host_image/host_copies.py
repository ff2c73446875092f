"""Copies of the files that nearly every process of the `host` image has mapped.

On each fork and exit, the kernel takes a lock on every file that the process has mapped. A thousand processes that fork
would therefore delay every other process that maps the same files, in other sandboxes and on the host itself, where all
programs map the C library. A copy is a separate file with a separate lock. Accounts are spread over several sets of
copies; the host uses none of them.

Like a skeleton (`host_view.py`), a set never changes: its name contains a digest of what it was copied from.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from atoll.engines.linux.host_image.host_view import made_once

SETS = 16
_PROGRAMS = ("bin/sh", "bin/bash", "bin/python3")
_LIBRARIES = ("libc.so.6", "libm.so.6", "libtinfo.so.6", "libz.so.1", "libexpat.so.1", "gconv/gconv-modules.cache")
_LOADERS = ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
_LOCALE = "lib/locale/C.utf8"
_LARGEST = 16 << 20


def number_of(account: str) -> int:
    """Return the number of an account's set. The unnamed account, which is that of SDK users, has the first set."""
    return 1 + zlib.crc32(account.encode()) % (SETS - 1) if account else 0


def copies(directory: Path, number: int, usr: Path) -> Path:
    """Return a layer to mount over `/usr`. The first call makes it under `directory` by copying a few megabytes."""
    found = list(_files(usr))
    path = directory / f"{_digest(found)}-{number}"
    return made_once(path, lambda draft: _make(draft, usr, [source for source, _ in found]))


def _files(usr: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the regular files that everybody may read and that are neither set-uid nor set-gid."""
    seen: set[Path] = set()
    for name in _names(usr):
        with contextlib.suppress(OSError):
            path = (usr / name).resolve(strict=True)
            info = path.lstat()
            ordinary = stat.S_ISREG(info.st_mode) and info.st_mode & 0o004 and info.st_size <= _LARGEST
            special = info.st_mode & (stat.S_ISUID | stat.S_ISGID)
            if ordinary and not special and path.is_relative_to(usr) and path not in seen:
                seen.add(path)
                yield path, info


def _names(usr: Path) -> Iterator[str]:
    yield from _PROGRAMS
    for directory in ("lib64", "lib", f"lib/{os.uname().machine}-linux-gnu"):
        yield from (f"{directory}/{name}" for name in (*_LOADERS, *_LIBRARIES))
    with contextlib.suppress(OSError):
        yield from sorted(f"{_LOCALE}/{name}" for name in os.listdir(usr / _LOCALE))


def _digest(found: list[tuple[Path, os.stat_result]]) -> str:
    parts = "".join(f"{path} {info.st_mtime_ns} {info.st_size} {info.st_mode:o}\n" for path, info in found)
    return hashlib.sha256(parts.encode()).hexdigest()[:24]


def _make(top: Path, usr: Path, files: list[Path]) -> None:
    top.mkdir(mode=0o755)
    for source in files:
        target = top / source.relative_to(usr)
        _make_directories(top, usr, target.parent)
        shutil.copyfile(source, target)
        shutil.copystat(source, target)


def _make_directories(top: Path, usr: Path, directory: Path) -> None:
    """Make a directory and its parents, with the modes of the directories of `/usr` that they cover."""
    if not directory.is_dir():
        _make_directories(top, usr, directory.parent)
        directory.mkdir()
        directory.chmod(stat.S_IMODE((usr / directory.relative_to(top)).stat().st_mode))
