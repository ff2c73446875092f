"""The errors of the service, by what the caller should do about them, and what their texts may show.

SandboxError
├── NotAuthenticatedError       there is no credential, or it is invalid or has ended
├── ForbiddenError              the caller lacks the right, whoever the object belongs to
├── RateLimitedError            too many requests: wait `retry_after_s`
├── SandboxSpecNotFoundError    there is no such spec, or it is not yours
├── UserNotFoundError           there is no such user
├── KeyNotFoundError            there is no such key, or it is not yours
├── SessionNotFoundError        there is no such runtime or session, or it is not yours
└── WebhookNotFoundError        there is no such webhook, or it is not yours

Errors name the files they are about. Users must not learn where a server keeps its own files, so those are replaced.
"""

from __future__ import annotations

import re
from pathlib import Path

from atoll.errors import SandboxError

_SHORTEST = 3
_known: dict[str, re.Pattern[str]] = {}


class NotAuthenticatedError(SandboxError):
    code = "not_authenticated"


class ForbiddenError(SandboxError):
    code = "forbidden"


class RateLimitedError(SandboxError):
    code = "rate_limited"

    def __init__(self, reason: str, *, retry_after_s: float, hint: str | None = None) -> None:
        super().__init__(reason, hint=hint)
        self.retry_after_s = retry_after_s


class SandboxSpecNotFoundError(SandboxError):
    code = "sandbox_spec_not_found"


class UserNotFoundError(SandboxError):
    code = "user_not_found"


class KeyNotFoundError(SandboxError):
    code = "key_not_found"


class SessionNotFoundError(SandboxError):
    code = "session_not_found"


class WebhookNotFoundError(SandboxError):
    code = "webhook_not_found"


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
