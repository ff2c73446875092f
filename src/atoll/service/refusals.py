"""What the service refuses, by what the caller should do about it.

SandboxError
├── NotAuthenticatedError       say who you are: there is no credential, or it is not good (any more)
├── ForbiddenError              you may not do that, whoever's it is
├── RateLimitedError            too many requests: wait `retry_after_s`
├── SandboxSpecNotFoundError    there is no such spec, or it is not yours
├── UserNotFoundError           there is no such user
├── KeyNotFoundError            there is no such key, or it is not yours
├── SessionNotFoundError        there is no such runtime or session, or it is not yours
└── WebhookNotFoundError        there is no such webhook, or it is not yours
"""

from __future__ import annotations

from atoll.errors import SandboxError


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
