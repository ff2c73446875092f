"""The only place where a member's record changes: by the table of legal transitions, with an event, written down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from atoll import lifecycle
from atoll.manager.clock import Clock
from atoll.manager.journal import Journal
from atoll.manager.members import Member, Members
from atoll.manager.record import Act, Event, Record
from atoll.model import Cause, State

_log = logging.getLogger(__name__)
OnEvent = Callable[[Event], None]


class Ledger:
    def __init__(self, journal: Journal, members: Members, clock: Clock) -> None:
        self.listeners: list[OnEvent] = []
        self._journal = journal
        self._members = members
        self._clock = clock

    def change(
        self,
        member: Member,
        state: State | None = None,
        *,
        act: Act | None = None,
        cause: Cause | None = None,
        reason: str = "",
        update: Mapping[str, object] = MappingProxyType({}),
    ) -> asyncio.Future[None]:
        """Everybody sees it at once; it is written down when the returned has been awaited. Raises StateError there.

        `act` is what is being done from now on. Without a state the state stays.
        """
        before = member.record.state
        after = before if state is None or state is before else lifecycle.change(before, state)
        changes = {**update, "state": after, "act": act}
        if state is not None or cause is not None:
            changes |= {"cause": cause, "reason": reason}
        member.record = member.record.model_copy(update=changes)
        event = Event(self._clock.wall(), member.id, before, after, act, cause, reason)
        self._tell(event)
        member.notify()
        return self._journal.write(member.record, event)

    def correct(self, member: Member, update: Mapping[str, object]) -> asyncio.Future[None]:
        """Write down a change that makes no event."""
        member.record = member.record.model_copy(update=update)
        return self._journal.write(member.record)

    def note(self, member: Member, cause: Cause, reason: str) -> asyncio.Future[None]:
        """Something happened to it that changes nothing."""
        state = member.record.state
        event = Event(self._clock.wall(), member.id, state, state, None, cause, reason)
        self._tell(event)
        return self._journal.write(member.record, event)

    def report(self, member: Member, kind: str, messages: Sequence[tuple[str, str]]) -> asyncio.Future[None]:
        """Reports about it, each a reason and its data as JSON. They change nothing."""
        state, now = member.record.state, self._clock.wall()
        events = [Event(now, member.id, state, state, reason=reason, kind=kind, data=data) for reason, data in messages]
        for event in events:
            self._tell(event)
        return self._journal.add(events, member.record.owner)

    def end(self, member: Member, cause: Cause, reason: str) -> asyncio.Future[None]:
        """Nothing is left of it. Its record stays, with the cause."""
        before = member.record.state
        record = member.record.model_copy(
            update={
                "state": lifecycle.change(before, State.MISSING),
                "act": None,
                "cause": cause,
                "reason": reason,
                "ended_at": self._clock.wall(),
                "env": {},
            }
        )
        return self._leave(
            member, record, Event(self._clock.wall(), member.id, before, State.MISSING, None, cause, reason)
        )

    def undo(self, member: Member, reason: str) -> asyncio.Future[None]:
        """It never came to be: as if it had not been tried, but for the event."""
        before, record = member.record.state, member.record
        if before is not State.MISSING:
            record = record.model_copy(update={"state": lifecycle.change(before, State.MISSING), "act": None})
        event = Event(self._clock.wall(), member.id, before, State.MISSING, Act.CREATE, None, reason)
        self._members.remove(member)
        member.record = record
        self._tell(event)
        member.notify()
        return self._journal.forget(record, event)

    def _leave(self, member: Member, record: Record, event: Event) -> asyncio.Future[None]:
        self._members.remove(member)
        member.record = record
        self._tell(event)
        member.notify()
        return self._journal.write(record, event)

    def _tell(self, event: Event) -> None:
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("a listener to events of sandboxes failed")
