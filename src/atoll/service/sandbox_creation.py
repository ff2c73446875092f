"""Create and fork sandboxes for users, within their quotas. Nothing is left of a request that was given up."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from atoll.cancellation import finish
from atoll.errors import SandboxError, SpecError
from atoll.images.access import pulling_with
from atoll.manager import SandboxManager, fork_key
from atoll.model import StartCommand, effective_limits
from atoll.model.manus_names import TASK_LABEL
from atoll.service import exposed_ports, startup
from atoll.service.callback_messages import CALLBACK_LABEL, Callbacks
from atoll.service.caller import Caller
from atoll.service.models.exposed_port import ExposedPort, HealthCheck
from atoll.service.models.sandbox_info import SandboxInfo
from atoll.service.models.sandbox_request import MAX_SETTINGS, ForkRequest, SandboxRequest, SandboxSettings
from atoll.service.quotas import Reservations
from atoll.service.sandbox_lookup import SandboxLookup
from atoll.service.sandbox_telemetry import SandboxTelemetry
from atoll.service.sandbox_view import IN_PLACE, SPEC_LABEL, SandboxView, refuse_own_labels
from atoll.service.snapshots import SnapshotService
from atoll.service.specs import Recipe, SandboxSpecService
from atoll.service.volumes import VolumeService
from atoll.tracing import traced

_SPEC_COMMAND = "spec-command"
"""The command id of the command that a spec starts."""


def _none(_: str) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Workload:
    """What runs in a sandbox from its start on, in place of what its spec says."""

    command: list[str] | str | None = None
    user: str | None = None
    """`UID:GID` of the command. This user also gets the work directory. Ignored where the engine has only one user."""
    variables: Callable[[str], Mapping[str, str]] = _none
    """Returns the variables of the command alone, given the id of its sandbox."""
    ports: list[ExposedPort] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the service itself, which users can neither set nor see."""


