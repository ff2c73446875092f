"""Saved states of a sandbox (checkpoints, undo, snapshots), and pausing it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator, Sequence

from atoll.engines.contract import Pausable, supporting
from atoll.errors import CheckpointNotFoundError, StartError, UnsupportedError
from atoll.model.checkpoint import Change, Checkpoint, Snapshot, Undo
from atoll.sandbox import setup, start_up
from atoll.sandbox.execution import CommandLine
from atoll.sandbox.hooks import begin, run_hook
from atoll.sandbox.sandbox_access import SandboxAccess

_MADE_BY = "before: "
"""The beginning of `made_by` of the checkpoints that `undo` goes back to."""
_SHOWN = 200
"""How many characters of a command line `made_by` contains."""


class UndoHistory:
    """The checkpoints that `undo` goes back to: one before each command that the rule covers, and only the last ones.

    Without a rule no checkpoints are made.
    """

    def __init__(self, rule: Undo | None) -> None:
        self.rule = rule
        self._kept: list[str] | None = None
        """The ids of the checkpoints, oldest first. None: they were not looked up yet."""

    async def before(self, access: SandboxAccess, command: CommandLine) -> None:
        """Keep the state before this command, if the rule covers it."""
        if self.rule is None:
            return
        line = command if isinstance(command, str) else shlex.join(command)
        if not self.rule.covers(line):
            return
        engine, handle = await access.checkpointing(), access.handle()
        made = await engine.checkpoint(handle, made_by=f"{_MADE_BY}{line[:_SHOWN]}")
        if self._kept is None:
            self._kept = [each.id for each in undone_by(await engine.checkpoints(handle))]
        else:
            self._kept.append(made.id)
        while len(self._kept) > self.rule.keep:
            await engine.delete_checkpoint(handle, self._kept.pop(0))

    def changed(self) -> None:
        """Look the checkpoints up again before the next use: others may have made or deleted some."""
        self._kept = None


def undone_by(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return those of all checkpoints that `undo` goes back to, in the same order."""
    return [each for each in checkpoints if each.made_by.startswith(_MADE_BY)]


class SavedStateMethods:
    """The methods of `AsyncSandbox` for saved states and for pausing."""

    access: SandboxAccess
    _undo: UndoHistory

    async def checkpoint(
        self, name: str = "", *, memory: bool = False, drop_connections: bool = False, made_by: str = "user"
    ) -> Checkpoint:
        """Save the state of all files atomically while the sandbox runs. This takes milliseconds, whatever their size.

        With `memory`, also save the memory of all processes, which then continue from there after a rollback or in a
        fork; this needs isolation="gvisor". The next use of a persistent shell or a followed command reconnects to it.
        Connections to the outside (`open_connections`) cannot be saved: if there are any, UnsupportedError is raised,
        unless `drop_connections` is set.
        """
        if memory:
            await self.access.let_go_of_all(drop_connections)
        return await (await self.access.checkpointing()).checkpoint(
            self.access.handle(), name=name, made_by=made_by, memory=memory
        )

    async def pause(self, *, memory: str = "ram", drop_connections: bool = False) -> None:
        """Stop all processes until `resume`.

        With memory="disk", which needs isolation="gvisor", they use no memory while paused. The rules for open
        connections are then those of `checkpoint` with memory.
        """
        if memory not in ("ram", "disk"):
            raise ValueError(f"memory is 'ram' or 'disk', not {memory!r}")
        if memory == "disk":
            await self.access.let_go_of_all(drop_connections)
            await (await self.access.checkpointing()).hibernate(self.access.handle())
        else:
            await (await self._pausable()).pause(self.access.handle())
            self.access.guest.doubt()

    async def resume(self) -> None:
        """Let a paused sandbox continue. May be repeated."""
        pausable, handle = await self._pausable(), self.access.handle()
        seen = await (await self.access.engine()).inspect(handle)
        await pausable.resume(handle)
        if seen.on_disk:
            await run_hook(self.access, "restored")

    async def checkpoints(self) -> list[Checkpoint]:
        """Return all checkpoints of this sandbox, oldest first. Their `parent` fields form a tree."""
        return list(await (await self.access.checkpointing()).checkpoints(self.access.handle()))

    async def delete_checkpoint(self, checkpoint: Checkpoint | str) -> None:
        """Delete a checkpoint; others are not affected. May be repeated."""
        self._undo.changed()
        await (await self.access.checkpointing()).delete_checkpoint(self.access.handle(), id_of(checkpoint))

    async def diff(
        self, old: Checkpoint | str, new: Checkpoint | str | None = None, *, text: bool = False
    ) -> list[Change]:
        """Return the files added, changed and removed between two checkpoints, or since one (`new` None).

        `text` adds unified diffs.
        """
        later = None if new is None else id_of(new)
        return list(await (await self.access.checkpointing()).diff(self.access.handle(), id_of(old), later, text=text))

    async def rollback(self, checkpoint: Checkpoint | str) -> None:
        """Put the sandbox back into the state of a checkpoint. Processes end; the sandbox keeps its id, and its start
        commands run again."""
        async with self._going_back(id_of(checkpoint)):
            await self._start_up()

    async def restart(self) -> None:
        """Put the sandbox back into the state right after its creation. Its setup and start commands
        run again."""
        async with self._going_back(None):
            await setup.set_up(self.access)
            await self._start_up()

    async def undo(self, steps: int = 1) -> Checkpoint:
        """Undo the last commands: go back to the checkpoint made before them. Needs `undo=True`, which makes those."""
        if steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        before = undone_by(await self.checkpoints())
        if len(before) < steps:
            raise CheckpointNotFoundError(
                f"only {len(before)} commands can be taken back",
                hint="Make the sandbox with undo=True; it keeps the states before the last commands.",
            )
        target = before[-steps]
        await self.rollback(target)
        for undone in before[-steps:]:
            await self.delete_checkpoint(undone)
        return target

    async def snapshot(
        self,
        name: str,
        checkpoint: Checkpoint | str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> Snapshot:
        """Save a state under a name. It outlives the sandbox; new ones start from it with image="snapshot:NAME".

        With `memory` (current, or of a checkpoint that has it) the snapshot includes the memory of running processes
        with any secrets in it. The processes continue in sandboxes with the same isolation level and network, on this
        host or another.
        """
        source = None if checkpoint is None else id_of(checkpoint)
        if memory and source is None:
            await self.access.let_go_of_all(drop_connections)
        return await (await self.access.checkpointing()).snapshot(self.access.handle(), name, source, memory=memory)

    async def _pausable(self) -> Pausable:
        engine = await self.access.engine()
        if (pausable := await supporting(engine, Pausable)) is None:
            raise UnsupportedError(f"engine '{engine.name}' cannot pause a sandbox here")
        return pausable

    async def _start_up(self) -> None:
        """Start the start commands and wait until the sandbox is ready."""
        await start_up.start_up(self.access)

    @contextlib.asynccontextmanager
    async def _going_back(self, checkpoint_id: str | None) -> AsyncIterator[None]:
        """Go back to a state, run the hook, and then what the block does. The sandbox goes on if the hook fails, and
        the block runs all the same."""
        engine, handle = await self.access.checkpointing(), self.access.handle()
        self._undo.changed()
        await self.access.let_go()
        await engine.rollback(handle, checkpoint_id)
        await self.access.guest.renewed()
        try:
            await begin(self.access, "rolled-back")
        except StartError:
            yield
            raise
        yield


def id_of(checkpoint: Checkpoint | str) -> str:
    return checkpoint if isinstance(checkpoint, str) else checkpoint.id
