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
import fcntl
import functools
import os
import platform
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

from atoll.checkpoint import Change, Checkpoint, Snapshot
from atoll.engines.availability import Availability
from atoll.engines.base import LATER, ByteStream, LimitEvents, refuse_unsupported
from atoll.engines.linux.cgroups import Hierarchy
from atoll.engines.linux.oci import links, runtimes
from atoll.engines.linux.oci.building import Builder
from atoll.engines.linux.oci.checkpoints import SNAPSHOT, Checkpoints, Dump, limit_for
from atoll.engines.linux.oci.ending import Ending
from atoll.engines.linux.oci.pausing import Pausing
from atoll.engines.linux.oci.places import Places
from atoll.engines.linux.oci.record import Ended, Record
from atoll.engines.linux.oci.runtimes import Isolation, Runtime
from atoll.engines.linux.oci.saved import Saved
from atoll.engines.linux.oci.streams import Streams
from atoll.engines.linux.plan import CgroupLimits
from atoll.engines.local import processes, sockets
from atoll.engines.local.processes import ProcessRef
from atoll.engines.local.waiting import Deadline, finish
from atoll.errors import (
    AgentUnreachableError,
    CheckpointNotFoundError,
    EngineError,
    EngineUnavailableError,
    SandboxError,
    SandboxGoneError,
    UnsupportedError,
)
from atoll.images import tree
from atoll.model import Capability, Cause, Handle, Limits, Observation, SandboxSpec, State, Stats
from atoll.network import client as network
from atoll.network.policy import NetworkPolicy
from atoll.network.refusals import Refusal
from atoll.settings import Settings

_CREATE_S = 30.0
_CONNECT_S = 5.0
_RETRY_S = 0.01
_DELETE_S = 30.0
_PAUSE_S = 10.0
_DYING_S = 2.0
_ALONE_S = 60.0
_DUMP_S = 120.0
_AS_IT_IS = "as it is"
"""Not a saved state: its layer stays."""
_FORKS_AT_ONCE = 8


