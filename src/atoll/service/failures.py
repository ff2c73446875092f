"""What the texts of errors may show to the users of a server, and the errors of the service.

Errors name the files they are about. Users must not learn where a server keeps its own files, so those are replaced.
"""

from __future__ import annotations

import re
from pathlib import Path

from atoll.errors import (
    ForbiddenError,
    ImageBuildNotFoundError,
    KeyNotFoundError,
    NotAuthenticatedError,
    RateLimitedError,
    SandboxSpecNotFoundError,
    SessionNotFoundError,
    UserNotFoundError,
    WebhookNotFoundError,
)

__all__ = [
    "ForbiddenError",
    "ImageBuildNotFoundError",
    "KeyNotFoundError",
    "NotAuthenticatedError",
    "RateLimitedError",
    "SandboxSpecNotFoundError",
    "SessionNotFoundError",
    "UserNotFoundError",
    "WebhookNotFoundError",
    "hide",
    "without_paths",
]

_SHORTEST = 3
_known: dict[str, re.Pattern[str]] = {}


def hide(*paths: Path) -> None:
    """From now on, replace paths below these directories in what users read."""
    for path in paths:
        text = str(path)
        if len(text) >= _SHORTEST:
            _known[text] = re.compile(rf"'?{re.escape(text)}(?:/[^\s'\"(),;]*)?'?")


def without_paths(text: str) -> str:
    """Return the text with the server's own paths replaced."""
    for path, pattern in _known.items():
        if path in text:
            text = pattern.sub("a file of the server", text)
    return text
