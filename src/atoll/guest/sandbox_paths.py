"""Paths inside a sandbox: which ones are valid, and errors that name the path they are about."""

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
    """Return the error for a number that came out of a sandbox. An unknown number counts as EIO."""
    if number not in errno.errorcode:
        number = errno.EIO
    return OSError(number, os.strerror(number), path)


@contextlib.contextmanager
def naming(path: GuestPath, second: GuestPath | None = None) -> Iterator[None]:
    """Add the path, or both paths, to an OSError: the agent answers with a number and a reason only."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        names = (text(path),) if second is None else (text(path), None, text(second))
        raise OSError(error.errno, error.strerror, *names) from None


_SHOWN = 5
_KEPT = 1000


class PartialCopyError(OSError):
    """Some paths could not be copied; everything else was.

    `failures` has the first of these paths with their error numbers, `count` is the number of all of them.
    """

    def __init__(self, failures: list[tuple[str, int]], count: int) -> None:
        shown = [f"{path!r}: {os.strerror(number)}" for path, number in failures[:_SHOWN]]
        more = [f"and {count - len(shown)} more"] if count > len(shown) else []
        super().__init__(failures[0][1], f"{count} not copied: " + ", ".join(shown + more))
        self.failures = failures
        self.count = count


class Failures:
    """Collects the paths that cannot be copied, in bounded memory."""

    def __init__(self) -> None:
        self._first: list[tuple[str, int]] = []
        self._count = 0

    def add(self, path: str, number: int) -> None:
        self._count += 1
        if len(self._first) < _KEPT:
            self._first.append((path, number))

    def raise_if_any(self) -> None:
        if self._count:
            raise PartialCopyError(self._first, self._count)
