"""What engines that keep saved states share: how these are called, differences of text, many sandboxes or none."""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Awaitable, Callable, Sequence

from atoll.engines.local.waiting import finish
from atoll.errors import SpecError
from atoll.model import Handle, SandboxSpec

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}")
_OWNER = re.compile(r"[a-zA-Z0-9%~][a-zA-Z0-9_.%@|:+-]{0,255}")
LARGEST_TEXT = 256 << 10
_MOST_LINES = 5_000
"""Comparing takes the square of it, at worst."""
MOST_TEXT = 16 << 20
"""Of all differences together; what comes after is told without its text."""


def checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name[:80]!r} cannot be the name of a snapshot or checkpoint",
            hint="Use up to 63 letters, digits, '.', '-' and '_', beginning with a letter or digit.",
        )
    return name


def checked_snapshot(name: str) -> str:
    """`NAME`, or `OWNER/NAME` for one that a server keeps for a user of its own."""
    owner, slash, own = name.rpartition("/")
    if slash and not _OWNER.fullmatch(owner):
        raise SpecError(f"{owner[:80]!r} cannot be the owner of a snapshot")
    checked_name(own)
    return name


def lines_of(data: bytes) -> list[str] | None:
    """None: not a text, or too large to show. At most one byte more than LARGEST_TEXT is needed to know."""
    if len(data) > LARGEST_TEXT or b"\0" in data:
        return None
    try:
        lines = data.decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        return None
    return lines if len(lines) <= _MOST_LINES else None


def difference(old: list[str], new: list[str], path: str) -> str:
    lines = difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


async def all_or_none(
    wanted: Sequence[tuple[str, SandboxSpec]],
    make: Callable[[str, SandboxSpec], Awaitable[Handle]],
    delete: Callable[[Handle], Awaitable[None]],
    at_once: int,
) -> Sequence[Handle]:
    """Sandboxes side by side. If one cannot be made, or the caller is cancelled, none is left."""
    turns = asyncio.Semaphore(at_once)

    async def in_turn(sandbox_id: str, spec: SandboxSpec) -> Handle:
        async with turns:
            return await make(sandbox_id, spec)

    making = [asyncio.ensure_future(in_turn(*each)) for each in wanted]

    async def undo() -> None:
        await asyncio.wait(making)
        made = [each.result() for each in making if not each.cancelled() and each.exception() is None]
        await asyncio.gather(*(delete(each) for each in made))

    try:
        return await asyncio.gather(*making)
    except BaseException:
        for each in making:
            each.cancel()
        await finish(undo())
        raise
