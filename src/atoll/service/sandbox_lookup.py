"""Find the sandboxes of a caller. A sandbox of another user is treated as if it did not exist."""

from __future__ import annotations

from atoll.errors import SandboxGoneError, SandboxNotFoundError
from atoll.manager import ManagedSandbox, Record, SandboxManager
from atoll.model import Cause
from atoll.service.caller import Caller

_MAX_OWNERS = 100_000


class SandboxLookup:
    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._owners: dict[str, str | None] = {}
        """The owner of a sandbox never changes, so it is looked up once."""

    async def sandbox(self, caller: Caller, sandbox_id: str) -> ManagedSandbox:
        """Return a sandbox to work in. Any use resumes a sandbox that the server paused."""
        sandbox_id = await self.resolve(caller, sandbox_id)
        if not await self._may_see(caller, sandbox_id):
            raise SandboxNotFoundError(f"Sandbox {sandbox_id[:128]} not found")
        try:
            return await self._manager.get_sandbox(sandbox_id)
        except SandboxNotFoundError:
            await self.existing(caller, sandbox_id)
            raise

    async def resolve(self, caller: Caller, text: str) -> str:
        """Return the id of the caller's sandbox with this id, name or task, in this order; else the text itself.

        Only the caller's own names are looked up, even for administrators, so a name that another user chose is never
        found.
        """
        if await self._may_see(caller, text):
            return text
        found = await self._manager.find_sandbox(text, owner=caller.user_id)
        return text if found is None else found.id

    async def record(self, caller: Caller, sandbox_id: str) -> Record | None:
        """Return the record if the caller may see it, also of a sandbox that has ended."""
        try:
            record = await self._manager.describe(sandbox_id)
        except SandboxNotFoundError:
            return None
        if len(self._owners) >= _MAX_OWNERS:
            self._owners.clear()
        self._owners[record.id] = record.owner
        return record if caller.may_see(record.id, record.owner) else None

    async def known(self, caller: Caller, sandbox_id: str) -> Record:
        """Return the record, also of a sandbox that has ended. Raise SandboxNotFoundError if there is none."""
        record = await self.record(caller, sandbox_id)
        if record is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id[:128]} not found")
        return record

    async def existing(self, caller: Caller, sandbox_id: str) -> Record:
        """Return the record. Raise SandboxGoneError with the cause if the sandbox has ended."""
        record = await self.known(caller, sandbox_id)
        if record.ended_at is not None:
            cause = record.cause or Cause.LOST
            raise SandboxGoneError(f"sandbox {record.id} has ended: {record.reason or cause}", cause=cause)
        return record

    async def is_gone(self, caller: Caller, sandbox_id: str) -> bool:
        record = await self.record(caller, sandbox_id)
        return record is None or record.ended_at is not None

    async def _may_see(self, caller: Caller, sandbox_id: str) -> bool:
        if sandbox_id in self._owners:
            return caller.may_see(sandbox_id, self._owners[sandbox_id])
        return await self.record(caller, sandbox_id) is not None
