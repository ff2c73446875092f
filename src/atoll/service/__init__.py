"""Sandboxes for many users: who may do what, from which spec, and how much of it.

`SandboxService` and `SandboxSpecService` are over the manager and the store; they know nothing of HTTP.
"""

from atoll.service.identity import Caller, Scope
from atoll.service.keys import Identities
from atoll.service.models import (
    ExposedUrl,
    ForkStart,
    SandboxInfo,
    SandboxPage,
    SandboxSpecInfo,
    SandboxSpecInfoPage,
    SandboxStart,
    SandboxStatus,
    SnapshotInfo,
    Success,
)
from atoll.service.refusals import (
    ForbiddenError,
    KeyNotFoundError,
    NotAuthenticatedError,
    RateLimitedError,
    SandboxSpecNotFoundError,
    UserNotFoundError,
)
from atoll.service.sandboxes import SandboxService
from atoll.service.specs import SandboxSpecService

__all__ = [
    "Caller",
    "ExposedUrl",
    "ForbiddenError",
    "ForkStart",
    "Identities",
    "KeyNotFoundError",
    "NotAuthenticatedError",
    "RateLimitedError",
    "SandboxInfo",
    "SandboxPage",
    "SandboxService",
    "SandboxSpecInfo",
    "SandboxSpecInfoPage",
    "SandboxSpecNotFoundError",
    "SandboxSpecService",
    "SandboxStart",
    "SandboxStatus",
    "Scope",
    "SnapshotInfo",
    "Success",
    "UserNotFoundError",
]
