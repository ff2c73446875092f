"""Snapshots of containers: images with names of their own, which outlive the sandbox, and files."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.docker.api import image_pull
from atoll.engines.docker.states import image_archive
from atoll.engines.docker.states.commits import SavedState
from atoll.engines.docker.states.docker_states import DockerStates, no_memory
from atoll.engines.host.saved_states import checked_snapshot
from atoll.errors import ConflictError, SnapshotNotFoundError, SpecError
from atoll.model import Handle, SandboxSpec
from atoll.model.checkpoint import Snapshot

SNAPSHOT = "snapshot:"


class DockerSnapshots(DockerStates):
    """The part of `Checkpointing` that concerns snapshots."""

    async def snapshot(
        self, handle: Handle, name: str, checkpoint_id: str | None = None, *, memory: bool = False
    ) -> Snapshot:
        if memory:
            raise no_memory()
        await self._refuse_taken(checked_snapshot(name))
        async with self._kept(handle, checkpoint_id) as source:
            update = {"id": os.urandom(12).hex(), "sandbox_id": "", "name": name, "source": handle.sandbox_id}
            kept = source.model_copy(update={**update, "created_at": time.time(), "parent": None, "made_by": "user"})
            async with self._exported(source) as pieces:
                return (await self._commits.flatten(pieces, kept)).as_snapshot()

    async def snapshots(self) -> Sequence[Snapshot]:
        return [saved.as_snapshot() for saved in await self._commits.all("snapshot")]

    async def delete_snapshot(self, name: str) -> None:
        with suppress(SnapshotNotFoundError):
            await finish(self._drop(await self._snapshot_named(name)))

    async def export_snapshot(self, name: str, file: Path) -> None:
        async with self._held(lambda: self._snapshot_named(name)) as saved, self._exported(saved) as pieces:
            await image_archive.write(saved, pieces, file)

    async def import_snapshot(
        self, file: Path, name: str, *, most_bytes: int | None = None, memory: bool = False
    ) -> Snapshot:
        await self._refuse_taken(checked_snapshot(name))
        incoming = await workers.run(workers.TRANSFER, image_archive.read, file)
        update = {"id": os.urandom(12).hex(), "name": name, "source": file.name, "created_at": time.time()}
        saved = incoming.saved.model_copy(update=update)
        await workers.run(workers.TRANSFER, image_archive.measure, file, incoming, most_bytes)
        return (await self._commits.flatten(image_archive.pieces(file, incoming), saved)).as_snapshot()

    async def _snapshot_named(self, name: str) -> SavedState:
        for saved in await self._commits.all("snapshot"):
            if saved.name == name:
                return saved
        raise SnapshotNotFoundError(f"there is no snapshot {name[:80]!r}", hint="'atoll snapshot ls' lists them.")

    async def _size_of_base(self, spec: SandboxSpec, saved: image_pull.Image) -> int:
        """Return the size of the image that a saved state was made from: all later writes count against the limit
        again."""
        name = spec.image if snapshot_of(spec.image) is None else saved.id
        base = await image_pull.find(self._http, name) or await image_pull.find(self._http, saved.id)
        return base.size_bytes if base is not None else 0

    async def _refuse_taken(self, name: str) -> None:
        if any(saved.name == name for saved in await self._commits.all("snapshot")):
            raise ConflictError(
                f"there is already a snapshot {name.rpartition('/')[2]!r}",
                hint="Delete it first, or choose another name.",
            )


def snapshot_of(image: str) -> str | None:
    """Return the name in `snapshot:NAME`; None if the image is not a snapshot."""
    if not image.startswith(SNAPSHOT):
        return None
    if not (name := image.removeprefix(SNAPSHOT)):
        raise SpecError("'snapshot:' needs the name of a snapshot")
    return name
