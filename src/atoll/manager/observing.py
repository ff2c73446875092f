"""Looking into sandboxes without using them, and noticing which of them are used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from atoll.engines.base import ByteStream
from atoll.errors import SandboxGoneError
from atoll.guest.guest import Guest
from atoll.manager.core import Core
from atoll.manager.members import Member
from atoll.manager.record import Record

T = TypeVar("T")
Change = Callable[[Record], Mapping[str, object]]
_CONNECT_S = 5.0
_CHANGEABLE = frozenset(("labels", "services", "env"))


class Observing:
    def __init__(self, core: Core) -> None:
        self._core = core

    async def ask(self, member: Member, question: Callable[[Guest], Awaitable[T]], seconds: float) -> T:
        """What its agent answers on a connection of its own, within so many seconds. Not a use, and it wakes nobody:
        SandboxGoneError if it does not run."""
        if not member.usable:
            raise SandboxGoneError(f"sandbox {member.id} does not run")

        async def whole() -> T:
            async with self._guest(member) as guest:
                return await question(guest)

        return await self._core.tasks.bounded(whole(), seconds, f"ask {member.id}")

    async def update(self, member: Member, change: Change) -> Record:
        """Give its record other labels, services or variables. `change` gets the record; nothing comes in between."""
        update = change(member.record)
        assert update.keys() <= _CHANGEABLE
        if any(getattr(member.record, name) != value for name, value in update.items()):
            written = self._core.ledger.correct(member, update)
            member.sandbox.env = member.record.env
            await written
        return member.record

    async def report(self, member: Member, kind: str, messages: Sequence[tuple[str, str]]) -> None:
        await self._core.ledger.report(member, kind, messages)

    @asynccontextmanager
    async def _guest(self, member: Member) -> AsyncIterator[Guest]:
        async def connect() -> ByteStream:
            if not member.usable:
                raise SandboxGoneError(f"sandbox {member.id} does not run")
            return await self._core.engine_of(member).connect(member.record.handle())

        guest = Guest(connect, connect_timeout_s=_CONNECT_S)
        member.observers.add(guest)
        try:
            yield guest
        finally:
            member.observers.discard(guest)
            await guest.aclose()
