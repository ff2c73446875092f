"""Errors name the files they are about. Users of a server must not learn where it keeps its own files."""

from __future__ import annotations

import re
from pathlib import Path

_SHORTEST = 3
_known: dict[str, re.Pattern[str]] = {}


def hide(*paths: Path) -> None:
    """Hide paths below these directories from users, from now on."""
    for path in paths:
        text = str(path)
        if len(text) >= _SHORTEST:
            _known[text] = re.compile(rf"'?{re.escape(text)}(?:/[^\s'\"(),;]*)?'?")


def without_paths(text: str) -> str:
    """The same without the server's own paths."""
    for path, pattern in _known.items():
        if path in text:
            text = pattern.sub("a file of the server", text)
    return text
