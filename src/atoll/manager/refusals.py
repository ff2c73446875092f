"""What a manager refuses to do, by what the caller should do about it.

SandboxError
├── LimitReachedError        there are as many sandboxes as there may be: delete one, or try later (also a RuntimeError)
├── ConflictError            the name or the idempotency key stands for something else
├── ManagerClosedError       the manager was shut down (also a RuntimeError)
└── StateError               what the manager wrote down cannot be read or written
    └── StateInUseError      another manager works on the same state directory
"""

from __future__ import annotations

from atoll.errors import SandboxError


class LimitReachedError(SandboxError, RuntimeError):
    code = "limit_reached"


class ConflictError(SandboxError):
    code = "conflict"


class ManagerClosedError(SandboxError, RuntimeError):
    code = "manager_closed"


class StateError(SandboxError):
    code = "state_unusable"


class StateInUseError(StateError):
    code = "state_in_use"
