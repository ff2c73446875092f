"""The sandboxes that a manager has now: lookup by id, name, key and task, and the counts that limits need.

Lookups and counts never await, so they are exact however calls interleave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.errors import ConflictError, SandboxNotFoundError
from atoll.event_signal import EventSignal
from atoll.guest.guest import Guest
from atoll.manager.managed_sandbox import ManagedSandbox
from atoll.manager.record import Operation, Record
from atoll.manager.usage import Usage
from atoll.model import State
from atoll.model.manus_names import TASK_LABEL

_SHOWN = 5


class Creation:
    """A sandbox that is being created. Several callers may wait for it; it is given up when the last of them is
    cancelled."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.waiters = 0
        self.acknowledged = False
        """Whether a caller has learned that the sandbox exists."""


@dataclass(frozen=True, slots=True)
class Background:
    """What goes on in a sandbox without a waiting caller, such as background commands."""

    at: float
    """When this was measured, on the boot-time clock."""
    running: bool
    """Whether a command runs, or anything else besides the agent."""
    output_bytes: int
    """Bytes that commands have written since the sandbox was created, whether they were read or not."""
    sent_bytes: int = 0
    """Bytes sent over the sandbox's network."""
    cpu_s: float = 0.0
    """Processor time used when the measurement began."""
    cpu_after_s: float = 0.0
    """The same when the measurement ended. With a virtual kernel, measuring uses more than an idle sandbox does."""
    listens: frozenset[int] = frozenset()
    """TCP ports on which something listens."""


class Member:
    """One sandbox of a manager: its record, the object that users hold, and the operation in progress on it."""

    sandbox: ManagedSandbox

    def __init__(self, record: Record, usage: Usage) -> None:
        self.record = record
        self.since = usage.last
        """When this manager created or recovered the sandbox."""
        self.usage = usage
        self.creation: Creation | None = None
        self.deletion: asyncio.Task[None] | None = None
        self.is_being_deleted = False
        """Whether the sandbox is being deleted, or will be when the operation in progress is over. Nobody can get it
        any more."""
        self.exclusive = asyncio.Lock()
        """Held by callers that want their operations to run one after another."""
        self.deletion_reason = ""
        """Why the sandbox is being deleted. If that failed, its record may give the reason for the failure instead."""
        self.next_try = 0.0
        self.tries = 0
        """How often deleting it has failed. Each failure delays the next try longer."""
        self.background: Background | None = None
        """The latest measurement."""
        self.paused_since = 0.0
        """Since when the sandbox is paused, on the boot-time clock."""
        self.on_disk = False
        """Whether the sandbox is paused with its memory on the disk."""
        self.stays_in_memory = False
        """Whether moving its memory to the disk has been tried during this pause, which happens only once."""
        self.look_again = 0.0
        """The sandbox need not be checked for idleness before this time."""
        self.observers: set[Guest] = set()
        """Connections that observe the sandbox without using it."""
        self._changed = EventSignal()

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def usable(self) -> bool:
        """Whether the sandbox runs and no operation is in progress on it. Operations on one sandbox run one after
        another."""
        return self.record.state is State.RUNNING and self.free

    @property
    def free(self) -> bool:
        return self.record.act is None and self.creation is None and not self.is_being_deleted

    @property
    def waits_for_deletion(self) -> bool:
        """Whether the sandbox could not be deleted and no attempt is in progress."""
        return self.record.act is Operation.DELETE and self.deletion is None and self.creation is None

    @property
    def waits_in_pool(self) -> bool:
        return self.record.pool is not None

    @property
    def available(self) -> bool:
        """Whether users can use the sandbox or wait for it."""
        return not self.waits_in_pool and not self.is_being_deleted

    def notify(self) -> None:
        self._changed.notify()

    async def changed(self) -> None:
        """Return at the next change of the record."""
        await self._changed.wait()

    async def changes_within(self, seconds: float) -> bool:
        """Wait for a change of the record. Returns False if there was none within this time."""
        try:
            async with asyncio.timeout(seconds):
                await self.changed()
        except TimeoutError:
            return False
        return True


class Members:
    def __init__(self) -> None:
        self._all: dict[str, Member] = {}
        self._names: dict[tuple[str | None, str], Member] = {}
        self._keys: dict[tuple[str | None, str], Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def add(self, member: Member) -> None:
        assert member.id not in self._all
        self._all[member.id] = member
        self.register(member)

    def register(self, member: Member) -> None:
        """Let the sandbox be found by its name and its key from now on."""
        record = member.record
        if record.name is not None:
            assert (record.owner, record.name) not in self._names
            self._names[record.owner, record.name] = member
        if record.key is not None:
            assert (record.owner, record.key) not in self._keys
            self._keys[record.owner, record.key] = member

    def remove(self, member: Member) -> None:
        self._all.pop(member.id, None)
        record = member.record
        for index, key in ((self._names, record.name), (self._keys, record.key)):
            if key is not None and index.get((record.owner, key)) is member:
                del index[record.owner, key]

    def find(self, sandbox_id: str) -> Member | None:
        return self._all.get(sandbox_id)

    def get(self, sandbox_id: str) -> Member:
        """Return a sandbox that users can use or wait for. Raises SandboxNotFoundError."""
        member = self._all.get(sandbox_id)
        if member is None or not member.available:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found")
        return member

    def named(self, owner: str | None, name: str) -> Member | None:
        return self._names.get((owner, name))

    def called(self, owner: str | None, text: str) -> Member | None:
        """Return this owner's sandbox of this name, else the owner's sandbox of this task, else None.

        Sandboxes of other owners are never returned. Raises ConflictError if the task has several sandboxes.
        """
        named = self.named(owner, text)
        if named is not None and named.available:
            return named
        of_task = [
            member
            for member in self._all.values()
            if member.record.owner == owner and member.record.labels.get(TASK_LABEL) == text and member.available
        ]
        if len(of_task) > 1:
            ids = ", ".join(member.id for member in of_task[:_SHOWN])
            raise ConflictError(f"task {text!r} has {len(of_task)} sandboxes", hint=f"Name one by its id: {ids}.")
        return of_task[0] if of_task else None

    def keyed(self, owner: str | None, key: str) -> Member | None:
        return self._keys.get((owner, key))

    def of_owner(self, owner: str) -> int:
        return sum(1 for member in self._all.values() if member.record.owner == owner)

    def asleep(self) -> int:
        """Count the sandboxes that are paused and not being resumed."""
        return sum(
            1
            for member in self._all.values()
            if member.record.state is State.PAUSED and member.record.act is not Operation.RESUME
        )

    def falling_asleep(self) -> int:
        return sum(1 for member in self._all.values() if member.record.act is Operation.PAUSE)
