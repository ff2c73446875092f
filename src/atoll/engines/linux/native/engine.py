"""The `native` engine.

Theory of operation. The plan of `oci` is executed by `atoll-native`, a program of ours that makes a sandbox in one go
and ends: there is no runtime, no daemon and no process of ours that stays. Everything but that last step is the same
as in `oci`, and the records are in one place, because both take ids from the same ranges.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from atoll import workers
from atoll.engines.availability import Availability
from atoll.engines.base import refuse_unsupported
from atoll.engines.linux.cgroups import Hierarchy, delegated
from atoll.engines.linux.native import launcher, ordinary, probing
from atoll.engines.linux.native.building import NativeBuilder
from atoll.engines.linux.native.ordinary import UserLayers, UserNamespace
from atoll.engines.linux.oci import links
from atoll.engines.linux.oci.engine import OciEngine
from atoll.engines.linux.oci.places import Places
from atoll.engines.linux.oci.record import Record
from atoll.engines.linux.oci.runtimes import Runtime
from atoll.engines.local import processes
from atoll.engines.local.processes import ProcessRef
from atoll.engines.local.waiting import Deadline
from atoll.errors import EngineUnavailableError, SandboxGoneError, UnsupportedError
from atoll.model import Capability, Handle, SandboxSpec, Stats
from atoll.settings import Settings

_CREATE_S = 30.0
_PAUSE_S = 10.0
RUNTIME = "native"
"""What a record calls us."""


class NativeEngine(OciEngine):
    """An `Engine`, `Pausable`, `LimitReporting` and `Collecting`."""

    name = "native"

    def __init__(self, settings: Settings) -> None:
        self._namespace = UserNamespace() if os.geteuid() != 0 else None
        super().__init__(settings)
        self._maker: NativeBuilder | None = None
        if self._namespace is not None and self._namespace.ranges is None:
            self.capabilities -= {Capability.USERS}

    @classmethod
    def probe(cls, settings: Settings, *, thorough: bool) -> Availability:
        """Whether it can work here. `thorough` makes a sandbox and looks at its walls, whether or not that was done."""
        return probing.probe(cls(settings), settings, thorough=thorough)

    def _checked(self, spec: SandboxSpec) -> Runtime:
        refuse_unsupported(
            self.name, self.capabilities, spec, ordinary.MISSING if self._namespace is not None else None
        )
        return self._ready(spec).runtime

    async def _launch(self, record: Record, runtime: Runtime) -> Record:
        def complete(first: int) -> bool:
            nonlocal record
            init = ProcessRef.of(first)
            if init is None:
                return False
            done = {"init": init, "restoring": None, "half_made": self._is_found_by_number()}
            record = record.model_copy(update=done)
            self._places.records.write(record)
            return True

        def link(launcher: int) -> None:
            # Its network namespace is there already: it is linked while the rest is made.
            if record.spec.network != "none":
                work = workers.run(workers.ENGINE, links.attach_early, self._places.gateway, record, launcher)
                linking.append(asyncio.ensure_future(work))

        linking: list[asyncio.Future[int | None]] = []
        try:
            deadline = Deadline.after(_CREATE_S)
            async with self._places.group_lock.claimed(deadline):
                await self._ready(record.spec).make(record, complete, deadline, link)
        finally:
            linked = await asyncio.gather(*linking, return_exceptions=True)
        assert record.init is not None
        if record.spec.network != "none" and links.network_of(record.init.pid) not in linked:
            await self._link(record, record.init)
        if record.half_made:
            record = record.model_copy(update={"half_made": False})
            self._places.records.write(record)
        return record

    def _runtime_named(self, name: str) -> Runtime:
        return self._ready(SandboxSpec()).runtime

    async def pause(self, handle: Handle) -> None:
        await self._need_freezer(handle)
        async with self._alone(handle.sandbox_id):
            self._living(handle)
            await self._places.group(handle.sandbox_id).freeze(Deadline.after(_PAUSE_S))

    async def resume(self, handle: Handle) -> None:
        await self._need_freezer(handle)
        async with self._alone(handle.sandbox_id):
            self._living(handle)
            self._places.group(handle.sandbox_id).thaw()

    async def stats(self, handle: Handle) -> Stats:
        if self._namespace is None or Capability.MEMORY in self.capabilities:
            return await super().stats(handle)
        record = self._places.records.read(handle.sandbox_id)
        if record is None or not record.is_alive() or record.init is None:
            return Stats()
        return await workers.run(workers.ENGINE, processes.usage, record.init.pid)

    async def delete(self, handle: Handle) -> None:
        await super().delete(handle)
        if self._maker is not None:
            self._maker.rest()

    async def aclose(self) -> None:
        if self._maker is not None:
            self._maker.close()
        await super().aclose()

    def first_pid(self, sandbox_id: str) -> int:
        """Raises SandboxGoneError if there is none."""
        record = self._places.records.read(sandbox_id)
        if record is None or record.init is None:
            raise SandboxGoneError(f"there is no sandbox '{sandbox_id}'")
        return record.init.pid

    def about(self) -> tuple[str, ...]:
        """What one should know of its sandboxes here."""
        return self._namespace.about(self.capabilities) if self._namespace is not None else ()

    def _is_found_by_number(self) -> bool:
        """There is no control group to find a sandbox's processes by."""
        return not self._places.hierarchy.controllers

    def _handle(self, record: Record) -> Handle:
        return Handle(self.name, record.sandbox_id, record.spec, record.created_at, record.limit_details())

    def _is_ours(self, record: Record) -> bool:
        return record.runtime == RUNTIME

    async def _need_freezer(self, handle: Handle) -> None:
        if Capability.PAUSE not in self.capabilities:
            raise UnsupportedError(
                f"engine '{self.name}' cannot pause sandboxes here: {ordinary.MISSING[Capability.PAUSE]}"
            )
        await self._existing(handle)

    def _find_places(self, settings: Settings) -> Places:
        if self._namespace is None:
            return super()._find_places(settings)
        layers = UserLayers(settings.data_dir / "layers", namespace=self._namespace)
        mounts, own = (Path(f"/proc/self/{name}").read_text(errors="replace") for name in ("mountinfo", "cgroup"))
        return Places(settings, delegated(mounts, own) or Hierarchy("none"), layers)

    def _ready(self, spec: SandboxSpec) -> NativeBuilder:
        if spec.isolation not in (None, "namespaces"):
            raise UnsupportedError(
                f"engine '{self.name}' has no isolation '{spec.isolation}'", hint="Choose engine 'oci'."
            )
        if self._maker is None:
            if problems := probing.problems():
                reason, hint = next(iter(problems.items()))
                raise EngineUnavailableError(reason, hint=hint)
            self._maker = NativeBuilder(self._places, Runtime(RUNTIME, launcher.program()), self._namespace)
        return self._maker
