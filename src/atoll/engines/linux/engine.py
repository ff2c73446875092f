"""The base of the engines that make sandboxes from Linux's own means: namespaces, control groups, an overlay file
system and a system call filter.

Theory of operation. A plan is computed from the spec (`plan/sandbox_plan.py`), and a launcher (`launcher.py`) starts
processes according to it, the first of which is the agent. No daemon or other process on the host stays: a sandbox
consists of its first process, a control group, a writable layer, a range of ids and a record, all found by its name.

The mounts are in the sandbox's own mount namespace, so they vanish with its processes. To delete a sandbox, its first
process is killed (the kernel then kills the rest of its PID namespace), its control group is emptied to make sure, and
everything else is removed, the record last.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from atoll import timer, workers
from atoll.archive.work import Progress
from atoll.cancellation import finish
from atoll.engines.contract import ByteStream, EngineDescription, OnImageProgress
from atoll.engines.enforcement import (
    changeable_limits,
    enforceable_defaults,
    refuse_unchangeable,
    refuse_unsupported,
)
from atoll.engines.limit_events import LimitEvents
from atoll.engines.linux.build_operations import BuildOperations
from atoll.engines.linux.checkpoint_operations import CheckpointOperations
from atoll.engines.linux.construction import Construction, first_record
from atoll.engines.linux.launcher import Isolation, Launcher, Launchers
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.observation import Observer
from atoll.engines.linux.prewarm_operations import PrewarmOperations
from atoll.engines.linux.resizing import Resizing
from atoll.engines.linux.restoration import Restoration
from atoll.engines.linux.standstill import Standstill
from atoll.engines.linux.states.checkpoints import Checkpoints
from atoll.engines.linux.states.ready_states import ReadyStates
from atoll.engines.linux.states.saved_state import SavedState
from atoll.engines.linux.states.snapshots import SNAPSHOT, Snapshots
from atoll.engines.linux.states.state_storage import StateStorage
from atoll.engines.linux.states.step_names import STEP
from atoll.engines.linux.states.steps import Steps
from atoll.engines.linux.teardown import Teardown
from atoll.engines.linux.volume_operations import VolumeOperations
from atoll.errors import AgentUnreachableError, SandboxError, SandboxPausedError, UnsupportedError
from atoll.images import Images
from atoll.images.reference import ENVIRONMENTS
from atoll.model import Capability, EffectiveLimits, Handle, ImageProgress, Limits, Observation, SandboxSpec, Stats
from atoll.model.network_policy import NetworkPolicy
from atoll.network.refusals import Refusal
from atoll.waiting import Deadline

if TYPE_CHECKING:
    from atoll.engines.linux.states.snapshot_file import MemoryFormat

_CONNECT_S = 5.0
_RETRY_S = 0.01
_DELETE_S = 30.0
_PAUSE_S = 10.0


class LinuxEngine(BuildOperations, PrewarmOperations, CheckpointOperations, VolumeOperations):
    """Implements `Engine`, `Pausable`, `NetworkPolicies`, `Resizable`, `ImageSource`, `LimitDefaults`, `Balancing`,
    `LimitReporting`, `GarbageCollecting`, `IsolationLevels`, `Building`, `Checkpointing`, `Prewarming` and
    `NamedVolumes`. A subclass adds a name and launchers."""

    name: str
    unsupported: Mapping[Capability, str] = MappingProxyType({})
    """Why some capabilities are missing on this machine, where the reason is known."""

    def __init__(self, layout: SandboxLayout, launchers: Launchers, memory_format: MemoryFormat) -> None:
        self.layout = layout
        self._launchers = launchers
        self._memory_format = memory_format
        self._storage = storage = StateStorage(layout)
        self._checkpoints = Checkpoints(layout, storage)
        self._snapshots = Snapshots(layout, storage)
        self._steps = Steps(layout, storage)
        self._ready = ReadyStates(layout, storage)
        self._teardown = Teardown(layout, storage, self._steps)
        self._construction = Construction(layout, self._checkpoints, self._teardown, self._has_users)
        self._standstill = Standstill(layout)
        self._restoration = Restoration(layout, launchers, self._checkpoints, self._construction, self._teardown)
        self._resizing = Resizing(layout, self._checkpoints)
        self._observer = Observer(
            layout, launchers, self._standstill, self._restoration, self._resizing, self._teardown
        )
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.capabilities = self._capabilities(launchers.isolation)

    # --- the contract ----------------------------------------------------------------------------------------------

    async def describe(self) -> EngineDescription:
        return self._description(self._launchers.isolation)

    async def levels(self) -> Mapping[str, EngineDescription]:
        return {level: self._description(level) for level in self._launchers.levels()}

    def _description(self, isolation: Isolation) -> EngineDescription:
        found = self._capabilities(isolation)
        can = changeable_limits(found)
        return EngineDescription(found, isolation, missing=self.unsupported, changeable_limits=can)

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Handle:
        if spec.prewarm is None:
            return await self._create(sandbox_id, spec, None)
        launcher = self._launchers.choose(spec)
        self._check(spec, launcher)
        return await self._create_prewarmed(sandbox_id, spec, launcher)

    async def _create(
        self, sandbox_id: str, spec: SandboxSpec, source: SavedState | None, ready_key: str = ""
    ) -> Handle:
        launcher = self._launchers.choose(spec)
        self._check(spec, launcher)
        if source is None and spec.image.startswith(SNAPSHOT):
            source = await workers.run(workers.ENGINE, self._snapshots.named, spec.image)
        if source is None and spec.image.startswith(STEP):
            source = await workers.run(workers.ENGINE, self._steps.named, spec.image)
        if source is None and spec.image in ENVIRONMENTS:
            await self.layout.images.ensure(spec.image)  # a build takes longer than a creation may
        record = first_record(sandbox_id, spec, launcher.name, self._defaults(spec), source, ready_key)
        record = await self._construction.make(record, launcher, source)
        self._watch(record)
        return self._handle(record)

    def _check(self, spec: SandboxSpec, launcher: Launcher) -> None:
        """Raise UnsupportedError for a limit or feature that cannot be enforced, and EngineUnavailableError if the
        launcher cannot work."""
        title = self.name if launcher.name == self.name else f"{self.name}' with '{launcher.name}"
        refuse_unsupported(
            title,
            self._capabilities(launcher.isolation),
            spec,
            self.unsupported,
            saves_memory=launcher.memory is not None,
        )
        launcher.check()

    async def connect(self, handle: Handle) -> ByteStream:
        deadline, sandbox_id = Deadline.after(_CONNECT_S), handle.sandbox_id
        launcher = self._launchers.of_handle(handle.details)
        if handle.spec.network != "none":
            await workers.run(workers.ENGINE, self.layout.gateway.ensure)
        if not launcher.connects_late:
            await self._observer.need_existing(sandbox_id)
        while True:
            try:
                return await launcher.connect(sandbox_id, deadline)
            except OSError as error:
                await self._observer.need_existing(sandbox_id)
                # The agent's socket is closed although the sandbox is not dead yet, so it is about to end. Retry until
                # it has, because `need_existing` then reports the cause.
                if not isinstance(error, ConnectionRefusedError | FileNotFoundError) or not deadline.left():
                    raise AgentUnreachableError(
                        f"the agent of sandbox '{sandbox_id}' cannot be reached: {error}"
                    ) from error
                await asyncio.sleep(_RETRY_S)

    async def inspect(self, handle: Handle) -> Observation:
        return await self._observer.observe(handle.sandbox_id)

    async def list(self) -> list[Handle]:
        return [*await workers.run(workers.ENGINE, self._found_all)]

    async def stats(self, handle: Handle) -> Stats:
        seen = self.layout.group(handle.sandbox_id).stats()
        record = self.layout.records.read(handle.sandbox_id)
        disk = await workers.run(workers.ENGINE, self._disk, handle.sandbox_id, record) if record is not None else None
        return Stats(seen.memory_bytes, seen.cpu_s, seen.pids, disk)

    def _disk(self, sandbox_id: str, record: Record) -> int | None:
        """Return the bytes that count against the disk limit or, without a limit, the size of the sandbox's files."""
        counted = self.layout.layers.account_usage(sandbox_id)
        if counted is not None:
            return counted + record.origin_bytes
        used = self.layout.layers.usage(sandbox_id)
        return None if used is None else used + record.inherited_bytes

    async def delete(self, handle: Handle) -> None:
        watcher = self._watchers.pop(handle.sandbox_id, None)
        if watcher is not None:
            watcher.cancel()
        self._launchers.forget(handle.sandbox_id)
        await finish(self._teardown.erase(handle.sandbox_id, Deadline.after(_DELETE_S)))
        self._launchers.rest()

    async def aclose(self) -> None:
        """Stop watching lifetimes, and unmount the storage pool if it is empty. Sandboxes go on."""
        watchers, self._watchers = list(self._watchers.values()), {}
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await self._launchers.aclose()
        try:
            await workers.run(workers.ENGINE, self.layout.close)
        except workers.NoThreadError:  # the interpreter is shutting down
            self.layout.close()

    # --- pausing, and more -----------------------------------------------------------------------------------------

    async def pause(self, handle: Handle) -> None:
        async with self._alone_with_launcher(handle) as launcher:
            await launcher.pause(handle.sandbox_id, Deadline.after(_PAUSE_S))

    async def resume(self, handle: Handle) -> None:
        record = self.layout.records.read(handle.sandbox_id)
        if record is not None and record.asleep:
            await self._wake_up(handle)
            return
        async with self._alone_with_launcher(handle) as launcher:
            await launcher.resume(handle.sandbox_id, Deadline.after(_PAUSE_S))

    @asynccontextmanager
    async def _alone_with_launcher(self, handle: Handle) -> AsyncIterator[Launcher]:
        if Capability.PAUSE not in self.capabilities:
            why = self.unsupported.get(Capability.PAUSE)
            raise UnsupportedError(f"engine '{self.name}' cannot pause sandboxes here{f': {why}' if why else ''}")
        await self._observer.need_existing(handle.sandbox_id)
        async with self.layout.exclusion.alone(handle.sandbox_id):
            record = self._observer.record(handle.sandbox_id, living=True)
            async with self._observer.explaining_end(record):
                yield self._launchers.named(record.runtime)

    async def set_network(self, handle: Handle, policy: NetworkPolicy) -> None:
        async with self.layout.exclusion.alone(handle.sandbox_id):
            record = self._observer.record(handle.sandbox_id)
            spec = record.spec.model_copy(update={"network": policy})
            self._check(spec, self._launchers.named(record.runtime))
            self.layout.gateway.need_authority(handle.sandbox_id, policy)
            await finish(self._replace_network(record, record.model_copy(update={"spec": spec}), policy))

    async def _replace_network(self, record: Record, changed: Record, policy: NetworkPolicy) -> None:
        self.layout.records.write(changed)
        try:
            await self._change_network(changed, policy)
        except BaseException:
            self.layout.records.write(record)
            raise

    async def _change_network(self, record: Record, policy: NetworkPolicy) -> None:
        if await workers.run(workers.ENGINE, self.layout.gateway.change, record.sandbox_id, policy):
            return
        if policy == "none" or not record.is_alive():
            return  # no link is needed, or the sandbox gets one when it is started again
        if not self._launchers.named(record.runtime).connects_late:
            raise UnsupportedError(
                "this sandbox was made without a network, and its own kernel cannot get one while it runs",
                hint="Make it with network={}, which allows nothing, and change the policy later.",
            )
        assert record.init is not None
        await self._construction.connect(record, record.init)

    async def refusals(self, handle: Handle) -> Sequence[Refusal]:
        return await workers.run(workers.ENGINE, self.layout.gateway.refusals, handle.sandbox_id)

    async def limit_events(self, handle: Handle, *, killed: bool = False) -> LimitEvents:
        events = self.layout.group(handle.sandbox_id).events()
        limited = handle.limits().limits.disk_bytes is not None
        full = (limited and self.layout.layers.is_full(handle.sandbox_id)) or any(
            not volume.read_only and self.layout.volumes.is_full(handle.spec.owner, volume.name)
            for volume in handle.spec.named_volumes
        )
        return dataclasses.replace(events, disk_full=True) if full else events

    async def set_limits(self, handle: Handle, limits: Limits) -> Handle:
        await self._observer.need_existing(handle.sandbox_id)
        async with self.layout.exclusion.alone(handle.sandbox_id):
            record = self._observer.record(handle.sandbox_id)
            self._check_changeable(record, limits)
            if record.asleep:
                reason = f"sandbox '{record.sandbox_id}' is paused and its memory is on disk, so its limits are fixed"
                raise SandboxPausedError(reason, hint="Resume it first.")
            record = self._observer.record(handle.sandbox_id, living=True)
            return self._handle(await finish(self._resizing.change(record, limits)))

    def _check_changeable(self, record: Record, limits: Limits) -> None:
        """Raise UnsupportedError for limits that cannot be enforced for this sandbox, or not be changed."""
        launcher = self._launchers.named(record.runtime)
        available = self._capabilities(launcher.isolation)
        spec = record.spec.model_copy(update={"limits": limits})
        refuse_unchangeable(self.name, changeable_limits(available), limits)
        can_save = launcher.memory is not None
        refuse_unsupported(self.name, available, spec, self.unsupported, saves_memory=can_save)

    @property
    def images(self) -> Images:
        return self.layout.images

    async def ensure_image(self, image: str, on_progress: OnImageProgress | None = None) -> None:
        def report(step: Progress) -> None:
            if on_progress is not None:
                counted = ImageProgress(
                    step.stage, step.detail, step.done_bytes, step.total_bytes, step.step, step.steps
                )
                on_progress(counted)

        await self.layout.images.ensure(image, report)

    async def gc(self, *, shared: bool = True) -> Sequence[str]:
        """Remove what belongs to no sandbox, and sandboxes whose maker died before they ran. Return descriptions of
        what was removed."""
        removed = await finish(self._teardown.collect(Deadline.after(_DELETE_S)))
        removed += await finish(workers.run(workers.ENGINE, self._ready.collect))
        if shared:
            removed += await finish(self._teardown.collect_shared())
        return removed

    # --- its parts -------------------------------------------------------------------------------------------------

    async def default_limits(self, spec: SandboxSpec) -> EffectiveLimits:
        return self._defaults(spec)

    async def shared_ceilings(self) -> tuple[str, ...]:
        return self.layout.accounts.enforced()

    async def balance(self) -> None:
        await workers.run(workers.ENGINE, self.layout.accounts.balance)

    def _defaults(self, spec: SandboxSpec) -> EffectiveLimits:
        capabilities = self._capabilities(spec.isolation or self._launchers.isolation)
        return enforceable_defaults(self.layout.settings.resources.sandbox, capabilities, spec.limits)

    def _watch(self, record: Record) -> None:
        if record.expires_at is None:
            return
        task = asyncio.create_task(self._expire_later(record), name=f"lifetime of {record.sandbox_id}")
        self._watchers[record.sandbox_id] = task
        task.add_done_callback(lambda _: self._watchers.pop(record.sandbox_id, None))

    async def _expire_later(self, record: Record) -> None:
        while (left := record.left_s()) > 0:
            await timer.sleep(left)
        with suppress(SandboxError, OSError):
            async with self.layout.exclusion.alone(record.sandbox_id):
                # The sandbox may have been restarted since, with another first process but the same end of life.
                record = self.layout.records.read(record.sandbox_id) or record
                await finish(self._teardown.expire(record))

    def _found_all(self) -> Sequence[Handle]:
        found = []
        for sandbox_id in self.layout.records.ids():
            record = self.layout.records.read(sandbox_id)
            if record is None:
                # It is half made or half deleted. All that is known is that it exists and can be deleted.
                damaged = {"damaged": "it has no readable record"}
                found.append(Handle(self.name, sandbox_id, SandboxSpec(), 0.0, damaged))
            elif self._launchers.has(record.runtime):
                found.append(self._handle(record))
        return found

    def _handle(self, record: Record) -> Handle:
        details = {
            **self._launchers.named(record.runtime).handle_details,
            **record.limit_details(),
            **record.image_details(),
            **record.prewarm_details(),
        }
        return Handle(self.name, record.sandbox_id, record.spec, record.created_at, details)

    def _has_users(self, runtime: str) -> bool:
        """Return whether sandboxes of this launcher have other users inside than the one who runs everything."""
        return Capability.USERS in self._capabilities(self._launchers.named(runtime).isolation)

    def _capabilities(self, isolation: Isolation) -> frozenset[Capability]:
        """Return the capabilities of sandboxes of this isolation level on this machine."""
        return self.layout.capabilities() - self._launchers.lacks(isolation)
