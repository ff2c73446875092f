"""The `oci` engine.

Theory of operation. From a spec a plan is made (`plan.py`); `atoll-mount` makes the sandbox's file tree and becomes
the runtime, which starts the agent with a listening socket of ours as descriptor 3. No daemon and no process of ours
stays: the sandbox is its first process, a control group, a layer, a range of ids and a record, all found by its
name.

The mounts live in the sandbox's own mount namespace, so they go when its processes go. Deleting is: kill the first
process (the kernel takes the rest of its PID namespace with it), make sure by the control group, then remove what is
left, the record last.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from atoll import timer, workers
from atoll.engines.availability import Availability
from atoll.engines.base import (
    LATER,
    ByteStream,
    LimitEvents,
    OnImageProgress,
    enforceable_defaults,
    refuse_unsupported,
)
from atoll.engines.linux.cgroups import Hierarchy
from atoll.engines.linux.oci import links, runtimes
from atoll.engines.linux.oci.building import Builder
from atoll.engines.linux.oci.checkpoints import SNAPSHOT, Checkpoints
from atoll.engines.linux.oci.ending import Ending
from atoll.engines.linux.oci.pausing import Pausing
from atoll.engines.linux.oci.places import Places
from atoll.engines.linux.oci.record import Record
from atoll.engines.linux.oci.runtimes import Isolation, Runtime
from atoll.engines.linux.oci.saved import Saved
from atoll.engines.linux.oci.saving import Saving, ourselves
from atoll.engines.linux.oci.streams import Streams
from atoll.engines.linux.plan import CgroupLimits
from atoll.engines.local import exclusion, processes, sockets
from atoll.engines.local.processes import ProcessRef
from atoll.engines.local.waiting import Deadline, finish
from atoll.errors import (
    AgentUnreachableError,
    EngineError,
    EngineUnavailableError,
    SandboxError,
    SandboxGoneError,
    UnsupportedError,
)
from atoll.images.work import Progress
from atoll.model import (
    Capability,
    Cause,
    EffectiveLimits,
    Handle,
    ImageProgress,
    Limits,
    Observation,
    SandboxSpec,
    State,
    Stats,
)
from atoll.network import client as network
from atoll.network.policy import NetworkPolicy
from atoll.network.refusals import Refusal
from atoll.settings import Settings

_CREATE_S = 30.0
_CONNECT_S = 5.0
_BRIDGE_S = 30.0
_RETRY_S = 0.01
_DELETE_S = 30.0
_PAUSE_S = 10.0
_DYING_S = 2.0


class OciEngine(Saving):
    """An `Engine`, `Pausable`, `LimitReporting` and `Collecting`.

    `runtime` names the one to use for specs that ask for its kind of isolation or for none in particular.
    """

    name = "oci"

    def __init__(self, settings: Settings, runtime: str | None = None) -> None:
        self._settings = settings
        self._runtime = runtime
        self._places = self._find_places(settings)
        self._builder = Builder(self._places)
        self._checkpoints = Checkpoints(self._places)
        self._ending = Ending(self._places, self._checkpoints)
        self._streams = Streams(self._places)
        self._pausing = Pausing(self._places)
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._isolation: Isolation = runtimes.isolation_of(runtime) if runtime is not None else "namespaces"
        self.capabilities = _capabilities(self._places, self._isolation)

    @classmethod
    def probe(cls, settings: Settings, *, thorough: bool) -> Availability:
        """Whether it can work here. `thorough` makes a sandbox for real."""
        problems = _problems(settings)
        if problems:
            return Availability(cls.name, False, tuple(problems), tuple(problems.values()))
        runtime = runtimes.find("namespaces", settings.data_dir)
        if thorough:
            try:
                asyncio.run(_try_out(cls(settings)))
            except SandboxError as error:
                return Availability(cls.name, False, (error.reason,), ((error.hint,) if error.hint else ()))
        return Availability(cls.name, True, (f"runtime {runtime.name} at {runtime.program}",))

    # --- the contract ----------------------------------------------------------------------------------------------

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Handle:
        return await self._create(sandbox_id, spec, None)

    async def _create(self, sandbox_id: str, spec: SandboxSpec, source: Saved | None) -> Handle:
        runtime = self._checked(spec)
        if source is None and spec.image.startswith(SNAPSHOT):
            source = await workers.run(workers.ENGINE, self._checkpoints.snapshot_named, spec.image)
        record = self._first_record(sandbox_id, spec, runtime, source)
        lock = self._places.records.begin(record)
        try:
            if source is not None:
                await finish(workers.run(workers.ENGINE, self._checkpoints.begin_with, sandbox_id, source))
            record = await self._launch(record, runtime)
        except BaseException as error:
            unwanted = self._places.exclusion.is_being_deleted(sandbox_id)
            await self._undo(sandbox_id, error)
            if unwanted and isinstance(error, Exception):
                raise exclusion.deleted(sandbox_id) from error
            if isinstance(error, OSError | RuntimeError) and not isinstance(error, SandboxError):
                raise EngineError(f"the sandbox could not be made: {error}") from error
            raise
        finally:
            os.close(lock)
        self._watch(record)
        return self._handle(record)

    def _checked(self, spec: SandboxSpec) -> Runtime:
        """The runtime for it. Raises for what cannot be enforced."""
        runtime = self._choose(spec)
        refuse_unsupported(f"{self.name}' with '{runtime.name}", _capabilities(self._places, runtime.isolation), spec)
        return runtime

    async def _launch(self, record: Record, runtime: Runtime) -> Record:
        """Make what the record says. Returns it complete, as it is written down."""
        deadline = Deadline.after(_CREATE_S)
        async with self._places.group_lock.claimed(deadline):
            built = await self._builder.build(record, runtime, deadline)
        record = record.model_copy(update={"init": built.init, "restoring": None, "memory": None, "asleep": False})
        if not runtime.virtual_kernel:
            await self._link(record, built.init)
        self._streams.put(record.sandbox_id, built.stream)
        self._places.records.write(record)
        self._ending.settle(record.sandbox_id)
        return record

    async def _link(self, record: Record, init: ProcessRef) -> None:
        if record.spec.network != "none":
            await finish(workers.run(workers.ENGINE, links.attach, self._places.gateway, record, init))

    async def connect(self, handle: Handle) -> ByteStream:
        deadline = Deadline.after(_CONNECT_S)
        if handle.spec.network != "none":
            await workers.run(workers.ENGINE, self._places.gateway.ensure)
        while True:
            try:
                if handle.details.get("isolation", "namespaces") != "namespaces":
                    await self._existing(handle)
                    return await self._bridge(handle)
                return await sockets.connect(self._places.socket(handle.sandbox_id), deadline)
            except OSError as error:
                await self._existing(handle)
                # Its socket is closed but it is not dead yet: it is just ending, and then we know why.
                if not isinstance(error, ConnectionRefusedError | FileNotFoundError) or not deadline.left():
                    raise AgentUnreachableError(
                        f"the agent of sandbox '{handle.sandbox_id}' cannot be reached: {error}"
                    ) from error
                await asyncio.sleep(_RETRY_S)

    async def _bridge(self, handle: Handle) -> ByteStream:
        """Not while its memory is being saved, which would then hold one end of a bridge that nobody can restore."""
        try:
            async with self._places.exclusion.alone(handle.sandbox_id, _BRIDGE_S):
                return await self._streams.get(handle.sandbox_id, self._runtime_of(handle))
        except EngineUnavailableError:
            raise
        except EngineError as error:
            raise AgentUnreachableError(
                f"the agent of sandbox '{handle.sandbox_id}' cannot be reached: {error.reason}"
            ) from error

    async def inspect(self, handle: Handle) -> Observation:
        places, sandbox_id = self._places, handle.sandbox_id
        while True:
            record = places.records.read(sandbox_id)
            if places.exclusion.is_being_deleted(sandbox_id):
                return Observation(State.STOPPED, Cause.USER, "it is being deleted")
            if record is None:
                if places.records.exists(sandbox_id):
                    return Observation(State.STOPPED, Cause.LOST, "its record is missing or damaged")
                return Observation(State.MISSING, Cause.USER, "it has been deleted or never existed")
            if record.asleep and record.ended is None:
                return Observation(State.PAUSED, None, "its memory is on the disk")
            record = await self._completed(record)
            if record.ended is None and (record.restoring is not None or record.is_being_made()):
                return Observation(State.STARTING)
            if record.is_alive():
                return await self._observe_living(record)
            ended = record.ended or self._ending.explain(record)
            if ended is not None:  # else somebody has started it again since we read its record
                return Observation(State.STOPPED, ended.cause, ended.reason)

    async def _observe_living(self, record: Record) -> Observation:
        if record.left_s() <= 0:
            with self._places.exclusion.at_once(record.sandbox_id) as mine:
                if mine and (ended := (await self._ending.expire(record)).ended) is not None:
                    return Observation(State.STOPPED, ended.cause, ended.reason)
        if self._pausing.is_abandoned(record.sandbox_id):
            await self._unfreeze(record)
        stands = self._pausing.is_paused(record.sandbox_id) and not self._pausing.is_held(record.sandbox_id)
        return Observation(State.PAUSED if stands else State.RUNNING)

    async def list(self) -> list[Handle]:
        return [*await workers.run(workers.ENGINE, self._found_all)]

    async def stats(self, handle: Handle) -> Stats:
        seen = self._places.group(handle.sandbox_id).stats()
        record = self._places.records.read(handle.sandbox_id)
        disk = await workers.run(workers.ENGINE, self._disk, handle.sandbox_id, record) if record is not None else None
        return Stats(seen.memory_bytes, seen.cpu_s, seen.pids, disk)

    def _disk(self, sandbox_id: str, record: Record) -> int | None:
        """All that counts against its limit; without one what its files take."""
        counted = self._places.layers.account_usage(sandbox_id)
        if counted is not None:
            return counted + record.origin_bytes
        used = self._places.layers.usage(sandbox_id)
        return None if used is None else used + record.inherited_bytes

    async def delete(self, handle: Handle) -> None:
        watcher = self._watchers.pop(handle.sandbox_id, None)
        if watcher is not None:
            watcher.cancel()
        self._streams.drop(handle.sandbox_id)
        await finish(self._ending.erase(handle.sandbox_id, Deadline.after(_DELETE_S)))

    async def aclose(self) -> None:
        """Stop watching, and unmount a pool that holds nothing. Sandboxes go on."""
        watchers, self._watchers = list(self._watchers.values()), {}
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await self._streams.aclose()
        try:
            await workers.run(workers.ENGINE, self._places.close)
        except RuntimeError:  # the program is ending, and starts no threads any more
            self._places.close()

    # --- pausing, and more -----------------------------------------------------------------------------------------

    async def pause(self, handle: Handle) -> None:
        await self._existing(handle)
        async with self._alone(handle.sandbox_id):
            async with self._explained(self._living(handle)):
                await self._pausing.pause(handle.sandbox_id, self._runtime_of(handle), Deadline.after(_PAUSE_S))

    async def resume(self, handle: Handle) -> None:
        record = self._places.records.read(handle.sandbox_id)
        if record is not None and record.asleep:
            await self._wake_up(handle)
            return
        await self._existing(handle)
        async with self._alone(handle.sandbox_id):
            async with self._explained(self._living(handle)):
                await self._pausing.resume(handle.sandbox_id, self._runtime_of(handle), Deadline.after(_PAUSE_S))

    async def set_network(self, handle: Handle, policy: NetworkPolicy) -> None:
        async with self._alone(handle.sandbox_id):
            record = self._record(handle)
            spec = record.spec.model_copy(update={"network": policy})
            self._checked(spec)
            self._places.gateway.need_authority(handle.sandbox_id, policy)
            changed = record.model_copy(update={"spec": spec})
            self._places.records.write(changed)
            try:
                await finish(self._change_network(changed, policy))
            except BaseException:
                self._places.records.write(record)
                raise

    async def _change_network(self, record: Record, policy: NetworkPolicy) -> None:
        if await workers.run(workers.ENGINE, self._places.gateway.change, record.sandbox_id, policy):
            return
        if policy == "none" or not record.is_alive():
            return  # it has no link, or gets one when it is started again
        if runtimes.is_virtual(record.runtime):
            raise UnsupportedError(
                "this sandbox was made without a network, and its own kernel takes none while it runs",
                hint="Make it with network={}, which reaches nothing, and open it later.",
            )
        assert record.init is not None
        await self._link(record, record.init)

    async def refusals(self, handle: Handle) -> Sequence[Refusal]:
        return await workers.run(workers.ENGINE, self._places.gateway.refusals, handle.sandbox_id)

    async def limit_events(self, handle: Handle, *, killed: bool = False) -> LimitEvents:
        events = self._places.group(handle.sandbox_id).events()
        if handle.limits().limits.disk_bytes is None:
            return events
        return dataclasses.replace(events, disk_full=self._places.layers.is_full(handle.sandbox_id))

    async def set_limits(self, handle: Handle, limits: Limits) -> None:
        await self._existing(handle)
        async with self._alone(handle.sandbox_id):
            self._limit(handle, limits)

    def _limit(self, handle: Handle, limits: Limits) -> None:
        record = self._living(handle)
        old = record.spec.limits
        for name in Limits.model_fields:
            if getattr(old, name) not in ((None, getattr(limits, name)) if name in LATER else (getattr(limits, name),)):
                raise UnsupportedError(f"the limit '{name}' of a sandbox that runs cannot be changed")
        spec = record.spec.model_copy(update={"limits": limits})
        isolation = handle.details.get("isolation", "namespaces")
        refuse_unsupported(self.name, _capabilities(self._places, cast(Isolation, isolation)), spec)
        try:
            self._places.group(handle.sandbox_id).limit(CgroupLimits.of(limits.over(record.defaults)))
            self._places.records.write(record.model_copy(update={"spec": spec}))
        except OSError as error:
            raise EngineError(f"the limits of sandbox '{handle.sandbox_id}' cannot be set: {error}") from error

    async def ensure_image(self, image: str, on_progress: OnImageProgress | None = None) -> None:
        def report(step: Progress) -> None:
            if on_progress is not None:
                on_progress(ImageProgress(step.stage, step.detail, step.done_bytes, step.total_bytes))

        await self._places.images.ensure(image, report)

    async def gc(self, *, shared: bool = True) -> Sequence[str]:
        """Remove what belongs to no sandbox, or to one whose maker died. Says what it removed."""
        removed = await finish(self._ending.collect(Deadline.after(_DELETE_S)))
        if shared:
            removed += await finish(self._ending.collect_shared())
        return removed

    # --- its parts -------------------------------------------------------------------------------------------------

    def _find_places(self, settings: Settings) -> Places:
        return Places(settings, Hierarchy.find())

    def _choose(self, spec: SandboxSpec) -> Runtime:
        problems = _problems(self._settings, needs_runtime=False)
        if problems:
            reason, hint = next(iter(problems.items()))
            raise EngineUnavailableError(reason, hint=hint)
        isolation = spec.isolation or self._isolation
        return runtimes.find(
            isolation, self._settings.data_dir, self._runtime if isolation == self._isolation else None
        )

    def _runtime_of(self, handle: Handle) -> Runtime:
        return self._runtime_named(handle.details.get("runtime", self.name))

    def _runtime_named(self, name: str) -> Runtime:
        program = runtimes.locate(name, self._settings.data_dir)
        if program is None:
            raise EngineUnavailableError(f"{name} is no longer installed")
        return Runtime(name, program)

    async def default_limits(self, spec: SandboxSpec) -> EffectiveLimits:
        return self._defaults(spec)

    async def shared_ceilings(self) -> tuple[str, ...]:
        return self._places.accounts.enforced()

    async def balance(self) -> None:
        await workers.run(workers.ENGINE, self._places.accounts.balance)

    def _defaults(self, spec: SandboxSpec) -> EffectiveLimits:
        isolation = spec.isolation or self._isolation
        plain = isolation == self._isolation
        capabilities = self.capabilities if plain else _capabilities(self._places, isolation)
        return enforceable_defaults(self._settings.resources.sandbox, capabilities, spec.limits)

    def _first_record(self, sandbox_id: str, spec: SandboxSpec, runtime: Runtime, source: Saved | None) -> Record:
        creator = ourselves(os.getpid())
        now, lifetime = time.time(), spec.limits.lifetime_s
        defaults = self._defaults(spec)
        return Record(
            sandbox_id=sandbox_id,
            spec=spec,
            defaults=defaults.limits,
            left_out=defaults.left_out,
            account=spec.account,
            runtime=runtime.name,
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
            expires_now=None if lifetime is None else time.clock_gettime(time.CLOCK_BOOTTIME) + lifetime,
            boot_id=processes.boot_id(),
            creator=creator,
            origin=source.id if source is not None else None,
            base=source.base if source is not None else None,
            inherited_bytes=source.size_bytes if source is not None else 0,
            origin_bytes=source.size_bytes if source is not None else 0,
            memory=source.id if source is not None and source.memory and source.runtime == runtime.name else None,
        )

    async def _undo(self, sandbox_id: str, error: BaseException) -> None:
        try:
            await finish(self._ending.erase_held(sandbox_id, Deadline.after(_DELETE_S)))
        except Exception as leftover:  # the first error is the one to tell; `gc` finds what is left
            error.add_note(f"and cleaning up failed: {leftover}")

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
            async with self._alone(record.sandbox_id):
                # It may have been started again since, which gives it another first process but no other end.
                record = self._places.records.read(record.sandbox_id) or record
                await finish(self._ending.expire(record))

    async def _existing(self, handle: Handle) -> None:
        seen = await self.inspect(handle)
        if seen.state in (State.STOPPED, State.MISSING):
            cause = seen.cause.value if seen.cause else "unknown"
            raise SandboxGoneError(f"sandbox '{handle.sandbox_id}' has ended: {seen.reason}", cause=cause)

    async def _wait_for_end(self, handle: Handle) -> None:
        """A socket refuses when nobody listens any more: the agent is just dying, which takes a moment."""
        record = self._places.records.read(handle.sandbox_id)
        if record is not None and record.init is not None and record.is_of_this_boot():
            await processes.wait({record.init}, Deadline.after(_DYING_S))

    def _is_ours(self, record: Record) -> bool:
        """The `native` engine keeps its records in the same place: ids and layers must not be given out twice."""
        return record.runtime != "native"

    def _found_all(self) -> Sequence[Handle]:
        found = []
        for sandbox_id in self._places.records.ids():
            record = self._places.records.read(sandbox_id)
            if record is None:
                # Half made or half deleted: nothing is known but that it exists and can be deleted.
                damaged = {"damaged": "it has no readable record"}
                found.append(Handle(self.name, sandbox_id, SandboxSpec(), 0.0, damaged))
            elif self._is_ours(record):
                found.append(self._handle(record))
        return found

    def _handle(self, record: Record) -> Handle:
        isolation = runtimes.isolation_of(record.runtime)
        return Handle(
            self.name,
            record.sandbox_id,
            record.spec,
            record.created_at,
            {"runtime": record.runtime, "isolation": isolation, **record.limit_details()},
        )


def _capabilities(places: Places, isolation: Isolation) -> frozenset[Capability]:
    found = {Capability.OPEN_FILES, Capability.VOLUMES, Capability.IMAGES, Capability.USERS, Capability.ISOLATION}
    controllers = places.hierarchy.controllers if places.hierarchy.writable() else {}
    for controller, capability in (
        ("memory", Capability.MEMORY),
        ("cpu", Capability.CPUS),
        ("pids", Capability.PIDS),
        ("freezer", Capability.PAUSE),
    ):
        if controller in controllers:
            found.add(capability)
    if isolation != "namespaces":
        found.discard(Capability.PIDS)  # see `for_virtual_kernel`
    if network.problem() is None and isolation != "vm":
        found.add(Capability.NETWORK)
    if places.layers.enforces_disk:
        found.add(Capability.DISK)
    if places.layers.can_save:
        found.add(Capability.CHECKPOINTS)
    return frozenset(found)


def _problems(settings: Settings, *, needs_runtime: bool = True) -> dict[str, str]:
    """Reason → what to do about it."""
    found = {}
    if platform.system() != "Linux":
        return {"it needs Linux": "Use engine 'docker'."}
    if os.geteuid() != 0:
        found["it needs root"] = "Run as root, or choose engine 'process'."
    for program in ("atoll-mount", "atoll-agent"):
        if not os.access(Path(__file__).parents[3] / "bin" / program, os.X_OK):
            found[f"the program '{program}' is missing"] = (
                "In a working copy run 'make agent'; otherwise install the package again."
            )
    if needs_runtime and all(
        runtimes.locate(name, settings.data_dir) is None for name in runtimes.BY_ISOLATION["namespaces"]
    ):
        found["neither runc nor crun is installed"] = "Run 'apt-get install runc'."
    return found


async def _try_out(engine: OciEngine) -> None:
    handle = await engine.create(f"probe-{os.urandom(6).hex()}", SandboxSpec())
    await engine.delete(handle)
    await engine.aclose()
