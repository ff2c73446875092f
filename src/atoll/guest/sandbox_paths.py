"""Paths of a sandbox: what may be asked for, and errors that say which one they are about."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from atoll.guest.frames import MAX_PATH, decode_text, encode_text

GuestPath = str | bytes


def text(path: GuestPath) -> str:
    return path if isinstance(path, str) else decode_text(path)


def check_path(path: GuestPath) -> None:
    raw = encode_text(path)
    if 0 in raw:
        raise ValueError("a path cannot contain a zero byte")
    if len(raw) > MAX_PATH:
        raise os_error(errno.ENAMETOOLONG, text(path))


def os_error(number: int, path: str) -> OSError:
    """From an error number that came out of a sandbox."""
    if number not in errno.errorcode:
        number = errno.EIO
    return OSError(number, os.strerror(number), path)


@contextlib.contextmanager
def naming(path: GuestPath, second: GuestPath | None = None) -> Iterator[None]:
    """The agent answers with a number and a reason; the path is known only here."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        names = (text(path),) if second is None else (text(path), None, text(second))
        raise OSError(error.errno, error.strerror, *names) from None
