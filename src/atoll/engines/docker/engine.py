"""The engine `docker`: the life cycle of a sandbox that is a container.

Everything that must outlive this process is kept by the Docker engine. The container's name and labels contain its
installation and its spec, so another process of the same installation finds all of its sandboxes, and only those.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.contract import ByteStream, EngineDescription, OnImageProgress
from atoll.engines.docker import container_plan, container_state, docker_probe
from atoll.engines.docker.api import disk_limit, endpoint, facts, image_pull
from atoll.engines.docker.api.http import RefusedError
from atoll.engines.docker.connect import agent_volume
from atoll.engines.docker.connect.agent_streams import NotVisibleError, Target
from atoll.engines.docker.container_maker import maker_label
from atoll.engines.docker.container_plan import Identity
from atoll.engines.docker.container_volumes import DockerVolumes
from atoll.engines.docker.docker_limits import DockerLimits, changeable
from atoll.engines.docker.states import commits
from atoll.engines.docker.states.docker_rollback import NEXT, ORIGIN
from atoll.engines.docker.states.docker_snapshots import snapshot_of
from atoll.engines.enforcement import refuse_unsupported
from atoll.engines.engine_traces import traced_engine
from atoll.engines.host.saved_states import none_if_failed
from atoll.errors import (
    AgentUnreachableError,
    EngineError,
    EngineUnavailableError,
    ImageError,
    SandboxError,
    SandboxGoneError,
    SandboxNotFoundError,
    SpecError,
)
from atoll.model import (
    Capability,
    Cause,
    EffectiveLimits,
    Handle,
    Observation,
    SandboxSpec,
    State,
    Stats,
    check_variables,
    resolved,
)
from atoll.model.network_policy import NetworkPolicy
from atoll.model.state import Availability
from atoll.network.refusals import Refusal
from atoll.settings import Settings
from atoll.waiting import Deadline

_CONNECT_S = 10.0
_ENDING_S = 5.0
_ENDING_PAUSE_S = 0.01
_SILENT_S = 5.0
_DELETE_S = 60.0
_LAST_REQUEST_S = 0.5
_PATIENCE_S = 2.0
"""How long a deletion waits for an operation in progress before it removes the container anyway."""
_UNKNOWN = EngineDescription(
    frozenset({Capability.IMAGES, Capability.ISOLATION, Capability.USERS}), "namespaces", is_complete=False
)


@traced_engine
class DockerEngine(DockerLimits, DockerVolumes):
    """An `Engine`, `Pausable`, `NetworkPolicies`, `Resizable`, `Checkpointing` and `NamedVolumes` over the Docker API.

    `where` is the address of the Docker engine; by default it is found as the `docker` program finds it. With
    `direct=False` agents are reached only through the API, as always when the containers' processes are not visible
    from here.
    """

    name = "docker"

    def __init__(self, settings: Settings, where: endpoint.Endpoint | None = None, *, direct: bool = True) -> None:
        super().__init__(settings, where, direct=direct)
        self._description: EngineDescription | None = None
        self._silent_until = 0.0

    @classmethod
    def probe(cls, settings: Settings, *, thorough: bool) -> Availability:
        return docker_probe.probe(cls.name, thorough=thorough)

    async def describe(self) -> EngineDescription:
        """Return what the Docker engine reports, which is requested once. While it does not answer, it has no
        limits."""
        if self._description is None:
            if time.monotonic() < self._silent_until:
                return _UNKNOWN
            try:
                self._description = self._description_from(await facts.learn(self._http))
            except SandboxError:
                self._silent_until = time.monotonic() + _SILENT_S
                return _UNKNOWN
        return self._description

    # --- the contract ----------------------------------------------------------------------------------------------

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Handle:
        if (name := snapshot_of(self._image_name(spec.image))) is None:
            return await self._make(sandbox_id, spec, None)
        async with none_if_failed(self.delete) as made, self._held(lambda: self._snapshot_named(name)) as saved:
            made.append(await self._make(sandbox_id, spec, saved.as_image()))
        return made[0]

    async def _make(self, sandbox_id: str, spec: SandboxSpec, image: image_pull.Image | None) -> Handle:
        """Create a sandbox from `image`, a saved state, or from the image of its spec."""
        who, created_at = self._who(sandbox_id), time.time()
        spec = spec.model_copy(update={"image": self._image_name(spec.image)})
        known = await self._checked(spec)
        prepare = self._freshener(sandbox_id) if image is not None else None
        if image is None:
            image = await image_pull.ensure(self._http, spec.image)
        if facts.machine(image.architecture) not in ("", known.architecture):
            raise ImageError(
                f"image '{spec.image}' is for {image.architecture}, the Docker engine runs on {known.architecture}",
                hint=f"Pull it for that machine: 'docker pull --platform linux/{known.architecture} {spec.image}'.",
            )
        disk_limit.check_volumes(spec, image.volumes)
        check_variables(image.env)
        spec = resolved(spec, image.defaults)
        container_plan.check(spec, self._private(known))
        try:
            origin = {ORIGIN: image.id} if prepare is not None else {}
            async with self._accounts.claimed():
                body = await self._body(who, spec, image, created_at, {**origin, **maker_label()})
                target = await finish(self._maker.make(who.container, body, agent_volume.packed(), spec, prepare))
            if spec.network != "none":
                await finish(self._link(who, target, spec.network))
        except asyncio.CancelledError:
            await finish(self._remove(who))
            raise
        except SandboxError as error:
            hangs = isinstance(error, EngineUnavailableError)
            if hangs or await self._containers.inspect(who.container) is None:
                await self._links.remove(sandbox_id)
            raise
        details = target.details() | container_plan.details_of(body["Labels"])
        return Handle(self.name, sandbox_id, spec, created_at, details)

    async def default_limits(self, spec: SandboxSpec) -> EffectiveLimits:
        return (await facts.learn(self._http)).defaults(self._settings.resources.sandbox, spec)

    async def shared_ceilings(self) -> tuple[str, ...]:
        return self._accounts.enforced(await facts.learn(self._http))

    async def balance(self) -> None:
        await workers.run(workers.ENGINE, self._accounts.balance)

    async def _checked(self, spec: SandboxSpec) -> facts.Facts:
        known = await facts.learn(self._http)
        known.require_usable()
        self._description = self._description_from(known)
        self._links.check(spec, known)
        refuse_unsupported(self.name, self._description.capabilities, spec, known.problems)
        container_plan.check(spec, self._private(known))
        container_plan.check_set_id(spec, known.runtime(spec))
        return known

    async def _body(
        self, who: Identity, spec: SandboxSpec, image: image_pull.Image, created_at: float, labels: Mapping[str, str]
    ) -> dict[str, Any]:
        known, agent = await self._checked(spec), agent_volume.packed()
        await agent_volume.ensure(self._http, agent, image.id)
        trusted = self._links.trusted(who.sandbox_id, self._links.now(who.sandbox_id, spec).network)
        defaults = container_plan.defaults_of(labels) or known.defaults(self._settings.resources.sandbox, spec)
        if known.storage.counts_image and not image.size_bytes:
            image = dataclasses.replace(image, size_bytes=await self._size_of_base(spec, image))
        parent = self._accounts.parent(known, spec.account)
        return container_plan.container(who, spec, known, image, agent, created_at, trusted, labels, defaults, parent)

    async def connect(self, handle: Handle) -> ByteStream:
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await self._connect(handle)
        except (OSError, RefusedError, AgentUnreachableError) as error:
            seen = await self.inspect(handle)
            if seen.state in (State.RUNNING, State.STARTING, State.PAUSED):
                reason = error.reason if isinstance(error, SandboxError) else str(error) or "it does not answer"
                raise AgentUnreachableError(
                    f"the agent of sandbox '{handle.sandbox_id}' cannot be reached: {reason}"
                ) from error
            raise _gone(handle, seen) from error

    async def inspect(self, handle: Handle) -> Observation:
        name = self._who(handle.sandbox_id).container
        found = await self._completed(name)
        await self._settled(handle.sandbox_id, found)
        seen = container_state.MISSING if found is None else container_state.observe(found)
        if seen.state is State.PAUSED and found is not None and commits.stands_still(found):
            return Observation(State.RUNNING)
        lifetime_s = handle.spec.limits.lifetime_s
        if seen.state is State.PAUSED and lifetime_s is not None and handle.created_at + lifetime_s <= time.time():
            return await self._let_end(name)
        return seen

    async def list(self) -> list[Handle]:
        installation = self._settings.installation_id()
        found = await self._containers.labelled(f"{container_plan.INSTALLATION}={installation}")
        handles = [handle for entry in found if (handle := self._handle(entry)) is not None]
        # during a rollback a sandbox has two containers for a moment
        return [*{handle.sandbox_id: handle for handle in handles}.values()]

    async def stats(self, handle: Handle) -> Stats:
        found = await self._containers.stats(self._who(handle.sandbox_id).container)
        return Stats() if found is None else container_state.usage(found)

    async def delete(self, handle: Handle) -> None:
        await finish(self._delete(self._who(handle.sandbox_id)))

    async def _delete(self, who: Identity) -> None:
        """Delete a sandbox. Other operations on it are given up after `_PATIENCE_S`."""
        began, deadline = time.monotonic(), Deadline.after(_DELETE_S)
        taken: set[str] = set()

        async def interrupt() -> None:
            if time.monotonic() > began + _PATIENCE_S:
                taken.add(await self._take_away(who.container))

        async with self._exclusion.deleting(who.sandbox_id, deadline, interrupt):
            await self._remove(who, taken)

    async def gc(self, *, shared: bool = True) -> Sequence[str]:
        """Remove what dead processes of this installation left in the Docker engine. Returns what was removed."""
        try:
            return await finish(self._collect())
        finally:
            await self._accounts.remove_empty()

    async def aclose(self) -> None:
        """End the bridges of this event loop. The API needs no closing: every request has its own connection."""
        await self._streams.bridges.aclose()
        await self._accounts.remove_empty()

    # --- pausing, and more -----------------------------------------------------------------------------------------

    async def pause(self, handle: Handle) -> None:
        """Pause with the Docker engine's freezer. May be repeated."""
        await self._switch(handle, "pause", State.PAUSED)

    async def resume(self, handle: Handle) -> None:
        await self._switch(handle, "unpause", State.RUNNING)

    async def set_network(self, handle: Handle, policy: NetworkPolicy) -> None:
        known = await facts.learn(self._http)
        self._links.check(handle.spec.model_copy(update={"network": policy}), known)
        async with self._alone(handle):
            if await finish(self._links.change(handle.sandbox_id, policy)) or policy == "none":
                return
            found = await self._containers.inspect(self._who(handle.sandbox_id).container)
            if found is None or not found["State"]["Running"]:
                raise _gone(handle, await self.inspect(handle))
            await finish(self._links.attach(handle.sandbox_id, Target.of(found), policy))

    async def refusals(self, handle: Handle) -> Sequence[Refusal]:
        return await self._links.refusals(handle.sandbox_id)

    async def pull(self, image: str, on_progress: image_pull.OnProgress | None = None) -> None:
        """Pull an image before it is needed, or pull it anew. Raises ImageNotFoundError with the reason."""
        image = self._image_name(image)
        image_pull.check_name(image)
        await image_pull.pull(self._http, image, on_progress)

    async def can(self, capability: Capability) -> bool:
        """Return whether the Docker engine has a capability now. Raises EngineUnavailableError."""
        return capability in self._description_from(await facts.learn(self._http)).capabilities

    async def ensure_image(self, image: str, on_progress: OnImageProgress | None = None) -> None:
        """Pull an image unless the Docker engine has it. Raises ImageNotFoundError with the reason."""
        image = self._image_name(image)
        await image_pull.ensure(self._http, image, image_pull.summed(on_progress) if on_progress is not None else None)

    # --- its parts -------------------------------------------------------------------------------------------------

    def _description_from(self, known: facts.Facts) -> EngineDescription:
        linked = {Capability.NETWORK} if self._links.problem(known) is None else frozenset()
        found, can = known.capabilities | linked, changeable(known.capabilities)
        return EngineDescription(found, known.isolation, known.version, missing=known.problems, changeable_limits=can)

    async def levels(self) -> Mapping[str, EngineDescription]:
        """Describe each level that the Docker engine has a runtime for. A kernel of its own hides the processes inside,
        and has no link to the gateway."""
        known, own = await facts.learn(self._http), await self.describe()
        found = {}
        for level in known.levels:
            hidden = {Capability.PIDS, Capability.NETWORK} if level not in ("namespaces", known.isolation) else set()
            has, can = own.capabilities - hidden, changeable(own.capabilities - hidden)
            found[level] = dataclasses.replace(own, isolation=level, capabilities=has, changeable_limits=can)
        return found

    async def _link(self, who: Identity, target: Target, policy: NetworkPolicy) -> None:
        try:
            await self._links.attach(who.sandbox_id, target, policy)
        except BaseException:
            await self._remove(who)
            raise

    async def _remove(self, who: Identity, taken: AbstractSet[str] = frozenset()) -> None:
        """Remove all containers of a sandbox, and all records of it. `taken` are ids of its containers that are already
        gone."""
        removed = {await self._take_away(name) for name in (who.container + NEXT, who.container)}
        await self._links.remove(who.sandbox_id)
        self._limits.forget(who.sandbox_id)
        await self._forget_states(who.sandbox_id)
        await self._accounts.clear((taken | removed) - {""})

    async def _take_away(self, name: str) -> str:
        """Remove a container. Returns its id; empty if there was none or the Docker engine cannot tell."""
        try:
            found = await self._containers.inspect(name)
        except EngineUnavailableError:
            # An engine that hangs is not waited for again. It reads the request when it continues.
            with suppress(TimeoutError, EngineError):
                async with asyncio.timeout(_LAST_REQUEST_S):
                    await self._containers.remove(name)
            raise
        except EngineError:
            found = None
        await self._containers.remove(name)
        return str(found["Id"]) if found is not None else ""

    async def _connect(self, handle: Handle) -> ByteStream:
        if (noted := Target.noted(handle.details)) is not None:
            try:
                stream = await self._streams.direct(noted)
            except (NotVisibleError, FileNotFoundError):
                pass  # the container has ended or was never visible from here; the Docker engine knows which
            else:
                return await self._linked(handle, noted, stream)
        name = self._who(handle.sandbox_id).container
        found = await self._completed(name)
        while found is not None and found["State"]["Running"]:
            target = Target.of(found)
            try:
                return await self._linked(handle, target, await self._streams.open(target))
            except (OSError, RefusedError, AgentUnreachableError):
                # The Docker engine may have just removed it for a rollback that a dead process began.
                if (found := await self._completed(name)) is None or found["Id"] == target.container_id:
                    raise
        raise AgentUnreachableError("its container is not running")

    async def _linked(self, handle: Handle, target: Target, stream: ByteStream) -> ByteStream:
        try:
            if self._links.may_be_linked(handle.sandbox_id, handle.spec.network):
                async with self._alone(handle):  # a sandbox that is being deleted must not get a link
                    await self._links.renew(handle.sandbox_id, target, handle.spec.network)
        except BaseException:
            stream.close()
            raise
        return stream

    async def _let_end(self, name: str) -> Observation:
        """End a sandbox whose lifetime passed while it was paused, by resuming it."""
        with suppress(RefusedError):
            await self._containers.switch(name, "unpause")
        deadline = time.monotonic() + _ENDING_S
        while True:
            found = await self._containers.inspect(name)
            seen = container_state.MISSING if found is None else container_state.observe(found)
            if seen.state is not State.RUNNING or time.monotonic() > deadline:
                return seen
            await asyncio.sleep(_ENDING_PAUSE_S)

    async def _switch(self, handle: Handle, verb: str, wanted: State) -> None:
        async with self._alone(handle):
            await self._switch_alone(handle, verb, wanted)

    async def _switch_alone(self, handle: Handle, verb: str, wanted: State) -> None:
        try:
            await self._containers.switch(self._who(handle.sandbox_id).container, verb)
        except RefusedError as error:
            seen = await self.inspect(handle)
            if seen.state is wanted:
                return
            if seen.state is State.MISSING:
                raise SandboxNotFoundError(f"Sandbox {handle.sandbox_id} not found") from error
            if seen.state is State.STOPPED:
                raise _gone(handle, seen) from error
            raise EngineError(f"the Docker engine cannot {verb} the sandbox: {error.message}") from error

    def _handle(self, entry: dict[str, Any]) -> Handle | None:
        labels = entry.get("Labels") or {}
        sandbox_id = str(labels.get(container_plan.SANDBOX, ""))
        try:
            self._who(sandbox_id)
        except SpecError:
            return None
        details = {"container": str(entry.get("Id", "")), **container_plan.details_of(labels)}
        try:
            made = SandboxSpec.model_validate_json(labels.get(container_plan.SPEC, ""))
            spec = self._limits.now(sandbox_id, self._links.now(sandbox_id, made))
            created_at = float(labels.get(container_plan.CREATED, ""))
        except (ValidationError, ValueError):
            return Handle(self.name, sandbox_id, SandboxSpec(), 0.0, {**details, "damaged": "its labels are damaged"})
        return Handle(self.name, sandbox_id, spec, created_at, details)


def _gone(handle: Handle, seen: Observation) -> SandboxGoneError:
    cause = seen.cause or Cause.LOST
    return SandboxGoneError(f"sandbox '{handle.sandbox_id}' has ended: {seen.reason or cause}", cause=cause.value)
