"""Sandboxes as the users of a server see them: theirs, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Literal

from atoll.errors import SandboxError, SandboxGoneError, SandboxNotFoundError, SandboxTimeoutError, SpecError
from atoll.finishing import finish
from atoll.images.access import pulling_with
from atoll.manager import Event, ManagedSandbox, PausedBy, Record, SandboxManager, fork_key
from atoll.manus import TASK_LABEL
from atoll.model import Cause, State, effective_limits
from atoll.service import exposed_ports, lookup, startup
from atoll.service.callbacks import CALLBACK_LABEL, Callbacks
from atoll.service.hidden_paths import without_paths
from atoll.service.identity import SESSION, Caller, Scope
from atoll.service.keys import Identities
from atoll.service.models import (
    MAX_SETTINGS,
    CommandEndInfo,
    ExposedPort,
    ExposedUrl,
    ForkStart,
    HealthCheck,
    ResourcesInUse,
    SandboxInfo,
    SandboxPage,
    SandboxSettings,
    SandboxStart,
    SandboxStatus,
)
from atoll.service.quotas import Reservations
from atoll.service.refusals import ForbiddenError, NotAuthenticatedError
from atoll.service.session_keys import Grant, SessionKeys
from atoll.service.snapshots import SnapshotService, shown_image
from atoll.service.specs import Recipe, SandboxSpecService
from atoll.service.workload import Workload
from atoll.workers import in_portions

SPEC_LABEL = "sandbox_spec_id"
SPEC_COMMAND = "spec-command"
"""The id of the command that a sandbox of a spec is started with."""
_OWN_LABELS = (
    SPEC_LABEL,
    exposed_ports.PORT_LABEL,
    *startup.HEALTH_LABELS,
    CALLBACK_LABEL,
    "runtime_session_id",
)
_IN_PLACE = ""
"""The spec id of a sandbox that was described on the spot."""
_MOST_OWNERS = 100_000


class SandboxService:
    """Everything takes the caller, and what is not the caller's is as if it were not there: SandboxNotFoundError."""

    def __init__(
        self,
        manager: SandboxManager,
        specs: SandboxSpecService,
        session_keys: SessionKeys,
        identities: Identities,
        *,
        public_url: str = "",
        max_snapshots: int = 100,
        ports_domain: str = "localhost",
        exposed_url_pattern: str | None = None,
    ) -> None:
        self.manager = manager
        self.snapshots = SnapshotService(manager, most=max_snapshots)
        self.specs = specs
        self._session_keys = session_keys
        self._identities = identities
        self._urls = exposed_ports.PortUrls(public_url, ports_domain, exposed_url_pattern)
        self.callbacks = Callbacks(manager, session_keys, identities, public_url)
        self.startups = startup.Startups(manager)
        self._reservations = Reservations()
        self._owners: dict[str, str | None] = {}
        """Whose a sandbox is never changes, so it is looked up once."""

    # --- finding --------------------------------------------------------------------------------------------------

    async def search_sandboxes(
        self,
        caller: Caller,
        page_id: str | None = None,
        limit: int = 100,
        *,
        status: SandboxStatus | None = None,
        name: str | None = None,
        labels: dict[str, str] | None = None,
        ended: bool = False,
    ) -> SandboxPage:
        """The newest first. `page_id` is where the page before ended; one that makes no sense is a ValueError."""
        after = _cursor(page_id) if page_id is not None else None
        if ended:
            records = []
            if status in (None, SandboxStatus.MISSING):
                place = None if after is None else (-after[0], after[1])
                records = await self.manager.search_ended(
                    owner=caller.owner, name=name, labels=labels, after=place, limit=limit + 1
                )
        else:
            records = await self.manager.list_sandboxes(owner=caller.owner, name=name, labels=labels)
            records = sorted(records, key=_newest_first)
        if status is not None:
            records = [record for record in records if startup.status_of(record)[0] is status]
        if after is not None:
            records = [record for record in records if _newest_first(record) > after]
        page = records[:limit]
        more = _page_id(page[-1]) if len(records) > limit else None
        items = await in_portions(lambda record: self.info(caller, record), page)
        return SandboxPage(items=items, next_page_id=more)

    async def get_sandbox(self, caller: Caller, sandbox_id: str) -> SandboxInfo | None:
        """Of one that exists, by its id, its name or its task; the engine is asked how it is."""
        sandbox_id = await self.resolve(caller, sandbox_id)
        record = await self._record(caller, sandbox_id)
        if record is None or record.ended_at is not None:
            return None
        return self.info(caller, record)

    async def batch_get_sandboxes(self, caller: Caller, sandbox_ids: list[str]) -> list[SandboxInfo | None]:
        """In the order asked for; None for what is not there."""
        return await asyncio.gather(*(self.get_sandbox(caller, sandbox_id) for sandbox_id in sandbox_ids))

    async def describe(self, caller: Caller, sandbox_id: str, *, resources: bool = False) -> SandboxInfo:
        """SandboxNotFoundError, or SandboxGoneError with the cause for one of the caller's that has ended."""
        record = await self._existing(caller, sandbox_id)
        info = self.info(caller, record)
        if resources and record.state is State.RUNNING:
            used = await (await self.manager.get_sandbox(sandbox_id)).stats()
            info = info.model_copy(update={"resources": ResourcesInUse.model_validate(used)})
        return info

    async def settings(self, caller: Caller, sandbox_id: str) -> SandboxSettings:
        """What it was made from."""
        record = await self._existing(caller, sandbox_id)
        made = SandboxSettings.of(record.spec)
        return made.model_copy(update={"image": shown_image(made.image, record.owner)})

    async def sandbox(self, caller: Caller, sandbox_id: str) -> ManagedSandbox:
        """To work in it. A session key is good only while it runs; anybody else's use wakes one that sleeps."""
        sandbox_id = await self.resolve(caller, sandbox_id)
        if not await self._is_mine(caller, sandbox_id):
            raise SandboxNotFoundError(f"Sandbox {sandbox_id[:128]} not found")
        try:
            return await self.manager.get_sandbox(sandbox_id)
        except SandboxNotFoundError:
            await self._existing(caller, sandbox_id)
            raise

    async def resolve(self, caller: Caller, text: str) -> str:
        """The id of the caller's sandbox of that id, name or task; else the text itself."""
        return await lookup.resolve(self.manager, caller, text, self._is_mine)

    # --- living ---------------------------------------------------------------------------------------------------

    async def start_sandbox(
        self, caller: Caller, wanted: SandboxStart, *, key: str | None = None, workload: Workload | None = None
    ) -> SandboxInfo:
        """A sandbox of a spec, of the default one, or as described on the spot. A `workload` is in place of the spec's.

        With the same idempotency key and the same request it is the same sandbox. LimitReachedError when there is no
        room, SandboxSpecNotFoundError, ConflictError if the name is taken.
        """
        if wanted.settings is not None and wanted.sandbox_spec_id is not None:
            raise ValueError("give either sandbox_spec_id or settings, not both")
        recipe, workload = Recipe(), workload or Workload()
        if wanted.settings is None:
            spec, recipe = await self.specs.recipe(caller, wanted.sandbox_spec_id)
            spec_id, access = spec.id, self.specs.access(caller, wanted.registry_login, spec)
            settings = recipe.settings
        else:
            spec_id, settings = _IN_PLACE, wanted.settings
            access = self.specs.access(caller, wanted.registry_login)
            self.specs.check(caller, settings)
        _refuse_own(wanted.labels)
        settings = await self.snapshots.resolved(caller, settings)
        task = {} if wanted.task_id is None else {TASK_LABEL: wanted.task_id}
        ports = exposed_ports.merged(recipe.ports(), workload.ports, wanted.exposed_ports)
        labels = {**wanted.labels, **workload.labels, **task, SPEC_LABEL: spec_id, **exposed_ports.labels_of(ports)}
        labels |= _marks(recipe.health if wanted.health is None else wanted.health, ports)
        labels |= {CALLBACK_LABEL: "yes"} if (recipe.callback if wanted.callback is None else wanted.callback) else {}
        variables = exposed_ports.variables_of(ports, settings.env)
        wanted = wanted.model_copy(update={"env": {**variables, **wanted.env}})
        made: list[str] = []
        async with self._kept_if_told(made, told=key is not None):
            key = key or f"once-{secrets.token_hex(16)}"
            with pulling_with(access):
                made.append(await self._create(caller, wanted, settings, labels, key))
            await self._equip(made[0])
            command = recipe.command if workload.command is None else workload.command
            if command is not None:
                await self._start_command(made[0], command, workload)
            return await self.describe(caller, made[0])

    async def fork_sandbox(
        self, caller: Caller, sandbox_id: str, wanted: ForkStart, *, key: str | None = None
    ) -> list[SandboxInfo]:
        """New sandboxes that begin as one of the caller's is, and count as any others: all, or none."""
        source = await self._existing(caller, sandbox_id)
        if any(len(each) not in (0, wanted.count) for each in (wanted.names, wanted.labels)):
            raise ValueError("names and labels are one for each of the forks, or none")
        for labels in wanted.labels:
            _refuse_own(labels)
        no_check = {startup.HEALTH_LABEL: ""} if startup.HEALTH_LABEL in source.labels else {}
        told, key = key is not None, key or f"once-{secrets.token_hex(16)}"
        owner = source.owner or caller.user_id
        mine = await self.manager.list_sandboxes(owner=owner)
        with contextlib.ExitStack() as reserved:
            if owner == caller.user_id:  # an administrator is not bound by the quotas of others
                for number in range(wanted.count):
                    part = fork_key(key, number)
                    held = effective_limits(source.spec, source.details).limits
                    reserved.enter_context(self._reservations.reserve(caller, part, held, mine))
            made = await self.manager.fork_sandbox(
                sandbox_id,
                wanted.count,
                wanted.checkpoint,
                memory=wanted.memory,
                drop_connections=wanted.drop_connections,
                names=wanted.names,
                # What its health check asks for is a process, which a fork may not have.
                labels=[{**labels, **no_check} for labels in wanted.labels or [{}] * wanted.count],
                lifetime=wanted.lifetime_s,
                key=key,
            )
        async with self._kept_if_told(made, told=told):
            for each in made:
                await self._equip(each)
            return [await self.describe(caller, each) for each in made]

    @contextlib.asynccontextmanager
    async def _kept_if_told(self, made: list[str], *, told: bool) -> AsyncIterator[None]:
        """Whoever is gone before the answer knows no id, and without an idempotency key never will: nothing stays."""
        try:
            yield
        except asyncio.CancelledError:
            for sandbox_id in () if told else made:
                with contextlib.suppress(SandboxError):
                    await finish(self.manager.delete_sandbox(sandbox_id))
            raise

    async def pause_sandbox(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        memory: Literal["ram", "disk"] = "ram",
        drop_connections: bool = False,
    ) -> bool:
        """False: there is none."""
        if await self._gone(caller, sandbox_id):
            return False
        await self.manager.pause_sandbox(sandbox_id, memory=memory, drop_connections=drop_connections)
        return True

    async def resume_sandbox(self, caller: Caller, sandbox_id: str) -> bool:
        if await self._gone(caller, sandbox_id):
            return False
        await self.manager.resume_sandbox(sandbox_id)
        return True

    async def delete_sandbox(self, caller: Caller, sandbox_id: str) -> bool:
        if await self._gone(caller, sandbox_id):
            return False
        return await self.manager.delete_sandbox(sandbox_id)

    async def extend(self, caller: Caller, sandbox_id: str, lifetime_s: float) -> SandboxInfo:
        """So long from now, but never longer than the server allows."""
        await self._existing(caller, sandbox_id)
        return self.info(caller, await self.manager.extend_lifetime(sandbox_id, lifetime_s))

    async def keep_alive(self, caller: Caller, sandbox_id: str, seconds: float) -> SandboxInfo:
        """Count the sandbox as in use for this many seconds from now."""
        await self._existing(caller, sandbox_id)
        return self.info(caller, await self.manager.keep_alive(sandbox_id, seconds))

    async def pause_old_sandboxes(self, caller: Caller, max_num_sandboxes: int) -> list[str]:
        """Pause the oldest that run until so many are left; the ids of those paused."""
        if max_num_sandboxes <= 0:
            raise ValueError("max_num_sandboxes must be greater than 0")
        running = await self.manager.list_sandboxes(owner=caller.owner, state=State.RUNNING)
        paused: list[str] = []
        for record in sorted(running, key=lambda record: record.created_at):
            if len(running) - len(paused) <= max_num_sandboxes:
                break
            with contextlib.suppress(SandboxError):
                await self.manager.pause_sandbox(record.id)
                paused.append(record.id)
        return paused

    async def wait_for_sandbox_running(self, caller: Caller, sandbox_id: str, timeout: float = 120) -> SandboxInfo:
        """SandboxGoneError if it ends instead, SandboxTimeoutError if it takes longer."""
        deadline = time.monotonic() + timeout
        while True:
            record = await self._existing(caller, sandbox_id)
            status, reason = startup.status_of(record)
            if status is SandboxStatus.RUNNING:
                return self.info(caller, record)
            if status is SandboxStatus.ERROR:
                raise SandboxGoneError(f"sandbox {sandbox_id} failed: {reason}", cause=record.cause or "lost")
            left = deadline - time.monotonic()
            if left <= 0:
                raise SandboxTimeoutError(f"sandbox {sandbox_id} is {status} after {timeout:g} s")
            if record.state is State.RUNNING:
                await self.startups.changed(min(left, 1.0))
                continue
            with contextlib.suppress(SandboxTimeoutError):
                await self.manager.wait_until(sandbox_id, State.RUNNING, min(left, 1.0))

    # --- knowing --------------------------------------------------------------------------------------------------

    async def events(
        self,
        caller: Caller,
        *,
        after: int = 0,
        sandbox_id: str | None = None,
        limit: int = 100,
        kind: str | None = None,
    ) -> tuple[list[Event], int]:
        """What happened to the caller's sandboxes, oldest first, and the number to ask from next."""
        if sandbox_id is not None:
            await self._known(caller, sandbox_id)
        found = await self.manager.events(
            after=after, sandbox_id=sandbox_id, owner=caller.owner, limit=limit, kind=kind
        )
        shown = [dataclasses.replace(event, reason=without_paths(event.reason)) for event in found]
        return shown, found[-1].number if found else after

    def metrics(self) -> str:
        """For Prometheus."""
        return f"# TYPE atoll_quota_refusals_total counter\natoll_quota_refusals_total {self._reservations.refused}\n"

    async def by_session_key(self, key: str) -> Caller:
        """Whoever holds the session key of a sandbox that runs. NotAuthenticatedError otherwise, whatever it is."""
        claims = self._session_keys.claims(key)
        with contextlib.suppress(SandboxNotFoundError, NotAuthenticatedError):
            record = await self.manager.describe(claims[0]) if claims is not None else None
            if (
                claims is not None
                and record is not None
                and self._session_keys.is_good(key, record.owner, time.time())
                and _answers(record)
            ):
                return await self._bearer(record, claims[1])
        raise NotAuthenticatedError(
            "invalid session key",
            hint="A session key ends with its sandbox and with the credential it was shown to.",
        )

    async def get_sandbox_by_session_api_key(self, key: str) -> SandboxInfo:
        """The sandbox that a session key is for, while it runs. NotAuthenticatedError otherwise, whatever it is."""
        caller = await self.by_session_key(key)
        info = await self.get_sandbox(caller, caller.sandbox_id or "")
        if info is None or info.status is not SandboxStatus.RUNNING:
            raise NotAuthenticatedError("invalid session key", hint="A session key is good while its sandbox runs.")
        return info

    def inside_key(self, sandbox_id: str, owner: str | None) -> str:
        """What a program in the sandbox may know its users by."""
        return self._session_keys.inside_key(sandbox_id, owner)

    async def need_exposed(self, caller: Caller, sandbox_id: str, port: int) -> None:
        """Raises ForbiddenError for a port that is not exposed."""
        record = await self._existing(caller, sandbox_id)
        if port not in exposed_ports.numbers_of(record.labels):
            raise ForbiddenError(
                f"port {port} of this sandbox is not exposed", hint="POST …/ports exposes one while it runs."
            )

    async def expose_port(self, caller: Caller, sandbox_id: str, port: ExposedPort) -> ExposedUrl:
        """Expose a port of a sandbox that exists. A port of the same name is replaced. Commands that are started
        afterwards have the variable `NAME=PORT`."""
        await self._existing(caller, sandbox_id)

        def change(record: Record) -> dict[str, object]:
            labels = exposed_ports.with_port(record.labels, port)
            variables = exposed_ports.variables_of([port], record.spec.env)
            services = tuple(exposed_ports.numbers_of(labels))
            return {"labels": labels, "services": services, "env": {**record.env, **variables}}

        record = await self.manager.update(sandbox_id, change)
        return next(url for url in self._shown_urls(caller, record) if url.name == port.name)

    async def hide_port(self, caller: Caller, sandbox_id: str, port: int) -> None:
        """Expose it no longer, under any name. May be repeated."""
        await self._existing(caller, sandbox_id)

        def change(record: Record) -> dict[str, object]:
            labels = exposed_ports.without_port(record.labels, port)
            return {"labels": labels, "services": tuple(exposed_ports.numbers_of(labels))}

        await self.manager.update(sandbox_id, change)

    async def exposed_urls(self, caller: Caller, sandbox_id: str) -> list[ExposedUrl]:
        return self._shown_urls(caller, await self._existing(caller, sandbox_id))

    async def port_link(self, caller: Caller, sandbox_id: str, port: int, until: int) -> tuple[str, str | None, int]:
        """Links to an exposed port that need no other credential: by path, and by host name if there is one. Also their
        expiry, which is no later than that of the caller's own credential."""
        await self.need_exposed(caller, sandbox_id, port)
        until = until if caller.expires_at is None else min(until, int(caller.expires_at))
        mark = self._session_keys.link(sandbox_id, port, Grant(caller.key_id, until))
        host = self._urls.by_host(sandbox_id, port)
        return (
            f"{self._urls.by_path(sandbox_id, port)}~{mark}/",
            f"{host}.atoll/~{mark}/" if host else None,
            until,
        )

    async def by_port_link(self, sandbox_id: str, port: int, mark: str) -> Caller:
        """Whoever holds such a link. NotAuthenticatedError otherwise, whatever it is."""
        with contextlib.suppress(SandboxNotFoundError, NotAuthenticatedError):
            grant = self._session_keys.link_grant(mark, sandbox_id, port, time.time())
            if grant is not None:
                record = await self.manager.describe(sandbox_id)
                if _answers(record):
                    return await self._bearer(record, grant)
        raise NotAuthenticatedError(
            "invalid link", hint="The link, its sandbox or the credential that made it may have expired or ended."
        )

    async def by_public_port(self, sandbox_id: str, port: int) -> Caller | None:
        """Whoever asks for a port that its spec made public. None: it is not, or its sandbox does not run."""
        with contextlib.suppress(SandboxNotFoundError, NotAuthenticatedError):
            record = await self.manager.describe(sandbox_id)
            if _answers(record) and any(
                each.public and each.port == port for each in exposed_ports.ports_of(record.labels)
            ):
                await self._identities.vouch(record.owner)
                # Strangers have a rate of their own: they cannot use up the owner's.
                return Caller(f"~{record.id}", SESSION, sandbox_id=record.id)
        return None

    def info(self, caller: Caller, record: Record) -> SandboxInfo:
        status, reason = startup.status_of(record)
        running = status is SandboxStatus.RUNNING
        held = effective_limits(record.spec, record.details)
        labels = {name: value for name, value in record.labels.items() if not name.startswith(_OWN_LABELS)}
        return SandboxInfo(
            id=record.id,
            created_by_user_id=record.owner,
            sandbox_spec_id=record.labels.get(SPEC_LABEL, _IN_PLACE),
            status=status,
            session_api_key=self._session_key(caller, record) if running else None,
            exposed_urls=self._shown_urls(caller, record) if running else None,
            created_at=_moment(record.created_at) or datetime.now(UTC),
            name=record.name,
            labels=labels,
            state=record.state,
            cause=record.cause,
            reason=without_paths(reason),
            engine=record.engine,
            image=shown_image(record.spec.image, record.owner),
            isolation=record.spec.isolation,
            work_dir=record.spec.work_dir,
            limits=record.spec.limits,
            effective_limits=held.limits,
            limits_left_out=list(held.left_out),
            expires_at=_moment(record.expires_at),
            leased_until=_moment(record.leased_until),
            paused_by=record.paused_by,
            command_end=CommandEndInfo.of(record.command_end) if record.command_end is not None else None,
            ended_at=_moment(record.ended_at),
        )

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _create(
        self,
        caller: Caller,
        wanted: SandboxStart,
        settings: SandboxSettings,
        labels: dict[str, str],
        key: str,
    ) -> str:
        spec = settings.spec()
        size = len(settings.model_dump_json()) + sum(len(name) + len(value) for name, value in wanted.env.items())
        if size > MAX_SETTINGS:
            raise SpecError(f"the settings and variables have {size:,} characters; the limit is {MAX_SETTINGS:,}")
        defaults = await self.manager.default_limits(spec)
        spec = spec.model_copy(update={"limits": self.specs.ceilings.applied(caller, spec.limits, defaults)})
        mine = await self.manager.list_sandboxes(owner=caller.user_id)
        with self._reservations.reserve(caller, key, spec.limits.over(defaults), mine):
            return await self.manager.create_sandbox(
                spec,
                name=wanted.name,
                owner=caller.user_id,
                labels=labels,
                env=wanted.env,
                lifetime=wanted.lifetime_s,
                key=key,
                idle_timeout=_shorter(wanted.idle_timeout_s, self.manager.idle_timeout),
                on_idle=wanted.on_idle,
                services=exposed_ports.numbers_of(labels),
            )

    async def _equip(self, sandbox_id: str) -> None:
        """What a new sandbox gets that depends on its id, and the watch over its start. May be repeated."""
        record = await self.manager.recall(sandbox_id)
        if record is None:
            return
        callback = CALLBACK_LABEL in record.labels
        if callback or f"{exposed_ports.PORT_LABEL}{exposed_ports.VSCODE}" in record.labels:
            variables = self.callbacks.variables(record, url=callback)
            await self.manager.update(sandbox_id, lambda now: {"env": {**now.env, **variables}})
        if startup.is_waited_for(record):
            self.startups.begin(sandbox_id)

    async def _start_command(self, sandbox_id: str, command: list[str] | str, workload: Workload) -> None:
        sandbox = await self.manager.get_sandbox(sandbox_id)
        user = await sandbox.give_work_dir(workload.user) if workload.user is not None else None
        env = workload.variables(sandbox_id)
        # The id makes it run once, however often the request is repeated.
        await (await sandbox.start(command, command_id=SPEC_COMMAND, user=user, env=env)).detach()
        await self.manager.watch_command(sandbox_id, SPEC_COMMAND)

    def _session_key(self, caller: Caller, record: Record) -> str | None:
        """Only for callers who may use the sandbox without it, and valid as long as they may."""
        if Scope.USE not in caller.scopes or (caller.user_id != record.owner and caller.key_id is None):
            return None
        until = None if caller.expires_at is None else int(caller.expires_at)
        return self._session_keys.key(record.id, record.owner, Grant(caller.key_id, until))

    async def _bearer(self, record: Record, grant: Grant) -> Caller:
        """Raises NotAuthenticatedError if the owner is locked out, or the credential behind it has ended."""
        await self._identities.vouch(record.owner, grant.key_id)
        return Caller(record.owner or "", SESSION, sandbox_id=record.id, key_id=grant.key_id, expires_at=grant.until)

    async def _record(self, caller: Caller, sandbox_id: str) -> Record | None:
        try:
            record = await self.manager.describe(sandbox_id)
        except SandboxNotFoundError:
            return None
        if len(self._owners) >= _MOST_OWNERS:
            self._owners.clear()
        self._owners[record.id] = record.owner
        return record if caller.may_see(record.id, record.owner) else None

    async def _known(self, caller: Caller, sandbox_id: str) -> Record:
        record = await self._record(caller, sandbox_id)
        if record is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id[:128]} not found")
        return record

    async def _existing(self, caller: Caller, sandbox_id: str) -> Record:
        record = await self._known(caller, sandbox_id)
        if record.ended_at is not None:
            raise _gone(record)
        return record

    async def _gone(self, caller: Caller, sandbox_id: str) -> bool:
        record = await self._record(caller, sandbox_id)
        return record is None or record.ended_at is not None

    async def _is_mine(self, caller: Caller, sandbox_id: str) -> bool:
        if sandbox_id in self._owners:
            return caller.may_see(sandbox_id, self._owners[sandbox_id])
        return await self._record(caller, sandbox_id) is not None

    def _shown_urls(self, caller: Caller, record: Record) -> list[ExposedUrl]:
        """Whoever may use the sandbox sees the token of VS Code, which programs inside know as well."""
        has_vscode = f"{exposed_ports.PORT_LABEL}{exposed_ports.VSCODE}" in record.labels
        may_use = has_vscode and self._session_key(caller, record) is not None
        return self._urls.of(record, self.callbacks.inside_key(record) if may_use else None)


