"""The only place where a member's record changes: by the table of legal transitions, with an event, and written
down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from atoll.manager.journal import Journal
from atoll.manager.members import Member, Members
from atoll.manager.record import Event, Operation, Record
from atoll.model import Cause, State, lifecycle
from atoll.timer import Clock

_log = logging.getLogger(__name__)
OnEvent = Callable[[Event], None]


class Transitions:
    """Changes the records of members.

    A change is visible at once. It is written down when the returned future is done; the future raises StateError if it
    cannot be.
    """

    def __init__(self, journal: Journal, members: Members, clock: Clock) -> None:
        self.listeners: list[OnEvent] = []
        """Functions that are called with each event, in this order."""
        self._journal = journal
        self._members = members
        self._clock = clock

    def change(
        self,
        member: Member,
        state: State | None = None,
        *,
        act: Operation | None = None,
        cause: Cause | None = None,
        reason: str = "",
        update: Mapping[str, object] = MappingProxyType({}),
    ) -> asyncio.Future[None]:
        """Change the sandbox's state, or only the operation in progress: `act` is the operation from now on."""
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
        """Change the record without an event."""
        member.record = member.record.model_copy(update=update)
        return self._journal.write(member.record)

    def note(self, member: Member, cause: Cause, reason: str) -> asyncio.Future[None]:
        """Add an event that changes nothing."""
        state = member.record.state
        event = Event(self._clock.wall(), member.id, state, state, None, cause, reason)
        self._tell(event)
        return self._journal.write(member.record, event)

    def report(self, member: Member, kind: str, messages: Sequence[tuple[str, str]]) -> asyncio.Future[None]:
        """Add reports about the sandbox, which change nothing. Each is a reason and its data as JSON."""
        state, now = member.record.state, self._clock.wall()
        events = [Event(now, member.id, state, state, reason=reason, kind=kind, data=data) for reason, data in messages]
        for event in events:
            self._tell(event)
        return self._journal.add(events, member.record.owner)

    def end(self, member: Member, cause: Cause, reason: str) -> asyncio.Future[None]:
        """Remove a sandbox of which nothing is left. Its record stays in the journal, with the cause."""
        before = member.record.state
        gone = lifecycle.change(before, State.MISSING)
        changes: dict[str, object] = {"state": gone, "act": None, "cause": cause, "reason": reason, "env": {}}
        record = member.record.model_copy(update={**changes, "ended_at": self._clock.wall()})
        event = Event(self._clock.wall(), member.id, before, State.MISSING, None, cause, reason)
        self._leave(member, record, event)
        return self._journal.write(record, event)

    def undo(self, member: Member, reason: str) -> asyncio.Future[None]:
        """Remove a sandbox whose creation failed, as if it had never been tried. Only the event stays in the
        journal."""
        before, record = member.record.state, member.record
        if before is not State.MISSING:
            record = record.model_copy(update={"state": lifecycle.change(before, State.MISSING), "act": None})
        event = Event(self._clock.wall(), member.id, before, State.MISSING, Operation.CREATE, None, reason)
        self._leave(member, record, event)
        return self._journal.forget(record, event)

    def _leave(self, member: Member, record: Record, event: Event) -> None:
        self._members.remove(member)
        member.record = record
        self._tell(event)
        member.notify()

    def _tell(self, event: Event) -> None:
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("a listener to events of sandboxes failed")
