"""Shared parts of engines with saved states: their records and names, snapshot files, text differences, and creating
all sandboxes or none."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from atoll.archive import strict_json
from atoll.cancellation import finish
from atoll.engines.host.line_diff import unified_diff
from atoll.errors import ImageError, SpecError
from atoll.model import Handle, SandboxSpec
from atoll.model.checkpoint import Omitted
from atoll.workers import Cancellation

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}")
_OWNER = re.compile(r"[a-zA-Z0-9%~][a-zA-Z0-9_.%@|:+-]{0,255}")
MAX_TEXT = 256 << 10
_MAX_LINES = 5_000
MAX_DIFFERENCES = 16 << 20
"""Maximum size of all text differences together. Later changes are reported without text."""
TEXT_S = 5.0
"""Maximum time for all text differences together. Later changes are reported without text."""
COMPARE_S = 120.0
"""Maximum time for a whole comparison. Exceeding it is an error."""


class StateRecord(BaseModel):
    """The description of a saved state, as it is stored."""

    model_config = ConfigDict(frozen=True, defer_build=True)  # most programs save no states
    id: str
    sandbox_id: str = ""
    """The sandbox it belongs to; empty for snapshots and origins."""
    name: str = ""
    created_at: float
    parent: str | None = None
    made_by: str = "user"
    source: str = ""
    size_bytes: int = 0


def checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name[:80]!r} cannot be the name of a snapshot or checkpoint",
            hint="Use up to 63 letters, digits, '.', '-' and '_', beginning with a letter or digit.",
        )
    return name


def checked_snapshot(name: str) -> str:
    """Return the name if it is valid: `NAME`, or `OWNER/NAME` for one that a server keeps for a user."""
    owner, slash, own = name.rpartition("/")
    if slash and not _OWNER.fullmatch(owner):
        raise SpecError(f"{owner[:80]!r} cannot be the owner of a snapshot")
    checked_name(own)
    return name


def lines_of(data: bytes) -> list[str] | None:
    """Return the lines of a text; None if it is no text or too large. At most MAX_TEXT + 1 bytes are needed to
    decide."""
    found = text_of(data)
    return None if isinstance(found, Omitted) else found


def text_of(data: bytes) -> list[str] | Omitted:
    """Return the lines of a text, or why they are not shown."""
    if b"\0" in data:
        return Omitted.BINARY
    if len(data) > MAX_TEXT:
        return Omitted.SIZE
    try:
        lines = data.decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        return Omitted.BINARY
    return lines if len(lines) <= _MAX_LINES else Omitted.SIZE


class Texts:
    """Differences of texts, up to a maximum size and time."""

    def __init__(self, most_bytes: int, cancellation: Cancellation) -> None:
        self._left = most_bytes
        self._cancellation = cancellation

    def refusal(self) -> Omitted | None:
        """Return why no more texts are compared; None if they are."""
        if self._left <= 0:
            return Omitted.SIZE
        return Omitted.TIME if self._cancellation.elapsed_s > TEXT_S else None

    def of(
        self, old: list[str] | Omitted, new: list[str] | Omitted, path: str
    ) -> tuple[str, None] | tuple[None, Omitted]:
        if isinstance(old, Omitted):
            return None, old
        if isinstance(new, Omitted):
            return None, new
        words = difference(old, new, path, self._cancellation.check)
        self._left -= len(words)
        return words, None


def keep_comparing(cancellation: Cancellation) -> None:
    """Check between two steps of a comparison. Raises WorkCancelledError if it was cancelled, OverflowError after
    COMPARE_S."""
    cancellation.check()
    if cancellation.elapsed_s > COMPARE_S:
        raise OverflowError(f"comparing took more than {COMPARE_S:g} s")


def difference(old: list[str], new: list[str], path: str, check: Callable[[], None] = lambda: None) -> str:
    return unified_diff(old, new, path, check)


def fork_specs(spec: SandboxSpec, count: int, labels: Sequence[Mapping[str, str]]) -> list[SandboxSpec]:
    """Return a spec for each new sandbox: the source's, with its own labels if there are any."""
    each = labels or [spec.labels] * count
    return [spec.model_copy(update={"labels": dict(own)}) for own in each]


async def all_or_none(
    wanted: Sequence[tuple[str, SandboxSpec]],
    make: Callable[[str, SandboxSpec], Awaitable[Handle]],
    delete: Callable[[Handle], Awaitable[None]],
    at_once: int,
) -> Sequence[Handle]:
    """Create several sandboxes concurrently. If one cannot be created, or the caller is cancelled, none is left."""
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


@asynccontextmanager
async def none_if_failed(delete: Callable[[Handle], Awaitable[None]]) -> AsyncIterator[list[Handle]]:
    """Delete the sandboxes that the block put into the list, if it fails or is cancelled before it ends."""
    made: list[Handle] = []

    async def undo() -> None:
        await asyncio.gather(*(delete(each) for each in made), return_exceptions=True)

    try:
        yield made
    except BaseException:
        await finish(undo())
        raise


# A snapshot in a file is a line of JSON, the content, and the SHA-256 of both as 64 hex digits and a line end.
# The digest detects damage, not malice: the author of the file made the digest too.
_TRAILER_BYTES = 65
_DIGEST_BLOCK = 1 << 20


def read_snapshot_header(content: IO[bytes], kind: str, most_bytes: int) -> tuple[dict[str, Any], int, int] | None:
    """Return the header, and where the content begins and ends. None: the file is not of this kind."""
    end = os.fstat(content.fileno()).st_size - _TRAILER_BYTES
    head = content.readline(most_bytes)
    try:
        header: Any = strict_json.loads(head) if head.endswith(b"\n") else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != kind or end < len(head):
        return None
    return header, len(head), end


def check_snapshot_version(file: Path, header: dict[str, Any], *known: int) -> None:
    if header.get("version") not in known:
        raise ImageError(f"'{file}' is of another version", hint="Export it with the version that is used here.")


def check_snapshot_digest(content: IO[bytes], file: Path, end: int) -> None:
    content.seek(0)
    digest, left = hashlib.sha256(), end
    while left and (block := content.read(min(left, _DIGEST_BLOCK))):
        digest.update(block)
        left -= len(block)
    if digest.hexdigest() != content.read(_TRAILER_BYTES).removesuffix(b"\n").decode(errors="replace"):
        raise ImageError(f"'{file}' is damaged: its content is not what its digest says", hint="Copy it again.")
