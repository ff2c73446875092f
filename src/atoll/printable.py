"""Text from untrusted places as one line that may be shown: bounded, and without anything that controls a terminal."""

from __future__ import annotations

_MAX_CHARACTER_BYTES = 4
REPLACED = "\N{REPLACEMENT CHARACTER}"


def printable(text: str | bytes, most: int | None = None, *, instead: str = REPLACED, end: bool = False) -> str:
    """Return the text without surrounding white space, and with `instead` for every unprintable character, line ends
    included. At most `most` characters are kept: the first, or with `end` the last."""
    if isinstance(text, bytes):
        text = _bounded(text, most, end).decode(errors="replace")
    shown = "".join(char if char.isprintable() else instead for char in text.strip()).strip()
    if most is None:
        return shown
    return shown[-most:] if end else shown[:most]


def _bounded(raw: bytes, most: int | None, end: bool) -> bytes:
    """Return enough bytes for that many characters, so that no more is decoded than can be shown."""
    if most is None:
        return raw
    size = _MAX_CHARACTER_BYTES * most
    return raw.strip()[-size:] if end else raw.strip()[:size]


def printable_lines(text: str) -> str:
    """Do the same for text of several lines, which keeps its line ends, tabs and indentation."""
    return "".join(char if char.isprintable() or char in "\n\t" else REPLACED for char in text).rstrip("\n")