class SandboxCreation:
    def __init__(
        self,
        manager: SandboxManager,
        specs: SandboxSpecService,
        snapshots: SnapshotService,
        volumes: VolumeService,
        lookup: SandboxLookup,
        view: SandboxView,
        callbacks: Callbacks,
        telemetry: SandboxTelemetry,
        startups: startup.Startups,
        reservations: Reservations,
    ) -> None:
        self._manager = manager
        self._specs = specs
        self._snapshots = snapshots
        self._volumes = volumes
        self._lookup = lookup
        self._view = view
        self._callbacks = callbacks
        self._telemetry = telemetry
        self._startups = startups
        self._reservations = reservations

    @property
    def quota_refusals(self) -> int:
        """How many requests were refused because of a quota."""
        return self._reservations.refused

    @traced("service.create_sandbox")
    async def start(
        self, caller: Caller, wanted: SandboxRequest, *, key: str | None = None, workload: Workload | None = None
    ) -> SandboxInfo:
        """Start a sandbox from a spec, from the default one, or as the request describes it. A `workload` replaces the
        spec's command and ports.

        The same idempotency key with the same request returns the same sandbox. Raises LimitReachedError when there is
        no room, SandboxSpecNotFoundError, and ConflictError if the name is taken.
        """
        if wanted.settings is not None and wanted.sandbox_spec_id is not None:
            raise ValueError("give either sandbox_spec_id or settings, not both")
        recipe, workload = Recipe(), workload or Workload()
        if wanted.settings is None:
            spec, recipe = await self._specs.recipe(caller, wanted.sandbox_spec_id)
            spec_id, access = spec.id, self._specs.access(caller, wanted.registry_login, spec)
            settings = recipe.settings
        else:
            spec_id, settings = IN_PLACE, wanted.settings
            access = self._specs.access(caller, wanted.registry_login)
            self._specs.check(caller, settings)
        refuse_own_labels(wanted.labels)
        settings = await self._snapshots.resolved(caller, settings)
        task = {} if wanted.task_id is None else {TASK_LABEL: wanted.task_id}
        ports = exposed_ports.merged(recipe.ports(), workload.ports, wanted.exposed_ports)
        labels = {**wanted.labels, **workload.labels, **task, SPEC_LABEL: spec_id, **exposed_ports.labels_of(ports)}
        labels |= _marks(recipe.health if wanted.health is None else wanted.health, ports)
        labels |= {CALLBACK_LABEL: "yes"} if (recipe.callback if wanted.callback is None else wanted.callback) else {}
        labels |= self._telemetry.label(wanted.telemetry)
        variables = exposed_ports.variables_of(ports, settings.env)
        wanted = wanted.model_copy(update={"env": {**variables, **wanted.env}})
        made: list[str] = []
        async with self._kept_if_told(made, told=key is not None):
            key = key or f"once-{secrets.token_hex(16)}"
            async with self._volumes.made_for(caller, settings):
                with pulling_with(access):
                    made.append(await self._create(caller, wanted, settings, labels, key))
            await self._equip(made[0])
            command = recipe.command if workload.command is None else workload.command
            if command is not None:
                await self._start_command(made[0], command, workload)
            return await self._shown(caller, made[0])

    @traced("service.fork_sandbox")
    async def fork(
        self, caller: Caller, sandbox_id: str, wanted: ForkRequest, *, key: str | None = None
    ) -> list[SandboxInfo]:
        """Fork one of the caller's sandboxes: either all forks are made or none. Forks count against quotas like other
        sandboxes."""
        source = await self._lookup.existing(caller, sandbox_id)
        if any(len(each) not in (0, wanted.count) for each in (wanted.names, wanted.labels)):
            raise ValueError("names and labels must be empty or have one entry for each fork")
        for labels in wanted.labels:
            refuse_own_labels(labels)
        no_check = {startup.HEALTH_LABEL: ""} if startup.HEALTH_LABEL in source.labels else {}
        told, key = key is not None, key or f"once-{secrets.token_hex(16)}"
        owner = source.owner or caller.user_id
        mine = await self._manager.list_sandboxes(owner=owner)
        with contextlib.ExitStack() as reserved:
            if owner == caller.user_id:  # an administrator is not bound by the quotas of others
                for number in range(wanted.count):
                    part = fork_key(key, number)
                    held = effective_limits(source.spec, source.details).limits
                    reserved.enter_context(self._reservations.reserve(caller, part, held, mine))
            made = await self._manager.fork_sandbox(
                sandbox_id,
                wanted.count,
                wanted.checkpoint,
                memory=wanted.memory,
                drop_connections=wanted.drop_connections,
                names=wanted.names,
                # The health check needs a process, which a fork may not have.
                labels=[{**labels, **no_check} for labels in wanted.labels or [{}] * wanted.count],
                lifetime=wanted.lifetime,
                key=key,
            )
        async with self._kept_if_told(made, told=told):
            for each in made:
                await self._equip(each)
            return [await self._shown(caller, each) for each in made]

    @contextlib.asynccontextmanager
    async def _kept_if_told(self, made: list[str], *, told: bool) -> AsyncIterator[None]:
        """Delete what was made if the caller is gone before the answer, unless `told`: without an idempotency key the
        caller can never learn its id."""
        try:
            yield
        except asyncio.CancelledError:
            for sandbox_id in () if told else made:
                with contextlib.suppress(SandboxError):
                    await finish(self._manager.delete_sandbox(sandbox_id))
            raise

    async def _create(
        self,
        caller: Caller,
        wanted: SandboxRequest,
        settings: SandboxSettings,
        labels: dict[str, str],
        key: str,
    ) -> str:
        spec = settings.spec()
        size = len(settings.model_dump_json()) + sum(len(name) + len(value) for name, value in wanted.env.items())
        if size > MAX_SETTINGS:
            raise SpecError(f"the settings and variables have {size:,} characters; the limit is {MAX_SETTINGS:,}")
        defaults = await self._manager.default_limits(spec)
        spec = spec.model_copy(update={"limits": self._specs.ceilings.applied(caller, spec.limits, defaults)})
        mine = await self._manager.list_sandboxes(owner=caller.user_id)
        with self._reservations.reserve(caller, key, spec.limits.over(defaults), mine):
            return await self._manager.create_sandbox(
                spec,
                name=wanted.name,
                owner=caller.user_id,
                labels=labels,
                env=wanted.env,
                lifetime=wanted.lifetime,
                key=key,
                idle_timeout=_shorter(wanted.idle_timeout, self._manager.idle_timeout),
                on_idle=wanted.on_idle,
                services=exposed_ports.numbers_of(labels),
            )

    async def _equip(self, sandbox_id: str) -> None:
        """Set the variables that depend on the id of a new sandbox, and begin its health check. May be repeated."""
        record = await self._manager.recall(sandbox_id)
        if record is None:
            return
        callback, variables = CALLBACK_LABEL in record.labels, self._telemetry.variables(record)
        if callback or f"{exposed_ports.PORT_LABEL}{exposed_ports.VSCODE}" in record.labels:
            variables |= self._callbacks.variables(record, url=callback)
        if variables:
            await self._manager.update(sandbox_id, lambda now: {"env": {**now.env, **variables}})
        if startup.is_waited_for(record):
            self._startups.begin(sandbox_id)

    async def _start_command(self, sandbox_id: str, command: list[str] | str, workload: Workload) -> None:
        sandbox = await self._manager.get_sandbox(sandbox_id)
        user = await sandbox.give_work_dir(workload.user) if workload.user is not None else None
        env = workload.variables(sandbox_id)
        # Because of its fixed name the command runs only once, however often the request is repeated.
        await sandbox.start_for_spec(StartCommand.once(_SPEC_COMMAND, command, user=user, env=dict(env)))
        await self._manager.watch_command(sandbox_id, _SPEC_COMMAND)

    async def _shown(self, caller: Caller, sandbox_id: str) -> SandboxInfo:
        return self._view.info(caller, await self._lookup.existing(caller, sandbox_id))


def _marks(check: HealthCheck | None, ports: list[ExposedPort]) -> dict[str, str]:
    return {} if check is None else startup.label_of(check, exposed_ports.port_of(check, ports))


def _shorter(wanted: float | None, most: float) -> float | None:
    return None if wanted is None else min(wanted, most)
