"""Sandboxes for many users: who may do what, from which spec, and how much of it.

`SandboxService` and `SandboxSpecService` are over the manager and the store; they know nothing of HTTP.
"""

from atoll.service.caller import Caller, Scope
from atoll.service.failures import (
    ForbiddenError,
    KeyNotFoundError,
    NotAuthenticatedError,
    RateLimitedError,
    SandboxSpecNotFoundError,
    UserNotFoundError,
)
from atoll.service.identities import Identities
from atoll.service.models.catalogue import SandboxSpecInfo, SandboxSpecInfoPage
from atoll.service.models.exposed_port import ExposedUrl
from atoll.service.models.sandbox_info import SandboxInfo, SandboxPage
from atoll.service.models.sandbox_request import ForkRequest, SandboxRequest
from atoll.service.sandboxes import SandboxService
from atoll.service.snapshots import SnapshotInfo
from atoll.service.specs import SandboxSpecService
from atoll.service.users import UserService

__all__ = [
    "Caller",
    "ExposedUrl",
    "ForbiddenError",
    "ForkRequest",
    "Identities",
    "KeyNotFoundError",
    "NotAuthenticatedError",
    "RateLimitedError",
    "SandboxInfo",
    "SandboxPage",
    "SandboxRequest",
    "SandboxService",
    "SandboxSpecInfo",
    "SandboxSpecInfoPage",
    "SandboxSpecNotFoundError",
    "SandboxSpecService",
    "Scope",
    "SnapshotInfo",
    "UserNotFoundError",
    "UserService",
]
