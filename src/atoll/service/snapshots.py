"""Snapshots as the users of a server see them. Each user has separate names.

An engine knows a user's snapshot as `OWNER/NAME`, so the owner is stored together with the snapshot and nowhere else.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from weakref import WeakValueDictionary

from pydantic import BaseModel

from atoll.errors import LimitReachedError, SnapshotNotFoundError
from atoll.manager import ManagedSandbox, SandboxManager
from atoll.model.checkpoint import Snapshot
from atoll.service.caller import Caller
from atoll.service.models.sandbox_request import SandboxSettings

_IMAGE = "snapshot:"
_MAX_OWNER = 200
_DIGEST = re.compile(r"~[0-9a-f]{64}")


class SnapshotInfo(BaseModel):
    """A saved state with a name of its own. New sandboxes start from it with the image `snapshot:NAME`."""

    name: str
    """The name of the snapshot, unique among its owner's."""
    owner_id: str
    """The user whom the snapshot belongs to."""
    created_at: datetime
    """When the snapshot was made."""
    image: str
    """The image that its sandbox was made from. A server needs it to use the snapshot."""
    size_bytes: int
    """The space that the snapshot takes."""
    source: str
    """The sandbox it was made from, or a note that it was imported."""
    memory: bool = False
    """Whether running processes continue in sandboxes made from it. They need the same isolation level."""

    @classmethod
    def of(cls, snapshot: Snapshot, owner_id: str) -> SnapshotInfo:
        return cls(
            name=snapshot.name.rpartition("/")[2],
            owner_id=owner_id,
            created_at=datetime.fromtimestamp(snapshot.created_at, UTC),
            image=snapshot.image.rpartition("/")[2] if snapshot.image.startswith("snapshot:") else snapshot.image,
            size_bytes=snapshot.size_bytes,
            source=snapshot.source,
            memory=snapshot.memory,
        )


