"""Sandboxes as the users of a server see them: each user sees only their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Literal

from atoll.errors import SandboxError, SandboxGoneError, SandboxTimeoutError
from atoll.manager import Event, ManagedSandbox, Record, SandboxManager
from atoll.manager.metrics import counter
from atoll.model import State
from atoll.model.state import SandboxStatus
from atoll.resources import VolumeSizes
from atoll.service import exposed_ports, startup
from atoll.service.callback_messages import Callbacks
from atoll.service.caller import Caller
from atoll.service.failures import NotAuthenticatedError, without_paths
from atoll.service.identities import Identities
from atoll.service.limit_changes import LimitChanges
from atoll.service.models.sandbox_info import ResourcesInUse, SandboxInfo, SandboxPage
from atoll.service.models.sandbox_request import SandboxSettings
from atoll.service.port_exposure import PortExposure
from atoll.service.quotas import Reservations
from atoll.service.sandbox_creation import SandboxCreation
from atoll.service.sandbox_credentials import SandboxCredentials
from atoll.service.sandbox_lookup import SandboxLookup
from atoll.service.sandbox_telemetry import SandboxTelemetry
from atoll.service.sandbox_view import SandboxView
from atoll.service.session_keys import SessionKeys
from atoll.service.snapshots import SnapshotService, shown_image
from atoll.service.specs import SandboxSpecService
from atoll.service.volumes import VolumeService
from atoll.tracing import traced
from atoll.workers import in_portions

if TYPE_CHECKING:
    from prometheus_client import Metric


class SandboxService:
    """Finds sandboxes and changes their state. Its parts create sandboxes, expose ports and keep snapshots.

    Every call takes the caller. For a caller, a sandbox of another user does not exist: SandboxNotFoundError.
    """

    def __init__(
        self,
        manager: SandboxManager,
        specs: SandboxSpecService,
        session_keys: SessionKeys,
        identities: Identities,
        *,
        public_url: str = "",
        max_snapshots: int = 100,
        volumes: VolumeService | None = None,
        ports_domain: str = "localhost",
        exposed_url_pattern: str | None = None,
        relays_telemetry: bool = False,
    ) -> None:
        self.manager = manager
        self.specs = specs
        urls = exposed_ports.PortUrls(public_url, ports_domain, exposed_url_pattern)
        self.snapshots = SnapshotService(manager, most=max_snapshots)
        self.volumes = volumes or VolumeService(manager, VolumeSizes())
        self.callbacks = Callbacks(manager, session_keys, identities, public_url)
        self.telemetry = SandboxTelemetry(self.callbacks, public_url, is_on=relays_telemetry)
        self.startups = startup.Startups(manager)
        self.credentials = SandboxCredentials(manager, session_keys, identities)
        self.view = SandboxView(self.credentials, urls)
        self._lookup = lookup = SandboxLookup(manager)
        self.ports = PortExposure(manager, lookup, self.view, self.credentials, urls)
        self.reservations = reservations = Reservations()
        self.limits = LimitChanges(manager, lookup, specs.ceilings, reservations)
        self.creation = SandboxCreation(
            manager,
            specs,
            self.snapshots,
            self.volumes,
            lookup,
            self.view,
            self.callbacks,
            self.telemetry,
            self.startups,
            reservations,
        )

    # --- finding --------------------------------------------------------------------------------------------------

    @traced("service.search_sandboxes")
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
        """Return one page of sandboxes, newest first. `page_id` says where the previous page ended; ValueError if it is
        invalid."""
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
        items = await in_portions(lambda record: self.view.info(caller, record), page)
        return SandboxPage(items=items, next_page_id=more)

    async def get_sandbox(self, caller: Caller, sandbox_id: str) -> SandboxInfo | None:
        """Return an existing sandbox by its id, name or task. The engine is asked for its state."""
        sandbox_id = await self.resolve(caller, sandbox_id)
        record = await self._lookup.record(caller, sandbox_id)
        if record is None or record.ended_at is not None:
            return None
        return self.view.info(caller, record)

    async def batch_get_sandboxes(self, caller: Caller, sandbox_ids: list[str]) -> list[SandboxInfo | None]:
        """Return sandboxes in the order of the ids; None for those that do not exist."""
        return await asyncio.gather(*(self.get_sandbox(caller, sandbox_id) for sandbox_id in sandbox_ids))

    @traced("service.describe")
    async def describe(self, caller: Caller, sandbox_id: str, *, resources: bool = False) -> SandboxInfo:
        """Return a sandbox. Raises SandboxNotFoundError, or SandboxGoneError with the cause if the sandbox has
        ended."""
        record = await self._lookup.existing(caller, sandbox_id)
        info = self.view.info(caller, record)
        if resources and record.state is State.RUNNING:
            used = await (await self.manager.get_sandbox(sandbox_id)).stats()
            info = info.model_copy(update={"resources": ResourcesInUse.model_validate(used)})
        return info

    async def settings(self, caller: Caller, sandbox_id: str) -> SandboxSettings:
        """Return what the sandbox was made from."""
        record = await self._lookup.existing(caller, sandbox_id)
        made = SandboxSettings.of(record.spec)
        return made.model_copy(update={"image": shown_image(made.image, record.owner)})

    async def sandbox(self, caller: Caller, sandbox_id: str) -> ManagedSandbox:
        """Return a sandbox to work in. Any use resumes a sandbox that the server paused."""
        return await self._lookup.sandbox(caller, sandbox_id)

    async def resolve(self, caller: Caller, text: str) -> str:
        """Return the id of the caller's sandbox with that id, name or task; else the text itself."""
        return await self._lookup.resolve(caller, text)

    # --- living ---------------------------------------------------------------------------------------------------

    @traced("service.pause_sandbox")
    async def pause_sandbox(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        memory: Literal["ram", "disk"] = "ram",
        drop_connections: bool = False,
    ) -> bool:
        """Pause a sandbox. Return False if there is no such sandbox."""
        if await self._lookup.is_gone(caller, sandbox_id):
            return False
        await self.manager.pause_sandbox(sandbox_id, memory=memory, drop_connections=drop_connections)
        return True

    @traced("service.resume_sandbox")
    async def resume_sandbox(self, caller: Caller, sandbox_id: str) -> bool:
        if await self._lookup.is_gone(caller, sandbox_id):
            return False
        await self.manager.resume_sandbox(sandbox_id)
        return True

    @traced("service.delete_sandbox")
    async def delete_sandbox(self, caller: Caller, sandbox_id: str) -> bool:
        if await self._lookup.is_gone(caller, sandbox_id):
            return False
        return await self.manager.delete_sandbox(sandbox_id)

    @traced("service.extend")
    async def extend(self, caller: Caller, sandbox_id: str, lifetime_s: float) -> SandboxInfo:
        """Set the lifetime in seconds from now, up to what the server allows."""
        await self._lookup.existing(caller, sandbox_id)
        return self.view.info(caller, await self.manager.extend_lifetime(sandbox_id, lifetime_s))

    @traced("service.keep_alive")
    async def keep_alive(self, caller: Caller, sandbox_id: str, seconds: float) -> SandboxInfo:
        """Count the sandbox as in use for this many seconds from now."""
        await self._lookup.existing(caller, sandbox_id)
        return self.view.info(caller, await self.manager.keep_alive(sandbox_id, seconds))

    @traced("service.pause_old_sandboxes")
    async def pause_old_sandboxes(self, caller: Caller, max_num_sandboxes: int) -> list[str]:
        """Pause the oldest running sandboxes until only `max_num_sandboxes` run. Return the ids of those paused."""
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

    @traced("service.wait_for_sandbox_running")
    async def wait_for_sandbox_running(self, caller: Caller, sandbox_id: str, timeout: float = 120) -> SandboxInfo:
        """Wait until the sandbox is running. Raises SandboxGoneError if it ends instead, SandboxTimeoutError if it
        takes longer."""
        deadline = time.monotonic() + timeout
        while True:
            record = await self._lookup.existing(caller, sandbox_id)
            status, reason = startup.status_of(record)
            if status is SandboxStatus.RUNNING:
                return self.view.info(caller, record)
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

    @traced("service.events")
    async def events(
        self,
        caller: Caller,
        *,
        after: int = 0,
        sandbox_id: str | None = None,
        limit: int = 100,
        kind: str | None = None,
    ) -> tuple[list[Event], int]:
        """Return what happened to the caller's sandboxes, oldest first, and the number to continue from."""
        if sandbox_id is not None:
            await self._lookup.known(caller, sandbox_id)
        found = await self.manager.events(
            after=after, sandbox_id=sandbox_id, owner=caller.owner, limit=limit, kind=kind
        )
        shown = [dataclasses.replace(event, reason=without_paths(event.reason)) for event in found]
        return shown, found[-1].number if found else after

    def metric_families(self) -> list[Metric]:
        """Return the service's own figures as metric families of prometheus-client."""
        meaning = "Sandboxes that were not created because a quota of their user was reached."
        return [counter("atoll_quota_refusals", meaning, {"": self.creation.quota_refusals})]

    async def get_sandbox_by_session_api_key(self, key: str) -> SandboxInfo:
        """Return the running sandbox of a session key. Raise the same NotAuthenticatedError for any other text."""
        caller = await self.credentials.by_session_key(key)
        info = await self.get_sandbox(caller, caller.sandbox_id or "")
        if info is None or info.status is not SandboxStatus.RUNNING:
            raise NotAuthenticatedError(
                "invalid session key", hint="A session key is valid only while its sandbox runs."
            )
        return info


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
        raise ValueError("invalid page_id: use the next_page_id of the previous page") from None
