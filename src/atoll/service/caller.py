"""Who asks, and what they may do."""

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
    """Start, pause, resume, extend and delete sandboxes; make specs."""
    KEYS = "keys"
    """Make and revoke one's own keys and tokens."""
    ADMIN = "admin"
    """Everybody's sandboxes, users, figures of the server. Only of users with the role admin."""


ORDINARY = frozenset({Scope.READ, Scope.USE, Scope.MANAGE, Scope.KEYS})
SESSION = frozenset({Scope.READ, Scope.USE})
"""What the session key of a sandbox is good for, on that sandbox."""


@dataclass(frozen=True, slots=True)
class Caller:
    user_id: str
    scopes: frozenset[Scope]
    quotas: Quotas = field(default_factory=Quotas)
    sandbox_id: str | None = None
    """With a session key: the one sandbox that there is for this caller."""
    key_id: str | None = None
    """The API key that the credential is, or that it was made with."""
    expires_at: float | None = None
    """When the credential ends. What is made with it ends no later."""

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    @property
    def owner(self) -> str | None:
        """Whose sandboxes this caller sees; None: all."""
        return None if self.is_admin else self.user_id

    def need(self, scope: Scope) -> None:
        """Raises ForbiddenError without it."""
        if scope not in self.scopes:
            raise ForbiddenError(
                f"this needs the scope '{scope}'", hint="Use a key that has it, or ask an administrator."
            )

    def may_see(self, sandbox_id: str, owner: str | None) -> bool:
        if self.sandbox_id is not None:
            return sandbox_id == self.sandbox_id
        return self.is_admin or owner == self.user_id
