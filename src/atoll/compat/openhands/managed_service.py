"""The common part of OpenHands's three services: each works on an Atoll manager."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar

from atoll.compat.openhands.config import SandboxConfig
from atoll.compat.openhands.host_ports import Ports
from atoll.compat.openhands.service import PresetSandboxSpecService, SandboxService, SandboxSpecService, offset
from atoll.compat.openhands.values import (
    ALLOW_CORS_ORIGINS_VARIABLE,
    SESSION_API_KEY_VARIABLE,
    STATUS,
    WEBHOOK_CALLBACK_VARIABLE,
    ExposedPort,
    ExposedUrl,
    SandboxInfo,
    SandboxPage,
    SandboxSpecInfo,
    SandboxStatus,
    VolumeMount,
    default_ports,
)
from atoll.engines import registry
from atoll.engines.contract import Engine
from atoll.errors import SandboxError, SandboxNotFoundError, SpecError
from atoll.manager import Record, SandboxManager
from atoll.manager.managed_sandbox import ManagedSandbox
from atoll.model import SandboxSpec, StartCommand, State
from atoll.model.network_policy import NetworkPolicy
from atoll.settings import Settings

_SPEC_LABEL = "sandbox_spec_id"
_COMMAND = "spec-command"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DEPS_S = 1800.0
_MAX_SANDBOXES = 10_000
"""Maximum number of sandboxes in one manager, including paused ones. The effective cap, `max_num_sandboxes`, is per
user."""


@dataclass(kw_only=True)
class ManagedSandboxService(SandboxService):
    """The sandboxes of one user, or of all users if none is given. A given manager is shared and stays open."""

    engine: ClassVar[str]
    default_image: ClassVar[str] = "host"
    sandbox_spec_service: SandboxSpecService | None = None
    user_id: str | None = None
    web_url: str | None = None
    """The URL that the agent server inside reports to, and whose pages may read its answers."""
    mounts: list[VolumeMount] = field(default_factory=list)
    exposed_ports: list[ExposedPort] = field(default_factory=default_ports)
    container_url_pattern: str | None = None
    """A URL pattern with `{port}`, a port of this machine. The default is that of `config.local_runtime_url`."""
    health_check_path: str | None = None
    """The path that answers 200 while the agent server is healthy; None for no health check."""
    startup_grace_seconds: float = 15
    """How long after its creation an unhealthy sandbox is STARTING; later it is in ERROR."""
    max_num_sandboxes: int = 5
    network: NetworkPolicy = "all"
    config: SandboxConfig = field(default_factory=SandboxConfig)
    settings: Settings | None = None
    manager: SandboxManager | None = None

    def __post_init__(self) -> None:
        if self.max_num_sandboxes < 1:
            raise ValueError("max_num_sandboxes must be greater than 0")
        self._own: SandboxManager | None = None
        self._chosen: str | Engine = self.engine
        """The engine, or its name. An engine object that was created here must be closed here, not by the manager."""
        self._room = asyncio.Lock()
        """Held while sandboxes are counted, paused, and one is started or resumed, so that there are never too many."""
        pattern = self.container_url_pattern or f"{self.config.local_runtime_url.rstrip('/')}:{{port}}"
        self._ports = Ports(self.exposed_ports, pattern, self.config.runtime_binding_address, self.config.vscode_port)
        image = self.config.runtime_container_image or self.default_image
        self._specs = self.sandbox_spec_service or PresetSandboxSpecService(
            [SandboxSpecInfo(id=image, command=None, working_dir="/workspace")]
        )

    # --- finding --------------------------------------------------------------------------------------------------

    async def search_sandboxes(self, page_id: str | None = None, limit: int = 100) -> SandboxPage:
        if limit < 1:
            raise ValueError("limit must be greater than 0")
        first = offset(page_id)
        records = [each for each in await self._manager().list_sandboxes(owner=self.user_id) if each.name]
        records.sort(key=lambda record: (-record.created_at, record.id))
        items = await asyncio.gather(*(self._info(each) for each in records[first : first + limit]))
        return SandboxPage(items=items, next_page_id=str(first + limit) if len(records) > first + limit else None)

    async def get_sandbox(self, sandbox_id: str) -> SandboxInfo | None:
        record = await self._record(sandbox_id)
        return await self._info(record) if record is not None else None

    async def get_sandbox_by_session_api_key(self, session_api_key: str) -> SandboxInfo | None:
        for record in await self._manager().list_sandboxes(owner=self.user_id, state=State.RUNNING):
            if hmac.compare_digest(_key(record).encode(), session_api_key.encode()) and session_api_key:
                return await self._info(record)
        return None

    # --- living ---------------------------------------------------------------------------------------------------

    async def start_sandbox(
        self,
        sandbox_spec_id: str | None = None,
        sandbox_id: str | None = None,
        extra_env: dict[str, str] | None = None,
    ) -> SandboxInfo:
        """Start a sandbox. If there are too many, the oldest running ones are paused. Raises ConflictError if the id is
        taken."""
        sandbox_id = sandbox_id or f"oh-agent-server-{secrets.token_hex(12)}"
        if not _ID.fullmatch(sandbox_id):
            raise ValueError(
                f"{sandbox_id[:128]!r} cannot be the id of a sandbox: use letters, digits, '.', '_' and '-'"
            )
        found = await self._spec(sandbox_spec_id)
        manager = self._manager()
        async with self._room:
            await self._pause_down_to(self.max_num_sandboxes - 1)
            made = await manager.create_sandbox(
                self._wanted(found, sandbox_id, extra_env or {}),
                name=sandbox_id,
                owner=self.user_id,
                labels={_SPEC_LABEL: found.id},
                timeout=self.config.timeout,
                services=[port.container_port for port in self.exposed_ports],
            )
        try:
            await self._prepare(manager, made, found)
        except BaseException:
            await manager.delete_sandbox(made)
            raise
        return await self._info(await manager.describe(made))

    async def resume_sandbox(self, sandbox_id: str) -> bool:
        record = await self._record(sandbox_id)
        if record is None:
            return False
        async with self._room:
            if record.state is not State.RUNNING:
                await self._pause_down_to(self.max_num_sandboxes - 1)
            with suppress(SandboxNotFoundError):
                await self._manager().resume_sandbox(record.id)
                return True
        return False

    async def pause_sandbox(self, sandbox_id: str) -> bool:
        record = await self._record(sandbox_id)
        if record is None:
            return False
        try:
            with suppress(SandboxNotFoundError):
                await self._manager().pause_sandbox(record.id)
                return True
            return False
        finally:
            await self._ports.close(record.id)

    async def delete_sandbox(self, sandbox_id: str) -> bool:
        record = await self._record(sandbox_id)
        if record is None:
            return False
        try:
            return await self._manager().delete_sandbox(record.id)
        finally:
            await self._ports.close(record.id)

    async def aclose(self) -> None:
        """End the service and its sandboxes, unless `config` or the given manager keeps them."""
        await self._ports.close_all()
        if self.config.rm_all_containers and (self._own or self.manager) is not None:
            for record in await self._manager().list_sandboxes(owner=self.user_id):
                await self._manager().delete_sandbox(record.id)
        if self._own is None:
            return
        keep = self.config.keep_runtime_alive
        if keep and self.config.pause_closed_runtimes:
            for record in await self._own.list_sandboxes(state=State.RUNNING):
                with suppress(SandboxError):
                    await self._own.pause_sandbox(record.id)
        await self._own.cleanup(keep=keep)
        if not isinstance(self._chosen, str):
            await self._chosen.aclose()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _engine(self, settings: Settings) -> str | Engine:
        return self.engine

    def _manager(self) -> SandboxManager:
        if self.manager is not None:
            return self.manager
        if self._own is None:
            settings = self.settings or Settings.load()
            self._chosen = self._engine(settings)
            self._own = SandboxManager(
                _MAX_SANDBOXES,
                self.config.close_delay,
                min(300, self.config.close_delay),
                engine=self._chosen,
                settings=settings,
                state_dir=settings.data_dir / "openhands" / registry.oldest_name(self.engine),
            )
        return self._own

    async def _spec(self, sandbox_spec_id: str | None) -> SandboxSpecInfo:
        if sandbox_spec_id is None:
            return await self._specs.get_default_sandbox_spec()
        found = await self._specs.get_sandbox_spec(sandbox_spec_id)
        if found is None:
            raise ValueError("Sandbox Spec not found")
        return found

    def _wanted(self, found: SandboxSpecInfo, sandbox_id: str, extra: dict[str, str]) -> SandboxSpec:
        if found.command and found.command[0].startswith("-"):
            raise SpecError(
                f"the command of spec '{found.id}' names no program: {found.command[0]!r}",
                hint="An image's own entry point is not run; write the program first.",
            )
        env = found.initial_env | self.config.runtime_startup_env_vars | extra
        env |= {port.name: str(port.container_port) for port in self.exposed_ports}
        env[SESSION_API_KEY_VARIABLE] = secrets.token_urlsafe(32)
        if self.web_url:
            env[WEBHOOK_CALLBACK_VARIABLE] = f"{self.web_url.rstrip('/')}/api/v1/webhooks/{sandbox_id}"
            env[ALLOW_CORS_ORIGINS_VARIABLE] = self.web_url
        return SandboxSpec.of(
            image=found.id,
            isolation=self.config.remote_runtime_class,
            work_dir=found.working_dir or "/workspace",
            env=env,
            network=self.network,
            volumes=tuple(
                {"host": each.host_path, "path": each.container_path, "read_only": each.mode == "ro"}
                for each in [*self.mounts, *self.config.mounts]
            ),
        )

    async def _prepare(self, manager: SandboxManager, made: str, found: SandboxSpecInfo) -> None:
        sandbox = await manager.get_sandbox(made)
        user = await sandbox.give_work_dir(f"{self.config.user_id}:{self.config.user_id}")
        if self.config.runtime_extra_deps:
            done = await sandbox.exec(self.config.runtime_extra_deps, timeout=_DEPS_S)
            if not done.success:
                said = (done.stderr or done.stdout)[-2000:]
                raise SandboxError(f"Failed to start sandbox: runtime_extra_deps failed: {said}")
        if found.command is not None:
            await sandbox.start_for_spec(StartCommand.once(_COMMAND, found.command, user=user))
            await manager.watch_command(made, _COMMAND)

    async def _record(self, sandbox_id: str) -> Record | None:
        found = await self._manager().list_sandboxes(owner=self.user_id, name=sandbox_id) if sandbox_id else []
        return await self._manager().describe(found[0].id) if found else None

    async def _info(self, record: Record) -> SandboxInfo:
        status, detail = STATUS[record.state], record.reason or None
        if status is SandboxStatus.RUNNING and record.command_end is not None:
            said = record.command_end.output[-500:].strip() or record.command_end.cause
            status, detail = SandboxStatus.ERROR, f"its command has ended: {said}"
        sandbox = None
        with suppress(SandboxError):
            sandbox = await self._manager().get_sandbox(record.id) if status is SandboxStatus.RUNNING else None
        path = self.health_check_path
        if sandbox is not None and path is not None and not await self._ports.is_well(sandbox, path):
            late = time.time() - record.created_at > self.startup_grace_seconds
            status = SandboxStatus.ERROR if late else SandboxStatus.STARTING
            detail = "its agent server does not answer"
        running = sandbox is not None and status is SandboxStatus.RUNNING
        key = _key(record)
        return SandboxInfo(
            id=record.name or record.id,
            created_by_user_id=record.owner,
            sandbox_spec_id=record.labels.get(_SPEC_LABEL, record.spec.image),
            status=status,
            session_api_key=key if running else None,
            exposed_urls=await self._urls(sandbox, key) if sandbox is not None and running else None,
            created_at=datetime.fromtimestamp(record.created_at, UTC),
            status_detail=detail if status is SandboxStatus.ERROR else None,
        )

    async def _urls(self, sandbox: ManagedSandbox, key: str) -> list[ExposedUrl] | None:
        async def runs() -> bool:
            with suppress(SandboxNotFoundError):
                return (await self._manager().describe(sandbox.id)).state is State.RUNNING
            return False

        return await self._ports.urls(sandbox, key, runs)


def _key(record: Record) -> str:
    return {**record.spec.env, **record.env}.get(SESSION_API_KEY_VARIABLE, "")