def _marks(check: HealthCheck | None, ports: list[ExposedPort]) -> dict[str, str]:
    return {} if check is None else startup.label_of(check, exposed_ports.port_of(check, ports))


def _shorter(wanted: float | None, most: float) -> float | None:
    return None if wanted is None else min(wanted, most)


def _answers(record: Record) -> bool:
    """It runs, or will as soon as it is used."""
    asleep = record.state is State.PAUSED and record.paused_by in (PausedBy.IDLE, PausedBy.ROOM)
    return record.state is State.RUNNING or asleep


def _gone(record: Record) -> SandboxGoneError:
    cause = record.cause or Cause.LOST
    return SandboxGoneError(f"sandbox {record.id} has ended: {record.reason or cause}", cause=cause)


def _refuse_own(labels: dict[str, str]) -> None:
    for label in labels:
        if label.startswith(_OWN_LABELS):
            raise ValueError(f"the label {label!r} is the service's own")


def _newest_first(record: Record) -> tuple[float, str]:
    return -record.created_at, record.id


def _page_id(record: Record) -> str:
    return f"{record.created_at!r}~{record.id}"


def _cursor(page_id: str) -> tuple[float, str]:
    moment, tilde, sandbox_id = page_id.partition("~")
    try:
        if not tilde:
            raise ValueError
        return -float(moment), sandbox_id
    except ValueError:
        raise ValueError("this page_id was not given by a page before") from None


def _moment(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None
