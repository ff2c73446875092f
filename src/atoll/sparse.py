"""Writing files whose zeros take no space.

A sparse file of a terabyte costs nothing inside a sandbox. Copied byte by byte, it would fill the disk that it is
copied to long before a quota is checked. So blocks of zeros are skipped instead of written, which makes holes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

HOLE = 4096
_ZEROS = bytes(HOLE)


def may_have_holes(data: memoryview) -> bool:
    """Whether the data may contain a hole. A cheap test: False for nearly all data without one."""
    return b"\0" in data[::HOLE].tobytes()


def write(fd: int, data: bytes | memoryview) -> int:
    """Write all data at the current position of a new file. Return how many bytes take space. Call `end` last."""
    whole = data if isinstance(data, bytes) else bytes(data)
    view, written = memoryview(whole), 0
    for start, end, is_hole in _runs(whole):
        if is_hole:
            os.lseek(fd, end - start, os.SEEK_CUR)
            continue
        while start < end:
            step = os.write(fd, view[start:end])
            start, written = start + step, written + step
    return written


def end(fd: int) -> None:
    """End the file at the current position, which may be in a hole."""
    os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR))


def _runs(data: bytes) -> Iterator[tuple[int, int, bool]]:
    """Yield the start and the end of each run, and whether it is a hole.

    Less than a block of zeros counts as a hole only after another hole: the next piece of the file may continue it.
    """
    start, was_hole = 0, False
    for position in range(0, len(data), HOLE):
        block = data[position : position + HOLE]
        is_hole = block == _ZEROS or (was_hole and block == _ZEROS[: len(block)])
        if is_hole != was_hole and position > start:
            yield start, position, was_hole
            start = position
        was_hole = is_hole
    if start < len(data):
        yield start, len(data), was_hole
