"""The caller of a request, and what the caller may do."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from atoll.service.failures import ForbiddenError
from atoll.store import Quotas


class Scope(enum.StrEnum):
    """What a key or a token is good for. A role limits what its user can have."""

    READ = "read"
    """See sandboxes, specs and events."""
    USE = "use"
    """Work inside sandboxes: commands, terminals, files, ports."""
    MANAGE = "manage"
    """Start, pause, resume, extend and delete sandboxes; create specs."""
    KEYS = "keys"
    """Create and revoke one's own keys and tokens."""
    ADMIN = "admin"
    """Manage everybody's sandboxes and the users, and see the server's metrics. Only users with the role admin can have
    it."""


ORDINARY = frozenset({Scope.READ, Scope.USE, Scope.MANAGE, Scope.KEYS})
SESSION = frozenset({Scope.READ, Scope.USE})
"""The scopes of a session key, for its own sandbox."""


@dataclass(frozen=True, slots=True)
class Caller:
    user_id: str
    scopes: frozenset[Scope]
    quotas: Quotas = field(default_factory=Quotas)
    sandbox_id: str | None = None
    """With a session key: the only sandbox that this caller can reach."""
    key_id: str | None = None
    """The API key that is the credential, or that the credential was created with."""
    expires_at: float | None = None
    """When the credential expires. Whatever is created with it expires no later."""

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    @property
    def owner(self) -> str | None:
        """The owner whose sandboxes this caller sees, or None for all sandboxes."""
        return None if self.is_admin else self.user_id

    def need(self, scope: Scope) -> None:
        """Raise ForbiddenError if the caller does not have this scope."""
        if scope not in self.scopes:
            raise ForbiddenError(
                f"this needs the scope '{scope}'", hint="Use a key that has it, or ask an administrator."
            )

    def may_see(self, sandbox_id: str, owner: str | None) -> bool:
        if self.sandbox_id is not None:
            return sandbox_id == self.sandbox_id
        return self.is_admin or owner == self.user_id
