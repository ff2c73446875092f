"""The parts of a multipart/form-data body, one after another, as they arrive. Nothing is held but the piece at hand.

Clients are not trusted: names, headers and what comes before the first part are bounded, and a body that ends early is
an error.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from starlette.exceptions import HTTPException

_BOUNDARY = re.compile(r'^multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;",]{1,70}))', re.I)
_NAME = re.compile(rb'^content-disposition:\s*form-data\s*;(?:.*;)?\s*name="([^"\r\n]{1,64})"', re.I | re.M)
_MAX_HEAD = 8 << 10
_MAX_PREAMBLE = 64 << 10


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    data: AsyncGenerator[bytes, None]
    """The content of the part, piece by piece. What is not read is skipped."""


async def parts(content_type: str, body: AsyncIterator[bytes]) -> AsyncGenerator[Part, None]:
    """Yield the parts of a body. Read each before asking for the next one.

    Raises HTTPException if the body is not of this type, and ValueError if it is malformed.
    """
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise HTTPException(415, "the body must be multipart/form-data with a boundary")
    source = _Source(body, (found[1] or found[2]).encode("latin-1", "replace"))
    skipped = 0
    async for piece in source.until_mark():
        skipped += len(piece)
        if skipped > _MAX_PREAMBLE:
            raise ValueError("invalid form: it has no part")
    while True:
        line = await source.line()
        if line.startswith(b"--"):
            break
        if line.strip():
            raise ValueError("invalid form: there is text behind a boundary")
        name = await _name(source)
        part = Part(name, source.until_mark())
        yield part
        async for _ in part.data:
            pass
    async for _ in source.rest():
        pass


async def _name(source: _Source) -> str:
    head = b""
    while line := await source.line():
        head += line + b"\n"
        if len(head) > _MAX_HEAD:
            raise ValueError("invalid form: the headers of a part are too long")
    found = _NAME.search(head)
    if found is None:
        raise ValueError("invalid form: a part has no name")
    return found[1].decode(errors="replace")


class _Source:
    def __init__(self, body: AsyncIterator[bytes], boundary: bytes) -> None:
        self._body = body
        self._mark = b"\r\n--" + boundary
        self._held = b"\r\n"  # the first boundary has no line break of its own

    async def until_mark(self) -> AsyncGenerator[bytes, None]:
        """Yield what comes before the next boundary, and skip the boundary."""
        keep = len(self._mark) - 1
        while True:
            content, mark, rest = self._held.partition(self._mark)
            if mark:
                self._held = rest
                if content:
                    yield content
                return
            if len(content) > keep:
                self._held = content[-keep:]
                yield content[:-keep]
            await self._more()

    async def line(self) -> bytes:
        while b"\r\n" not in self._held:
            if len(self._held) > _MAX_HEAD:
                raise ValueError("invalid form: a line is too long")
            if self._held.startswith(b"--"):  # the last boundary, which need not end with a line break
                return self._held
            await self._more()
        line, _, self._held = self._held.partition(b"\r\n")
        return line

    async def rest(self) -> AsyncIterator[bytes]:
        async for piece in self._body:
            yield piece

    async def _more(self) -> None:
        async for piece in self._body:
            self._held += piece
            return
        raise ValueError("invalid form: it ends too early")