class OciEngine:
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
            source = await asyncio.to_thread(self._checkpoints.snapshot_named, spec.image)
        record = self._first_record(sandbox_id, spec, runtime)
        self._places.records.begin(record)
        try:
            if source is not None:
                origin = await finish(asyncio.to_thread(self._checkpoints.origin_for, sandbox_id, source))
                began = {
                    "origin": origin.id,
                    "base": origin.base,
                    "inherited_bytes": origin.size_bytes,
                    "memory": origin.id if origin.memory else None,
                }
                record = record.model_copy(update=began)
                self._places.records.write(record)
            record = await self._launch(record, runtime)
        except BaseException as error:
            await self._undo(sandbox_id, error)
            if isinstance(error, OSError | RuntimeError) and not isinstance(error, SandboxError):
                raise EngineError(f"the sandbox could not be made: {error}") from error
            raise
        self._watch(record)
        return self._handle(record)

    def _checked(self, spec: SandboxSpec) -> Runtime:
        """The runtime for it. Raises for what cannot be enforced."""
        runtime = self._choose(spec)
        refuse_unsupported(f"{self.name}' with '{runtime.name}", _capabilities(self._places, runtime.isolation), spec)
        return runtime

    async def _launch(self, record: Record, runtime: Runtime) -> Record:
        """Make what the record says. Returns it complete, as it is written down."""
        built = await self._builder.build(record, runtime, Deadline.after(_CREATE_S))
        record = record.model_copy(update={"init": built.init, "restoring": None, "memory": None, "asleep": False})
        if not runtime.virtual_kernel:
            await self._link(record, built.init)
        self._streams.put(record.sandbox_id, built.stream)
        self._places.records.write(record)
        self._ending.settle(record.sandbox_id)
        return record

    async def _link(self, record: Record, init: ProcessRef) -> None:
        if record.spec.network != "none":
            await finish(asyncio.to_thread(links.attach, self._places.gateway, record, init))

    async def connect(self, handle: Handle) -> ByteStream:
        deadline = Deadline.after(_CONNECT_S)
        if handle.spec.network != "none":
            await asyncio.to_thread(self._places.gateway.ensure)
        while True:
            try:
                if handle.details.get("isolation", "namespaces") != "namespaces":
                    await self._existing(handle)
                    return await self._streams.get(handle.sandbox_id, self._runtime_of(handle))
                return await sockets.connect(self._places.socket(handle.sandbox_id), deadline)
            except OSError as error:
                await self._existing(handle)
                # Its socket is closed but it is not dead yet: it is just ending, and then we know why.
                if not isinstance(error, ConnectionRefusedError | FileNotFoundError) or not deadline.left():
                    raise AgentUnreachableError(
                        f"the agent of sandbox '{handle.sandbox_id}' cannot be reached: {error}"
                    ) from error
                await asyncio.sleep(_RETRY_S)

    async def inspect(self, handle: Handle) -> Observation:
        record = self._places.records.read(handle.sandbox_id)
        if record is None:
            if self._places.records.exists(handle.sandbox_id):
                return Observation(State.STOPPED, Cause.LOST, "its record is missing or damaged")
            return Observation(State.MISSING, Cause.USER, "it was deleted or never existed")
        if record.asleep and record.ended is None:
            return Observation(State.PAUSED, None, "its memory is on the disk")
        if record.is_being_made():
            return Observation(State.STARTING)
        record = await self._completed(record)
        if record.is_alive():
            if record.expires_at is not None and record.expires_at <= time.time():
                record = await self._ending.expire(record)
            elif self._pausing.is_paused(record.sandbox_id):
                return Observation(State.PAUSED)
            else:
                return Observation(State.RUNNING)
        ended = record.ended or self._ending.explain(record)
        return Observation(State.STOPPED, ended.cause, ended.reason)

    async def list(self) -> list[Handle]:
        return [*await asyncio.to_thread(self._found_all)]

    async def stats(self, handle: Handle) -> Stats:
        seen = self._places.group(handle.sandbox_id).stats()
        disk = await asyncio.to_thread(self._places.layers.usage, handle.sandbox_id)
        record = self._places.records.read(handle.sandbox_id)
        if disk is not None and record is not None:
            disk += record.inherited_bytes
        return Stats(seen.memory_bytes, seen.cpu_s, seen.pids, disk)

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
            await asyncio.to_thread(self._places.close)
        except RuntimeError:  # the program is ending, and starts no threads any more
            self._places.close()

    # --- pausing, and more -----------------------------------------------------------------------------------------

    async def pause(self, handle: Handle) -> None:
        await self._existing(handle)
        await self._pausing.pause(handle.sandbox_id, self._runtime_of(handle), Deadline.after(_PAUSE_S))

    async def hibernate(self, handle: Handle) -> None:
        """Pause it with its memory on the disk. If that fails it goes on."""
        async with self._alone(handle.sandbox_id):
            record = self._record(handle)
            if record.asleep:
                return
            await self._existing(handle)
            await finish(self._sleep(record, await self._dumping(record)))

    async def _sleep(self, record: Record, dump: Dump) -> None:
        memory = self._places.memory(record.sandbox_id)
        await asyncio.to_thread(tree.remove, memory)
        async with dump(memory):
            # From here on it is the memory on the disk that counts.
            asleep = record.model_copy(update={"init": None, "asleep": True})
            self._places.records.write(asleep)
            await self._ending.stop(record.sandbox_id, record, Deadline.after(_DELETE_S))

    async def _wake(self, record: Record) -> None:
        runtime = self._runtime_named(record.runtime)
        waking = record.model_copy(
            update={"memory": record.sandbox_id, "restoring": _AS_IT_IS, "creator": _ourselves(os.getpid())}
        )
        await self._ending.stop(record.sandbox_id, record, Deadline.after(_DELETE_S))  # what an earlier try left
        await self._launch(waking, runtime)
        await asyncio.to_thread(tree.remove, self._places.memory(record.sandbox_id))

    async def resume(self, handle: Handle) -> None:
        record = self._places.records.read(handle.sandbox_id)
        if record is not None and record.asleep:
            async with self._alone(handle.sandbox_id):
                record = self._record(handle)
                if record.asleep:
                    await finish(self._wake(record))
            return
        await self._existing(handle)
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
        if await asyncio.to_thread(self._places.gateway.change, record.sandbox_id, policy):
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
        return await asyncio.to_thread(self._places.gateway.refusals, handle.sandbox_id)

    async def limit_events(self, handle: Handle) -> LimitEvents:
        events = self._places.group(handle.sandbox_id).events()
        if handle.spec.limits.disk_bytes is None:
            return events
        return dataclasses.replace(events, disk_full=self._places.layers.is_full(handle.sandbox_id))

    async def set_limits(self, handle: Handle, limits: Limits) -> None:
        record = self._places.records.read(handle.sandbox_id)
        if record is None or not record.is_alive():
            await self._existing(handle)
            raise EngineError(f"sandbox '{handle.sandbox_id}' is not ready")
        old = record.spec.limits
        for name in Limits.model_fields:
            if getattr(old, name) not in ((None, getattr(limits, name)) if name in LATER else (getattr(limits, name),)):
                raise UnsupportedError(f"the limit '{name}' of a sandbox that runs cannot be changed")
        spec = record.spec.model_copy(update={"limits": limits})
        isolation = handle.details.get("isolation", "namespaces")
        refuse_unsupported(self.name, _capabilities(self._places, cast(Isolation, isolation)), spec)
        try:
            self._places.group(handle.sandbox_id).limit(CgroupLimits.of(limits))
            self._places.records.write(record.model_copy(update={"spec": spec}))
        except OSError as error:
            raise EngineError(f"the limits of sandbox '{handle.sandbox_id}' cannot be set: {error}") from error

    async def ensure_image(self, image: str) -> None:
        await self._places.images.ensure(image)

    # --- saved states ----------------------------------------------------------------------------------------------

    async def checkpoint(
        self, handle: Handle, *, name: str = "", made_by: str = "user", memory: bool = False
    ) -> Checkpoint:
        async with self._alone(handle.sandbox_id):
            record = self._record(handle)
            dump = None
            if memory:
                await self._existing(handle)
                dump = await self._dumping(record)
            checkpoint = await self._checkpoints.make(record, name, made_by, dump)
            self._places.records.write(record.model_copy(update={"position": checkpoint.id}))
            return checkpoint

    async def checkpoints(self, handle: Handle) -> Sequence[Checkpoint]:
        self._record(handle)
        return await asyncio.to_thread(self._checkpoints.of, handle.sandbox_id)

    async def delete_checkpoint(self, handle: Handle, checkpoint_id: str) -> None:
        await self._checkpoints.delete(handle.sandbox_id, checkpoint_id)

    async def diff(self, handle: Handle, old: str, new: str | None = None, *, text: bool = False) -> Sequence[Change]:
        return await self._checkpoints.diff(self._record(handle), old, new, text=text)

    async def rollback(self, handle: Handle, checkpoint_id: str | None) -> None:
        async with self._alone(handle.sandbox_id):
            record = self._record(handle)
            if checkpoint_id is None:
                target, position = record.origin, None
            else:
                saved = await asyncio.to_thread(self._checkpoints.find, handle.sandbox_id, checkpoint_id)
                target = position = saved.id
            await finish(self._restore(record, target, position))

    async def fork(
        self, handle: Handle, sandbox_ids: Sequence[str], checkpoint_id: str | None = None, *, memory: bool = False
    ) -> Sequence[Handle]:
        record = self._record(handle)
        if checkpoint_id is None:
            # Of all that are made, each has the state of one moment.
            made = await self.checkpoint(handle, made_by="fork", memory=memory)
            source = self._checkpoints.find(handle.sandbox_id, made.id)
        else:
            source = await asyncio.to_thread(self._checkpoints.find, handle.sandbox_id, checkpoint_id)
        turns = asyncio.Semaphore(_FORKS_AT_ONCE)

        async def make(sandbox_id: str) -> Handle:
            async with turns:
                return await self._create(sandbox_id, record.spec, source)

        try:
            results = await asyncio.gather(*(make(each) for each in sandbox_ids), return_exceptions=True)
            failures = [each for each in results if isinstance(each, BaseException)]
            handles = [each for each in results if isinstance(each, Handle)]
            if failures:
                await asyncio.gather(*(self.delete(each) for each in handles))
                raise failures[0]
            return handles
        finally:
            if checkpoint_id is None:
                await self._checkpoints.delete(handle.sandbox_id, source.id)

    async def snapshot(self, handle: Handle, name: str, checkpoint_id: str | None = None) -> Snapshot:
        return await self._checkpoints.keep(self._record(handle), name, checkpoint_id)

    async def snapshots(self) -> Sequence[Snapshot]:
        return await asyncio.to_thread(self._checkpoints.snapshots)

    async def delete_snapshot(self, name: str) -> None:
        await self._checkpoints.delete_snapshot(name)

    async def export_snapshot(self, name: str, file: Path) -> None:
        await self._checkpoints.export(name, file)

    async def import_snapshot(self, file: Path, name: str) -> Snapshot:
        return await self._checkpoints.take_in(file, name)

    async def gc(self) -> Sequence[str]:
        """Remove what belongs to no sandbox, or to one whose maker died. Says what it removed."""
        return await finish(self._ending.collect(Deadline.after(_DELETE_S)))

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

    def _first_record(self, sandbox_id: str, spec: SandboxSpec, runtime: Runtime) -> Record:
        creator = _ourselves(os.getpid())
        now = time.time()
        return Record(
            sandbox_id=sandbox_id,
            spec=spec,
            runtime=runtime.name,
            created_at=now,
            expires_at=None if spec.limits.lifetime_s is None else now + spec.limits.lifetime_s,
            boot_id=processes.boot_id(),
            creator=creator,
        )

    async def _dumping(self, record: Record) -> Dump:
        """How to write its memory down. Says what stands in the way before anything happens."""
        if record.runtime != "runsc":
            raise UnsupportedError(
                f"the memory of a sandbox cannot be saved with '{record.runtime}'",
                hint="Make the sandbox with isolation='gvisor'.",
            )
        runtime = self._runtime_named(record.runtime)
        await self._streams.leave(record.sandbox_id)

        @asynccontextmanager
        async def dump(target: Path) -> AsyncIterator[None]:
            await asyncio.to_thread(target.mkdir, mode=0o700, parents=True)
            await self._pausing.pause(record.sandbox_id, runtime, Deadline.after(_PAUSE_S))
            try:
                await self._pausing.dump(record.sandbox_id, runtime, target, Deadline.after(_DUMP_S))
                yield
            finally:
                if self._places.run(record.sandbox_id).exists():  # else it was ended meanwhile, on purpose
                    await self._pausing.resume(record.sandbox_id, runtime, Deadline.after(_PAUSE_S))

        return dump

    def _record(self, handle: Handle) -> Record:
        record = self._places.records.read(handle.sandbox_id)
        if record is None:
            raise SandboxGoneError(f"there is no sandbox '{handle.sandbox_id}'", cause=Cause.USER.value)
        return record

    @asynccontextmanager
    async def _alone(self, sandbox_id: str) -> AsyncIterator[None]:
        """Nobody else, also no other process of ours, saves or restores this sandbox meanwhile."""
        try:
            fd = os.open(self._places.records.home(sandbox_id), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SandboxGoneError(f"there is no sandbox '{sandbox_id}'", cause=Cause.USER.value) from None
        deadline = Deadline.after(_ALONE_S)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not deadline.left():
                        raise EngineError(f"sandbox '{sandbox_id}' is busy with another checkpoint") from None
                    await asyncio.sleep(_RETRY_S)
            yield
        finally:
            os.close(fd)

    async def _restore(self, record: Record, target: str | None, position: str | None) -> Record:
        """From the note on, whoever looks at the sandbox next completes it if we die; before, nothing has happened."""
        saved = self._checkpoints.states.read(target) if target else None
        if target and saved is None:
            raise CheckpointNotFoundError(f"the state '{target}' is gone")
        restored = record.model_copy(
            update={
                "init": None,
                "ended": None,
                "restoring": target or "",
                "position": position,
                "inherited_bytes": saved.size_bytes if saved is not None else 0,
                "memory": saved.id if saved is not None and saved.memory else None,
                "asleep": False,
                "creator": _ourselves(os.getpid()),
                "boot_id": processes.boot_id(),
            }
        )
        runtime = self._runtime_named(record.runtime)
        replacement = await asyncio.to_thread(
            self._places.layers.replace_layer, record.sandbox_id, limit_for(restored), target
        )
        try:
            try:
                self._places.records.write(restored)
            except FileNotFoundError:
                raise SandboxGoneError(f"sandbox '{record.sandbox_id}' was deleted", cause=Cause.USER.value) from None
            self._streams.drop(record.sandbox_id)
            await self._ending.stop(record.sandbox_id, record, Deadline.after(_DELETE_S))
            await asyncio.to_thread(replacement.commit)
        finally:
            await asyncio.to_thread(replacement.discard)
        try:
            return await self._launch(restored, runtime)
        except Exception as error:
            ended = Ended(cause=Cause.LOST, reason=f"it could not be started again: {error}")
            with suppress(OSError):
                self._places.records.write(restored.model_copy(update={"ended": ended, "restoring": None}))
            raise

    async def _completed(self, record: Record) -> Record:
        """If whoever was restoring it died, go on with that."""
        if record.restoring is None or record.is_being_made() or not record.is_of_this_boot():
            return record
        async with self._alone(record.sandbox_id):
            record = self._places.records.read(record.sandbox_id) or record
            if record.restoring is None:
                return record
            return await finish(self._restore(record, record.restoring or None, record.position))

    async def _undo(self, sandbox_id: str, error: BaseException) -> None:
        try:
            await finish(self._ending.erase(sandbox_id, Deadline.after(_DELETE_S)))
        except Exception as leftover:  # the first error is the one to tell; `gc` finds what is left
            error.add_note(f"and cleaning up failed: {leftover}")

    def _watch(self, record: Record) -> None:
        if record.expires_at is None:
            return
        task = asyncio.create_task(self._expire_later(record), name=f"lifetime of {record.sandbox_id}")
        self._watchers[record.sandbox_id] = task
        task.add_done_callback(lambda _: self._watchers.pop(record.sandbox_id, None))

    async def _expire_later(self, record: Record) -> None:
        assert record.expires_at is not None
        await asyncio.sleep(max(0.0, record.expires_at - time.time()))
        with suppress(SandboxError, OSError):
            await self._ending.expire(record)

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
            {"runtime": record.runtime, "isolation": isolation},
        )


@functools.lru_cache(maxsize=1)
def _ourselves(pid: int) -> ProcessRef:
    found = ProcessRef.of(pid)
    assert found is not None
    return found


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
