from __future__ import annotations

import os

from atoll.engines.host.deadline import Deadline, readable


async def test_only_what_is_ready_is_told() -> None:
    quiet, _quiet = os.pipe()
    busy, writing = os.pipe()
    os.write(writing, b"x")
    try:
        assert await readable({quiet, busy}, Deadline.after(10)) == {busy}
        assert await readable({quiet}, Deadline.after(0)) == set()
    finally:
        for fd in (quiet, _quiet, busy, writing):
            os.close(fd)
