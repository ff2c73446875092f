"""The checkpoints that `undo` goes back to: one before each command that the rule covers, and only the last ones."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from atoll.model.checkpoint import Checkpoint, Undo
from atoll.sandbox.execution import CommandLine
from atoll.sandbox.sandbox_access import SandboxAccess

_MADE_BY = "before: "
"""What `made_by` of these checkpoints begins with."""
_SHOWN = 200
"""How much of a command line `made_by` has."""


class UndoHistory:
    """Without a rule nothing is kept."""

    def __init__(self, rule: Undo | None) -> None:
        self.rule = rule
        self._kept: list[str] | None = None
        """The ids of the checkpoints, oldest first, once they were looked up."""

    async def before(self, access: SandboxAccess, command: CommandLine) -> None:
        """Keep the state before this command."""
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
        """Somebody else may have made or deleted checkpoints: they are looked up again."""
        self._kept = None


def undone_by(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those of all checkpoints that `undo` goes back to, in the same order."""
    return [each for each in checkpoints if each.made_by.startswith(_MADE_BY)]
