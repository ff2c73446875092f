"""Credentials for one sandbox: its session key, links to its ports, and public ports, which need none."""

from __future__ import annotations

import contextlib
import time

from atoll.errors import SandboxNotFoundError
from atoll.manager import PausedBy, Record, SandboxManager
from atoll.model import State
from atoll.service.caller import SESSION, Caller, Scope
from atoll.service.exposed_ports import ports_of
from atoll.service.failures import NotAuthenticatedError
from atoll.service.identities import Identities
from atoll.service.session_keys import Grant, SessionKeys


class SandboxCredentials:
    def __init__(self, manager: SandboxManager, session_keys: SessionKeys, identities: Identities) -> None:
        self._manager = manager
        self._session_keys = session_keys
        self._identities = identities

    def session_key(self, caller: Caller, record: Record) -> str | None:
        """Return a session key that is valid as long as the caller's own credential. Return None for callers who may
        not use the sandbox without one."""
        if Scope.USE not in caller.scopes or (caller.user_id != record.owner and caller.key_id is None):
            return None
        until = None if caller.expires_at is None else int(caller.expires_at)
        return self._session_keys.key(record.id, record.owner, Grant(caller.key_id, until))

    def port_link(self, caller: Caller, sandbox_id: str, port: int, until: int) -> str:
        """Return the part of a URL that gives access to one port."""
        return self._session_keys.link(sandbox_id, port, Grant(caller.key_id, until))

    def inside_key(self, sandbox_id: str, owner: str | None) -> str:
        """Return the key by which programs in the sandbox recognize its users."""
        return self._session_keys.inside_key(sandbox_id, owner)

    async def by_session_key(self, key: str) -> Caller:
        """Return the caller for the session key of a running sandbox. Raise the same NotAuthenticatedError for any
        other text."""
        claims = self._session_keys.claims(key)
        with contextlib.suppress(SandboxNotFoundError, NotAuthenticatedError):
            record = await self._manager.describe(claims[0]) if claims is not None else None
            if (
                claims is not None
                and record is not None
                and self._session_keys.is_valid(key, record.owner, time.time())
                and _answers(record)
            ):
                return await self._bearer(record, claims[1])
        raise NotAuthenticatedError(
            "invalid session key",
            hint="A session key ends with its sandbox and with the credential it was shown to.",
        )

    async def by_port_link(self, sandbox_id: str, port: int, mark: str) -> Caller:
        """Return the caller for a port link. Raise the same NotAuthenticatedError for any other text."""
        with contextlib.suppress(SandboxNotFoundError, NotAuthenticatedError):
            grant = self._session_keys.link_grant(mark, sandbox_id, port, time.time())
            if grant is not None:
                record = await self._manager.describe(sandbox_id)
                if _answers(record):
                    return await self._bearer(record, grant)
        raise NotAuthenticatedError(
            "invalid link", hint="The link, its sandbox or the credential that made it may have expired or ended."
        )

    async def by_public_port(self, sandbox_id: str, port: int) -> Caller | None:
        """Return a caller for requests to a public port of a running sandbox, or None if this is no such port."""
        with contextlib.suppress(SandboxNotFoundError, NotAuthenticatedError):
            record = await self._manager.describe(sandbox_id)
            if _answers(record) and any(each.public and each.port == port for each in ports_of(record.labels)):
                await self._identities.vouch(record.owner)
                # Strangers have a request rate of their own, so they cannot use up the owner's.
                return Caller(f"~{record.id}", SESSION, sandbox_id=record.id)
        return None

    async def _bearer(self, record: Record, grant: Grant) -> Caller:
        """Return the caller. Raise NotAuthenticatedError if the owner is locked out, or the credential behind the grant
        has ended."""
        await self._identities.vouch(record.owner, grant.key_id)
        return Caller(record.owner or "", SESSION, sandbox_id=record.id, key_id=grant.key_id, expires_at=grant.until)


def _answers(record: Record) -> bool:
    """Whether the sandbox runs, or will run as soon as it is used."""
    asleep = record.state is State.PAUSED and record.paused_by in (PausedBy.IDLE, PausedBy.ROOM)
    return record.state is State.RUNNING or asleep
