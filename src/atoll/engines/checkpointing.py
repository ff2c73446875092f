"""Saved states: the part of the contract for engines that can save the state of a sandbox and go back to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from atoll.model import Handle
from atoll.model.checkpoint import Change, Checkpoint, Snapshot


@runtime_checkable
class Checkpointing(Protocol):
    """An engine that can save states of its sandboxes. It declares `Capability.CHECKPOINTS` where it can.

    A saved state is atomic: it holds everything that was written before one moment, and nothing that was written
    after it. The remains of a call that was killed half-way are never listed. Deleting a saved state affects neither
    other states nor sandboxes that were made from it.

    Except for `delete_checkpoint`, methods that take a handle raise SandboxGoneError or SandboxNotFoundError if the
    sandbox was deleted, and those that take the id of a checkpoint raise CheckpointNotFoundError if the sandbox has no
    such checkpoint. Each call of `checkpoint` and `fork` makes something new. `memory` asks for the sandbox's memory
    too; where memory cannot be saved, UnsupportedError is raised.
    """

    async def checkpoint(
        self, handle: Handle, *, name: str = "", made_by: str = "user", memory: bool = False
    ) -> Checkpoint:
        """Save the state of the sandbox's files without stopping it.

        With `memory`, its running processes are saved too. The sandbox then stops for a moment, and EngineError is
        raised if another client is connected to its agent. Raises SandboxResourceError if the sandbox has too many
        checkpoints or too little disk left.
        """

    async def checkpoints(self, handle: Handle) -> Sequence[Checkpoint]:
        """Return all checkpoints of the sandbox, oldest first. May be repeated."""

    async def delete_checkpoint(self, handle: Handle, checkpoint_id: str) -> None:
        """Delete a checkpoint. May be repeated: a checkpoint that does not exist is not an error."""

    async def rollback(self, handle: Handle, checkpoint_id: str | None) -> None:
        """End the sandbox's processes, give it the files of a checkpoint, and start it again under the same id.

        None stands for the state right after its creation. May be repeated. If this process dies half-way, the next use
        of the sandbox completes the rollback.
        """

    async def fork(
        self,
        handle: Handle,
        sandbox_ids: Sequence[str],
        checkpoint_id: str | None,
        *,
        memory: bool = False,
        labels: Sequence[Mapping[str, str]] = (),
    ) -> Sequence[Handle]:
        """Create one new sandbox for each id, from a checkpoint or (None) from the present state of the sandbox.

        Either all of them are created or none. `memory` applies to the present state: the running processes then
        continue in each fork. `labels` has one entry for each fork, which replaces the labels of the source; if it is
        empty, forks have those of the source. Raises the errors of `create` too.
        """

    async def hibernate(self, handle: Handle) -> None:
        """Pause the sandbox and move its memory to disk. `resume` continues it. May be repeated.

        If this fails, the sandbox goes on. Raises UnsupportedError and EngineError as `checkpoint` with `memory` does.
        """

    async def diff(self, handle: Handle, old: str, new: str | None, *, text: bool) -> Sequence[Change]:
        """Return the changes from one checkpoint to another, or (None) to the present state, sorted by path.

        With `text`, changed text files come with a unified diff. May be repeated. Raises SandboxResourceError if the
        difference is too large.
        """

    async def snapshot(self, handle: Handle, name: str, checkpoint_id: str | None, *, memory: bool = False) -> Snapshot:
        """Save a checkpoint, or (None) the present state, under a name and independently of the sandbox.

        `SandboxSpec.image` may then be `snapshot:NAME`. With `memory`, the saved processes continue in new sandboxes of
        the same isolation level. Raises ConflictError if there is a snapshot of that name, and SpecError if the name is
        invalid or the checkpoint has no memory although `memory` is wanted.
        """

    async def snapshots(self) -> Sequence[Snapshot]:
        """Return all snapshots of this installation. May be repeated."""

    async def delete_snapshot(self, name: str) -> None:
        """Delete a snapshot. May be repeated: a snapshot that does not exist is not an error."""

    async def export_snapshot(self, name: str, file: Path) -> None:
        """Write a snapshot to a file that `import_snapshot` can read on another machine.

        The file appears complete or not at all, and replaces an existing one. Raises SnapshotNotFoundError if there is
        no such snapshot, and EngineError if the file cannot be written.
        """

    async def import_snapshot(
        self, file: Path, name: str, *, most_bytes: int | None = None, memory: bool = False
    ) -> Snapshot:
        """Make a snapshot from a file that `export_snapshot` wrote.

        The file is checked against its own digest, and hostile content can do no harm. Saved memory in it is imported
        only with `memory`, which is meant for files from a trusted source. Raises ImageError if the file is damaged or
        unpacks to more than `most_bytes`, ImageNotFoundError if the image it is based on is not on this machine, and
        ConflictError if there is a snapshot of that name.
        """


@runtime_checkable
class Prewarming(Protocol):
    """An engine that can keep the memory of a ready sandbox for the next sandboxes of its spec, where the spec says
    `prewarm`. It looks for that memory when it creates a sandbox; `Handle.is_prewarmed` says that it found some."""

    async def keep_ready(self, handle: Handle) -> None:
        """Keep the memory and the files of a sandbox that has just become ready, and that nobody has used yet.

        Does nothing if such a state is kept already, or if another one is being saved. Raises the errors of
        `checkpoint` with `memory`.
        """

    async def distrust_ready(self, handle: Handle) -> None:
        """Keep no longer the state that this sandbox started from, because it is of no use. May be repeated."""
