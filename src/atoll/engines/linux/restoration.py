"""Starts an existing sandbox again, from a saved state or from its memory on disk.

The target of a rollback is written to the record first. Before that nothing has happened. After that, if this process
dies, the next observer of the sandbox completes the rollback.
"""

from __future__ import annotations

from contextlib import suppress

from atoll import workers
from atoll.archive import tree
from atoll.cancellation import finish
from atoll.engines.host import exclusion, process_ref
from atoll.engines.host.sandbox_record import Ended
from atoll.engines.linux.construction import Construction
from atoll.engines.linux.launcher import Launcher, Launchers
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.states.checkpoints import Checkpoints, Dump
from atoll.engines.linux.teardown import Teardown
from atoll.errors import CheckpointNotFoundError
from atoll.model import Cause
from atoll.waiting import Deadline

_STOP_S = 30.0
_AS_IT_IS = "as it is"
"""The value of `Record.restoring` while a sandbox wakes up. It names no saved state; the layer stays as it is."""


class Restoration:
    def __init__(
        self,
        layout: SandboxLayout,
        launchers: Launchers,
        checkpoints: Checkpoints,
        construction: Construction,
        teardown: Teardown,
    ) -> None:
        self._layout = layout
        self._launchers = launchers
        self._checkpoints = checkpoints
        self._construction = construction
        self._teardown = teardown

    async def restore(self, record: Record, target: str | None, position: str | None) -> Record:
        """End the sandbox, give it the files of a saved state (None: an empty layer), and start it again. The caller
        must hold the lock of the sandbox."""
        launcher = self._usable(record)
        restored = self._going_back(record, target, position)
        sandbox_id = record.sandbox_id
        replacement = await workers.run(
            workers.ENGINE, self._layout.layers.replace_layer, sandbox_id, restored.layer_limit_bytes(), target
        )
        try:
            try:
                self._layout.records.write(restored)
                self._layout.records.go_to(sandbox_id, position)
            except FileNotFoundError:
                raise exclusion.deleted(sandbox_id) from None
            self._launchers.forget(sandbox_id)
            await self._teardown.stop(sandbox_id, record, Deadline.after(_STOP_S))
            await workers.run(workers.ENGINE, replacement.commit)
        finally:
            await workers.run(workers.ENGINE, replacement.discard)
        try:
            self._layout.exclusion.refuse_deleted(sandbox_id)
            return await self._construction.launch(restored, launcher)
        except Exception as error:
            ended = Ended(cause=Cause.LOST, reason=f"it could not be started again: {error}")
            # Keep `restoring`. Without it, the record would look like that of a sandbox that was never made.
            with suppress(OSError):
                self._layout.records.write(restored.model_copy(update={"ended": ended}))
            raise
        finally:
            # `replace_layer` left some room for the start, however full the account is. Set the real limit now.
            await workers.run(workers.ENGINE, self._checkpoints.set_limit, restored)

    def _going_back(self, record: Record, target: str | None, position: str | None) -> Record:
        saved = self._checkpoints.state(target) if target else None
        if target and saved is None:
            raise CheckpointNotFoundError(f"the state '{target}' is gone")
        return record.model_copy(
            update={
                "init": None,
                "ended": None,
                "restoring": target or "",
                "position": position,
                "inherited_bytes": saved.size_bytes if saved is not None else 0,
                "memory": saved.id if saved is not None and saved.memory else None,
                "asleep": False,
                "creator": process_ref.this_process(),
                "boot_id": process_ref.boot_id(),
            }
        )

    async def completed(self, record: Record) -> Record:
        """Complete a rollback whose process died or gave up. Return the record, unchanged if there is nothing to
        complete or if another process is working on the sandbox."""
        if record.restoring is None or record.ended is not None or not record.is_of_this_boot():
            return record
        layout, sandbox_id = self._layout, record.sandbox_id
        with layout.exclusion.at_once(sandbox_id) as mine:
            record = layout.records.read(sandbox_id) or record
            if not mine or record.restoring is None or layout.exclusion.is_being_deleted(sandbox_id):
                return record
            return await finish(self.restore(record, record.restoring or None, record.position))

    async def sleep(self, record: Record, dump: Dump) -> None:
        """Save the memory of the sandbox to disk and end its processes. If saving fails, the sandbox goes on."""
        memory = self._layout.memory(record.sandbox_id)
        await workers.run(workers.ENGINE, tree.remove, memory)
        async with dump(memory):
            # From here on the state of the sandbox is the memory on disk.
            asleep = record.model_copy(update={"init": None, "asleep": True})
            self._layout.records.write(asleep)
            await self._teardown.stop(record.sandbox_id, record, Deadline.after(_STOP_S))

    async def wake(self, record: Record) -> None:
        launcher = self._usable(record)
        waking = record.model_copy(
            update={"memory": record.sandbox_id, "restoring": _AS_IT_IS, "creator": process_ref.this_process()}
        )
        await self._teardown.stop(record.sandbox_id, record, Deadline.after(_STOP_S))  # remains of an earlier attempt
        await self._construction.launch(waking, launcher)
        await workers.run(workers.ENGINE, tree.remove, self._layout.memory(record.sandbox_id))

    def _usable(self, record: Record) -> Launcher:
        launcher = self._launchers.named(record.runtime)
        launcher.check()
        return launcher
