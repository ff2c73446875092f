"""The memory of ready sandboxes, from which the next sandboxes of the same spec start.

    ready/<id>.json, ready/<id>.users/   the records, as of other saved states (`saved_state.py`)
    ready/saving                         a file whose lock is held by the one process that saves such a state

A state belongs to no sandbox. Its name is its key: a digest of the spec and of everything else that decides what is in
the memory, so a state that no longer fits is not found any more, and removed after a while. The record appears last.
The owner is part of the key, so that no user gets memory of another.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from atoll import workers
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Base, Record
from atoll.engines.linux.states.checkpoints import Dump
from atoll.engines.linux.states.saved_state import SavedState
from atoll.engines.linux.states.state_storage import StateStorage
from atoll.model import EffectiveLimits, SandboxSpec

MAX_STATES, MAX_OF_OWNER = 16, 4
MAX_BYTES = 20 << 30
"""How much all states together may take, if that is at most an eighth of the disk."""
_UNUSED_S = 7 * 86400.0
_LOCK = "saving"


@dataclass(frozen=True, slots=True)
class ReadyStates:
    """All methods block, except for `save`."""

    layout: SandboxLayout
    storage: StateStorage

    def find(self, key: str, base: Base, origin: str | None) -> SavedState | None:
        """Return the state that is kept for sandboxes of this key, image and origin, and count that as a use of it."""
        wanted = _name(key, base, origin)
        for saved in self.storage.ready.all():
            if saved.kind == "ready" and saved.name == wanted and self._has_image(saved):
                self.storage.ready.note_use(saved.id)
                return saved
        return None

    def is_kept(self, record: Record) -> bool:
        return self.find(record.ready_key, self.storage.base_of(record), record.origin) is not None

    @contextmanager
    def saving(self) -> Iterator[bool]:
        """Be the only one who saves a ready state, in the whole installation. Provides False if another one does."""
        folder = self.storage.ready.directory
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
        finally:
            os.close(fd)

    async def save(self, record: Record, dump: Dump) -> None:
        """Keep the memory and the files of a sandbox, and remove what is then too much."""
        new = ExitStack()
        saved_id = new.enter_context(self.storage.new_id(self.storage.ready))
        try:
            async with dump(self.layout.memory(saved_id)):
                await workers.run(workers.ENGINE, self.layout.layers.save, record.sandbox_id, saved_id)
            await workers.run(workers.ENGINE, self._write, record, saved_id)
        finally:
            await workers.run(workers.ENGINE, new.close)  # it may have to remove much
        await workers.run(workers.ENGINE, self.collect)

    def drop(self, saved_id: str) -> None:
        """Keep a state no longer. What sandboxes need of it goes with the last of them."""
        if self.storage.ready.forget(saved_id):
            self.storage.remove(saved_id)

    def collect(self, most: int = MAX_STATES) -> list[str]:
        """Remove the states that were not used for long, and the least recently used ones of those that are too many or
        too large. Return descriptions of what was removed."""
        records, now = self.storage.ready, time.time()
        found = [saved for saved in records.all() if saved.kind == "ready"]
        found.sort(key=lambda saved: records.used_at(saved.id), reverse=True)
        removed, of_owner, total, kept, most_bytes = [], dict[str, int](), 0, 0, self._most_bytes()
        for saved in found:
            count, size = of_owner.get(saved.source, 0), saved.size_bytes + saved.memory_bytes
            old = now - records.used_at(saved.id) > _UNUSED_S
            if old or not self._has_image(saved) or kept >= most or count >= MAX_OF_OWNER or total + size > most_bytes:
                self.drop(saved.id)
                removed.append(f"the memory of a ready sandbox with {size:,} bytes")
                continue
            of_owner[saved.source], total, kept = count + 1, total + size, kept + 1
        return removed

    # --- its parts ---------------------------------------------------------------------------------------------------

    def _write(self, record: Record, saved_id: str) -> None:
        storage, base = self.storage, self.storage.base_of(record)
        storage.ready.write(
            SavedState(
                id=saved_id,
                kind="ready",
                name=_name(record.ready_key, base, record.origin),
                created_at=time.time(),
                made_by="prewarm",
                source=_digest([record.spec.owner, record.spec.account]),
                size_bytes=storage.size_bytes(record),
                base=base,
                memory=True,
                memory_bytes=storage.memory_bytes(saved_id),
                runtime=record.runtime,
            )
        )

    def _has_image(self, saved: SavedState) -> bool:
        """Return whether the image exists. A state holds none, so that it can be removed in spite of it."""
        return not saved.base.digest or self.layout.images.store.root(saved.base.digest).is_dir()

    def _most_bytes(self) -> int:
        with contextlib.suppress(OSError):
            disk = os.statvfs(self.layout.data)
            return min(MAX_BYTES, disk.f_blocks * disk.f_frsize // 8)
        return MAX_BYTES


def key_of(spec: SandboxSpec, defaults: EffectiveLimits, *others: str) -> str:
    """Return a digest of what decides, besides the image, what is in the memory of a ready sandbox. `others`: the
    versions of the programs that save it."""
    limits = spec.limits.model_copy(update={"lifetime_s": None})
    plain = spec.model_copy(update={"labels": {}, "limits": limits}).model_dump(mode="json")
    return _digest([plain, spec.owner, defaults.limits.model_dump(mode="json"), list(defaults.left_out), *others])


def _name(key: str, base: Base, origin: str | None) -> str:
    # Images of the same files may have other variables, users or labels.
    return _digest([key, base.model_dump(mode="json", exclude={"image"}), origin or ""])


def _digest(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
