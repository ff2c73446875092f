"""`SandboxManager` with the engine, the types and the terms of OpenManus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Set
from typing import Any, TypeVar

from atoll import manager
from atoll.compat.openmanus.docker_sandbox import DockerSandbox, ManagedDockerSandbox, spec_of
from atoll.compat.openmanus.sandbox_settings import SandboxSettings
from atoll.engines.docker.engine import DockerEngine
from atoll.errors import (
    ImageError,
    LimitReachedError,
    ManagerClosedError,
    OperationError,
    SandboxError,
    SandboxNotFoundError,
)
from atoll.manager.members import Member
from atoll.manager.request import Config
from atoll.settings import Settings

T = TypeVar("T")


class SandboxManager(manager.SandboxManager):
    """The manager of `atoll.manager` on a Docker engine. It accepts `SandboxSettings` and returns `DockerSandbox`es.

    OpenManus's programs and tests read parts of its inner state. These are views of the real state: `_sandboxes`,
    `_last_used`, `_locks`, `_active_operations`, `_cleanup_task`. They change with it and are read-only.
    """

    def __init__(
        self,
        max_sandboxes: int = 100,
        idle_timeout: float = 3600,
        cleanup_interval: float = 300,
        *,
        engine: DockerEngine | None = None,
        settings: Settings | None = None,
        **more: Any,
    ) -> None:
        self._docker = engine or DockerEngine(settings or Settings.load())
        super().__init__(max_sandboxes, idle_timeout, cleanup_interval, engine=self._docker, settings=settings, **more)
        self._faces: dict[str, DockerSandbox] = {}
        self._sandboxes: Mapping[str, DockerSandbox] = _View(self._members, self._face)
        self._last_used: Mapping[str, float] = _View(self._members, self._used_at)
        self._locks: Mapping[str, asyncio.Lock] = _View(self._members, lambda member: member.exclusive)
        self._active_operations: Set[str] = _View(self._active, lambda member: member.id).keys()

    async def create_sandbox(  # type: ignore[override]  # a volume's path may be relative, as in OpenManus
        self, config: Config = None, volume_bindings: dict[str, str] | None = None, **more: Any
    ) -> str:
        """Create a sandbox, as in `atoll.manager`, by default with `SandboxSettings()`. As in OpenManus, a failure
        raises RuntimeError; its `__cause__` is the error of Atoll."""
        config = SandboxSettings() if config is None else config
        try:
            if isinstance(config, SandboxSettings):
                spec = await spec_of(config, volume_bindings or {}, self._docker)
                return await super().create_sandbox(spec, **{"timeout": config.timeout, **more})
            return await super().create_sandbox(config, volume_bindings, **more)
        except (LimitReachedError, ManagerClosedError):
            raise
        except ImageError as error:
            name = config.image if isinstance(config, SandboxSettings) else error.reason
            raise OperationError(f"Failed to ensure Docker image: {name}", hint=error.reason) from error
        except SandboxError as error:
            said = error.reason.removeprefix("Failed to create sandbox: ")
            raise OperationError(f"Failed to create sandbox: {said}", hint=error.hint) from error

    async def get_sandbox(self, sandbox_id: str) -> DockerSandbox:  # type: ignore[override]
        """Return the sandbox with that id. Raises SandboxNotFoundError (a KeyError) if there is none."""
        return self._face(await self._member(sandbox_id))

    @contextlib.asynccontextmanager
    async def sandbox_operation(  # type: ignore[override]
        self, sandbox_id: str, *, exclusive: bool = False
    ) -> AsyncIterator[DockerSandbox]:
        """Yield the sandbox, which counts as in use until the block ends. Blocks may overlap unless they are
        `exclusive`."""
        async with super().sandbox_operation(sandbox_id, exclusive=exclusive):
            yield await self.get_sandbox(sandbox_id)

    async def _cleanup_idle_sandboxes(self) -> None:
        await self.cleanup_idle()

    @property
    def _cleanup_task(self) -> asyncio.Task[None] | None:
        """The task that ends idle sandboxes; None before the first use."""
        return self._reaping

    @property
    def _is_shutting_down(self) -> bool:
        return self._closing is not None

    def _members(self) -> dict[str, Member]:
        """Return the sandboxes that callers can get; none after the manager has ended."""
        if self._wiring is None or (self._closing is not None and self._closing.done()):
            return {}
        found = {each.id: each for each in self._wiring.context.members if each.available}
        for gone in self._faces.keys() - found.keys():
            del self._faces[gone]
        return {name: member for name, member in found.items() if member.creation is None}

    def _active(self) -> dict[str, Member]:
        return {name: member for name, member in self._members().items() if member.usage.active}

    def _face(self, member: Member) -> DockerSandbox:
        face = self._faces.get(member.id)
        if face is None:
            container = member.record.details.get("container", "")
            config = SandboxSettings.of_spec(member.record.spec, member.record.timeout_s)
            face = ManagedDockerSandbox(member.sandbox, self._docker, container, config)
            self._faces[member.id] = face
        return face

    def _used_at(self, member: Member) -> float:
        """Return the time of the last use, by the clock of the event loop."""
        assert self._wiring is not None
        return asyncio.get_running_loop().time() - (self._wiring.context.clock.now() - member.usage.last)


class _View(Mapping[str, T]):
    """A read-only view of what a manager has at the moment it is read."""

    def __init__(self, members: Callable[[], dict[str, Member]], value: Callable[[Member], T]) -> None:
        self._members, self._value = members, value

    def __getitem__(self, sandbox_id: str) -> T:
        try:
            return self._value(self._members()[sandbox_id])
        except KeyError:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._members())

    def __len__(self) -> int:
        return len(self._members())

    def __repr__(self) -> str:
        return repr(dict(self))
