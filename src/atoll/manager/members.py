"""The sandboxes that a manager has right now, who finds them, and who is counted against which limit.

Everything here happens between two awaits, so what it says is exact however calls interleave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.errors import ConflictError, SandboxNotFoundError
from atoll.guest.guest import Guest
from atoll.manager.managed_sandbox import ManagedSandbox
from atoll.manager.record import Operation, Record
from atoll.manager.usage import Usage
from atoll.model import State
from atoll.model.manus_names import TASK_LABEL
from atoll.waiting import EventSignal

_SHOWN = 5


class Creation:
    """A sandbox on its way. Several callers may wait for one; it is given up when the last of them is gone."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.waiters = 0
        self.acknowledged = False
        """Somebody knows that it is there."""


@dataclass(frozen=True, slots=True)
class Background:
    """What commands do inside that nobody waits for."""

    at: float
    """When we looked, on the clock that does not jump."""
    running: bool
    """Whether a command runs, or anything else besides the agent."""
    output_bytes: int
    """Bytes that commands have written in the life of the sandbox, read or not."""
    sent_bytes: int = 0
    """Bytes sent over its network."""
    cpu_s: float = 0.0
    """Processor time used when the look began."""
    cpu_after_s: float = 0.0
    """The same when the look was over: with a virtual kernel, looking takes more than an idle sandbox does."""
    listens: frozenset[int] = frozenset()
    """TCP ports."""


class Member:
    """One sandbox of a manager: its record, the object that users hold, and what is being done to it."""

    sandbox: ManagedSandbox

    def __init__(self, record: Record, usage: Usage) -> None:
        self.record = record
        self.since = usage.last
        """When we began to have it."""
        self.usage = usage
        self.creation: Creation | None = None
        self.deletion: asyncio.Task[None] | None = None
        self.is_being_deleted = False
        """It is being deleted, or will be as soon as what is being done to it is over. Nobody gets it any more."""
        self.exclusive = asyncio.Lock()
        """For callers who want their operations one after another."""
        self.deletion_reason = ""
        """Why it is being deleted. Its record may say what went wrong with that."""
        self.next_try = 0.0
        self.tries = 0
        """Of deleting it, after which the next one waits longer."""
        self.background: Background | None = None
        """When somebody last looked."""
        self.paused_since = 0.0
        """Since when it sleeps, on the clock that does not jump."""
        self.on_disk = False
        """It sleeps, with its memory on the disk."""
        self.stays_in_memory = False
        """It could not be moved to the disk, which is tried once in each sleep."""
        self.look_again = 0.0
        """It need not be checked for idleness before then."""
        self.observers: set[Guest] = set()
        """Connections of those who look at it without using it."""
        self._changed = EventSignal()

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def usable(self) -> bool:
        """Running, and nothing is being done to it. What is done to a sandbox is done one after another."""
        return self.record.state is State.RUNNING and self.free

    @property
    def free(self) -> bool:
        return self.record.act is None and self.creation is None and not self.is_being_deleted

    @property
    def waits_for_deletion(self) -> bool:
        """It could not be deleted, and nobody is trying to just now."""
        return self.record.act is Operation.DELETE and self.deletion is None and self.creation is None

    @property
    def waits_in_pool(self) -> bool:
        return self.record.pool is not None

    @property
    def available(self) -> bool:
        """Somebody can use it, or wait for it."""
        return not self.waits_in_pool and not self.is_being_deleted

    def notify(self) -> None:
        self._changed.notify()

    async def changed(self) -> None:
        """Return at the next change of its record."""
        await self._changed.wait()

    async def changes_within(self, seconds: float) -> bool:
        """Wait for a change of its record. False: there was none in that time."""
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
        """Its name and its key stand for it from now on."""
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
        """One that somebody can use or wait for. SandboxNotFoundError otherwise."""
        member = self._all.get(sandbox_id)
        if member is None or not member.available:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found")
        return member

    def named(self, owner: str | None, name: str) -> Member | None:
        return self._names.get((owner, name))

    def called(self, owner: str | None, text: str) -> Member | None:
        """The sandbox of this owner, and of nobody else, that has this name, else the one of this task. Raises
        ConflictError if the task has several."""
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
        """Those that sleep, and will until somebody wakes them."""
        return sum(
            1
            for member in self._all.values()
            if member.record.state is State.PAUSED and member.record.act is not Operation.RESUME
        )

    def falling_asleep(self) -> int:
        return sum(1 for member in self._all.values() if member.record.act is Operation.PAUSE)