class SnapshotService:
    """The snapshots of users. For a caller, a snapshot of another user does not exist: SnapshotNotFoundError.
    Administrators may name an owner."""

    def __init__(self, manager: SandboxManager, *, most: int, most_bytes: int | None = None) -> None:
        """`most` and `most_bytes` apply to each user who has no quota of their own."""
        self._manager = manager
        self._most = most
        self._most_bytes = most_bytes
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def list(self, caller: Caller, owner: str | None = None) -> list[SnapshotInfo]:
        """Return the caller's snapshots, oldest first. Administrators also see those of all other users."""
        found = await (await self._manager.saved_states()).snapshots()
        mine = caller.owner if owner is None else owner
        if not caller.is_admin and mine != caller.user_id:
            return []
        part = None if mine is None else _part(mine) if mine else ""
        return [
            SnapshotInfo.of(snapshot, mine if mine is not None else _owner_of(snapshot))
            for snapshot in found
            if part is None or snapshot.name.rpartition("/")[0] == part
        ]

    async def get(self, caller: Caller, name: str, owner: str | None = None) -> SnapshotInfo:
        wanted = self._full_name(caller, name, owner)
        for snapshot in await (await self._manager.saved_states()).snapshots():
            if snapshot.name == wanted:
                return SnapshotInfo.of(snapshot, caller.user_id if owner is None else owner)
        raise SnapshotNotFoundError(f"there is no snapshot {name[:80]!r}", hint="`GET /snapshots` lists yours.")

    async def create(
        self,
        caller: Caller,
        sandbox: ManagedSandbox,
        name: str,
        checkpoint: str | None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> SnapshotInfo:
        """Save a snapshot of a sandbox that the caller may use. It belongs to the caller. Raises LimitReachedError,
        ConflictError."""
        async with self._turn(caller) as room:
            room.check((await sandbox.stats()).disk_bytes or 0)
            made = await sandbox.snapshot(
                f"{_part(caller.user_id)}/{name}", checkpoint, memory=memory, drop_connections=drop_connections
            )
            await self._keep_within(room, made)
        return SnapshotInfo.of(made, caller.user_id)

    async def delete(self, caller: Caller, name: str, owner: str | None = None) -> None:
        await self.get(caller, name, owner)
        await (await self._manager.saved_states()).delete_snapshot(self._full_name(caller, name, owner))

    async def export(self, caller: Caller, name: str, file: Path, owner: str | None = None) -> None:
        await self.get(caller, name, owner)
        await (await self._manager.saved_states()).export_snapshot(self._full_name(caller, name, owner), file)

    async def take_in(self, caller: Caller, name: str, file: Path) -> SnapshotInfo:
        """Import a file that `export` wrote, on this server or another. The file is untrusted, so nothing in it is
        believed."""
        async with self._turn(caller) as room:
            room.check(0)
            states = await self._manager.saved_states()
            made = await states.import_snapshot(file, f"{_part(caller.user_id)}/{name}", most_bytes=room.bytes_left)
            await self._keep_within(room, made)
        return SnapshotInfo.of(made, caller.user_id)

    async def resolved(self, caller: Caller, settings: SandboxSettings) -> SandboxSettings:
        """Return the settings with the full name of a snapshot. `snapshot:NAME` means the caller's own; for
        administrators, if there is none, that of the machine."""
        return settings.model_copy(update={"image": await self.full_image(caller, settings.image)})

    async def full_image(self, caller: Caller, image: str) -> str:
        """Return the full name of an image, which differs for snapshots."""
        if not image.startswith(_IMAGE):
            return image
        name = image.removeprefix(_IMAGE)
        wanted = f"{_part(caller.user_id)}/{name}"
        there = {snapshot.name for snapshot in await (await self._manager.saved_states()).snapshots()}
        if wanted not in there:
            if not caller.is_admin or name not in there:
                raise SnapshotNotFoundError(f"there is no snapshot {name[:80]!r}", hint="`GET /snapshots` lists yours.")
            wanted = name
        return _IMAGE + wanted

    # --- inside ---------------------------------------------------------------------------------------------------

    def _full_name(self, caller: Caller, name: str, owner: str | None) -> str:
        user = caller.user_id if owner is None else owner
        if user != caller.user_id and not caller.is_admin:
            raise SnapshotNotFoundError(f"there is no snapshot {name[:80]!r}", hint="`GET /snapshots` lists yours.")
        return f"{_part(user)}/{name}" if user else name

    @asynccontextmanager
    async def _turn(self, caller: Caller) -> AsyncIterator[_Room]:
        """Let the snapshots of each user be saved one after another, so that the limits are exact."""
        lock = self._turns.setdefault(caller.user_id, asyncio.Lock())
        async with lock:
            mine = await self.list(caller, caller.user_id)
            quotas = caller.quotas
            most = self._most if quotas.max_snapshots is None else quotas.max_snapshots
            most_bytes = self._most_bytes if quotas.max_snapshot_bytes is None else quotas.max_snapshot_bytes
            yield _Room(caller.user_id, len(mine), sum(each.size_bytes for each in mine), most, most_bytes)

    async def _keep_within(self, room: _Room, made: Snapshot) -> None:
        """Delete the snapshot again if it exceeds the limits, because its real size is known only now."""
        try:
            room.check(made.size_bytes)
        except LimitReachedError:
            await (await self._manager.saved_states()).delete_snapshot(made.name)
            raise


class _Room:
    def __init__(self, user_id: str, count: int, used_bytes: int, most: int, most_bytes: int | None) -> None:
        self._user_id, self._count, self._most, self._most_bytes = user_id, count, most, most_bytes
        self.bytes_left = None if most_bytes is None else max(0, most_bytes - used_bytes)

    def check(self, size_bytes: int) -> None:
        """Raise LimitReachedError if one more snapshot of this size is too much."""
        if self._count >= self._most:
            raise LimitReachedError(
                f"user {self._user_id!r} has {self._count} snapshots, which is the limit", hint="Delete one first."
            )
        if self.bytes_left is not None and size_bytes > self.bytes_left:
            raise LimitReachedError(
                f"the snapshots of user {self._user_id!r} would have more than {self._most_bytes} bytes",
                hint="Delete one first.",
            )


def shown_image(image: str, owner: str | None) -> str:
    """Return the image under the name that its owner uses."""
    return image.replace(f"{_IMAGE}{_part(owner)}/", _IMAGE, 1) if owner is not None else image


def _part(user_id: str) -> str:
    """Return a user's id as the first part of a snapshot's name: legible, and different for every user."""
    if _DIGEST.fullmatch(user_id):
        return user_id  # an administrator may send it back in the form in which it was shown
    quoted = urllib.parse.quote(user_id, safe="@|:+")
    return quoted if len(quoted) <= _MAX_OWNER else f"~{hashlib.sha256(user_id.encode()).hexdigest()}"


def _owner_of(snapshot: Snapshot) -> str:
    """Return the owner's id, or an empty text for the machine's own snapshots. Of an id that is too long for a name,
    only the digest is known."""
    return urllib.parse.unquote(snapshot.name.rpartition("/")[0])
