"""Limits of containers: how often they were hit, and changing them while a container runs."""

from __future__ import annotations

import abc
from contextlib import suppress
from typing import Any

from atoll.cancellation import finish
from atoll.engines.docker.api import facts
from atoll.engines.docker.api.http import RefusedError
from atoll.engines.docker.connect.agent_streams import Target
from atoll.engines.docker.container_plan import limit_options
from atoll.engines.docker.container_state import limit_events, usage
from atoll.engines.docker.states.docker_snapshots import DockerSnapshots
from atoll.engines.enforcement import changeable_limits, given_limits, refuse_unchangeable, refuse_unsupported
from atoll.engines.limit_events import LimitEvents
from atoll.errors import EngineError, SandboxError, SandboxGoneError, SandboxResourceError, SpecError
from atoll.model import Capability, Cause, Handle, Limits


class DockerLimits(DockerSnapshots, abc.ABC):
    """Implements `Resizable` and `LimitReporting`. The size of a container's disk is fixed when it is made."""

    name: str

    async def ran_out_of_memory(self, sandbox_id: str, since: float) -> bool:
        """Return whether anything in the sandbox was killed for its memory limit since `since`, a `time.time()`."""
        return await self._containers.ran_out_of_memory(self._who(sandbox_id).container, since)

    async def limit_events(self, handle: Handle, *, killed: bool = False) -> LimitEvents:
        """Return the counters of the kernel, or what the Docker engine remembers if its containers are not visible from
        here."""
        noted = Target.noted(handle.details)
        if noted is not None and self._streams.reaches(noted) and (seen := limit_events(noted)) is not None:
            return seen
        if handle.spec.limits.memory_bytes is None:
            return LimitEvents()
        name = self._who(handle.sandbox_id).container
        return LimitEvents(oom_kills=await self._containers.oom_kills(name, handle.created_at, wait=killed))

    async def set_limits(self, handle: Handle, limits: Limits) -> Handle:
        known = await facts.learn(self._http)
        available = known.capabilities
        if facts.has_own_kernel(known.runtime(handle.spec)):
            available -= {Capability.PIDS}
        refuse_unchangeable(self.name, changeable(available), limits)
        wanted = handle.spec.model_copy(update={"limits": limits})
        refuse_unsupported(self.name, available, wanted, known.problems)
        async with self._alone(handle):
            container = await self._container(handle)
            await self._settle_limits(handle.sandbox_id, container)
            if not container["State"]["Running"]:
                raise SandboxGoneError(f"sandbox '{handle.sandbox_id}' has ended", cause=Cause.LOST)
            return await finish(self._change_limits(self._current(handle), limits))

    async def _change_limits(self, handle: Handle, limits: Limits) -> Handle:
        await self._refuse_too_little(handle, limits)
        before = handle.spec.limits
        after = before.model_copy(update=given_limits(limits))
        # Written first: otherwise a change would be lost in the next container if this process died after it.
        self._limits.write(handle.sandbox_id, after, before)
        try:
            await self._containers.update(self._who(handle.sandbox_id).container, limit_options(limits))
        except BaseException as error:
            self._limits.write(handle.sandbox_id, before)
            if isinstance(error, RefusedError):
                kind = SpecError if error.status == 400 else EngineError
                raise kind(f"the Docker engine cannot change the limits: {error.message}") from error
            raise
        self._limits.write(handle.sandbox_id, after)
        return self._current(handle)

    async def _settle_limits(self, sandbox_id: str, container: dict[str, Any]) -> None:
        """Find out which limits are in force, after a process died while it changed them. The caller must hold the lock
        of the sandbox."""
        change = self._limits.read(sandbox_id)
        if change is None or change.before is None:
            return
        has = container.get("HostConfig") or {}
        wanted = limit_options(change.limits)
        done = all(has.get(name) == value for name, value in wanted.items())
        self._limits.write(sandbox_id, change.limits if done else change.before)

    async def _settled(self, sandbox_id: str, container: dict[str, Any] | None) -> None:
        """As `_settle_limits`, unless another process is at work on the sandbox."""
        change = self._limits.read(sandbox_id)
        if container is None or change is None or change.before is None:
            return
        with suppress(SandboxError):
            async with self._exclusion.alone(sandbox_id, 0.0):
                found = await self._containers.inspect(self._who(sandbox_id).container)
                await self._settle_limits(sandbox_id, found or container)

    async def _refuse_too_little(self, handle: Handle, limits: Limits) -> None:
        """Raise SandboxResourceError for a limit below what the sandbox uses now. The kernel would kill its processes,
        or let it start no other."""
        found = await self._containers.stats(self._who(handle.sandbox_id).container)
        used = usage(found or {})
        for words, wanted, now in (
            ("bytes of memory", limits.memory_bytes, used.memory_bytes),
            ("processes", limits.pids, used.pids),
        ):
            if wanted is not None and now is not None and now > wanted:
                raise SandboxResourceError(
                    f"the sandbox uses {now:,} {words}, more than the new limit of {wanted:,}",
                    hint="End some of its processes first, or choose a higher limit.",
                )


def changeable(capabilities: frozenset[Capability]) -> frozenset[str]:
    """Return the limits of a container that can be changed while it runs."""
    return changeable_limits(capabilities) - {"disk_bytes"}
