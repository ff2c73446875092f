"""A view of the merged files of an image or a step, for reading on the host.

Several layers are merged by the kernel, with an overlay that is mounted nowhere: only a descriptor refers to it, so it
is gone when the descriptor is closed or this process dies. It is read-only, and nothing in it can be run or opened as a
device. Paths in it are opened with `open_in_root` or through `Root`, which follow no link out of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.archive.root import Root, open_in_root
from atoll.errors import UnsupportedError

__all__ = ["Root", "open_in_root", "view"]

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same on every architecture
_CLOEXEC = 1
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_READ_ONLY, _NO_SUID, _NO_DEV, _NO_EXEC = 1, 2, 4, 8

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


@contextlib.contextmanager
def view(layers: Sequence[Path], upper: Path | None = None) -> Iterator[int]:
    """Provide a descriptor of the merged tree of these layers, topmost first, with `upper` on top of them.

    Raises UnsupportedError if there are several and this process may not mount.
    """
    with contextlib.ExitStack() as opened:
        parts = [part for part in (upper, *layers) if part is not None]
        fds = []
        for part in parts:
            fds.append(os.open(part, _OPEN))
            opened.callback(os.close, fds[-1])
        if len(fds) == 1:
            yield fds[0]
            return
        try:
            fd = _mounted(fds)
        except PermissionError as error:
            raise UnsupportedError(
                "the layers of an image can only be read together by root", hint="Run this as root."
            ) from error
        opened.callback(os.close, fd)
        yield fd


def _mounted(fds: Sequence[int]) -> int:
    context = _call(_FSOPEN, b"overlay", _CLOEXEC)
    try:
        paths = [b"/proc/self/fd/%d" % fd for fd in fds]
        try:
            for path in paths:
                _configure(context, _SET_STRING, b"lowerdir+", path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _configure(context, _SET_STRING, b"lowerdir", b":".join(paths))  # before Linux 6.8
        _configure(context, _SET_FLAG, b"userxattr", None)
        _configure(context, _SET_FLAG, b"ro", None)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        mount = _call(_FSMOUNT, context, _CLOEXEC, _READ_ONLY | _NO_SUID | _NO_DEV | _NO_EXEC)
    finally:
        os.close(context)
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
    finally:
        os.close(mount)


def _configure(context: int, command: int, key: bytes, value: bytes | None) -> None:
    _call(_FSCONFIG, context, command, key, value, 0)


def _call(number: int, *arguments: int | bytes | None) -> int:
    result = _syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)
