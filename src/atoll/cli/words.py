"""Sizes and ages as people read them."""

from __future__ import annotations

import time


def size(count: int) -> str:
    for unit_bytes, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit_bytes:
            return f"{count / unit_bytes:.1f} {unit}"
    return f"{count} B"


def age(since: float) -> str:
    """Of what was made at that time."""
    seconds = time.time() - since
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def printable(text: str) -> str:
    """What comes from a sandbox is shown, never obeyed by the terminal."""
    shown = (letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return "".join(shown).rstrip("\n")
