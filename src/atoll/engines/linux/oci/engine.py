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
import functools
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from atoll.engines.availability import Availability
from atoll.engines.base import ByteStream, LimitEvents, refuse_unsupported
from atoll.engines.linux.cgroups import Hierarchy
from atoll.engines.linux.oci import runtimes
from atoll.engines.linux.oci.building import Builder
from atoll.engines.linux.oci.ending import Ending
from atoll.engines.linux.oci.pausing import Pausing
from atoll.engines.linux.oci.places import Places
from atoll.engines.linux.oci.record import Record
from atoll.engines.linux.oci.runtimes import Isolation, Runtime
from atoll.engines.linux.oci.streams import Streams
from atoll.engines.local import processes, sockets
from atoll.engines.local.processes import ProcessRef
from atoll.engines.local.waiting import Deadline, finish
from atoll.errors import AgentUnreachableError, EngineError, EngineUnavailableError, SandboxError, SandboxGoneError
from atoll.model import Capability, Cause, Handle, Observation, SandboxSpec, State, Stats
from atoll.settings import Settings

_CREATE_S = 30.0
_CONNECT_S = 5.0
_RETRY_S = 0.01
_DELETE_S = 30.0
_PAUSE_S = 10.0
_DYING_S = 2.0


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
        self._ending = Ending(self._places)
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
        runtime = self._choose(spec)
        refuse_unsupported(f"{self.name}' with '{runtime.name}", _capabilities(self._places, runtime.isolation), spec)
        record = self._first_record(sandbox_id, spec, runtime)
        self._places.records.begin(record)
        try:
            built = await self._builder.build(record, runtime, Deadline.after(_CREATE_S))
            record = record.model_copy(update={"init": built.init})
            self._streams.put(sandbox_id, built.stream)
            self._places.records.write(record)
            self._ending.settle(sandbox_id)
        except BaseException as error:
            await self._undo(sandbox_id, error)
            if isinstance(error, OSError | RuntimeError) and not isinstance(error, SandboxError):
                raise EngineError(f"the sandbox could not be made: {error}") from error
            raise
        self._watch(record)
        return self._handle(record)

    async def connect(self, handle: Handle) -> ByteStream:
        deadline = Deadline.after(_CONNECT_S)
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
        if record.is_being_made():
            return Observation(State.STARTING)
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

    async def resume(self, handle: Handle) -> None:
        await self._existing(handle)
        await self._pausing.resume(handle.sandbox_id, self._runtime_of(handle), Deadline.after(_PAUSE_S))

    async def limit_events(self, handle: Handle) -> LimitEvents:
        events = self._places.group(handle.sandbox_id).events()
        if handle.spec.limits.disk_bytes is None:
            return events
        return dataclasses.replace(events, disk_full=self._places.layers.is_full(handle.sandbox_id))

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
        name = handle.details["runtime"]
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
    if places.layers.enforces_disk:
        found.add(Capability.DISK)
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
