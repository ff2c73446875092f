"""`SandboxManager` with the engine that OpenManus's has."""

from __future__ import annotations

from typing import Any

from atoll import manager
from atoll.errors import SandboxError
from atoll.openmanus.failures import OperationError


class SandboxManager(manager.SandboxManager):
    """The manager of `atoll.manager`, on the engine `docker` unless another is given. It takes `SandboxSettings`."""

    def __init__(
        self, max_sandboxes: int = 100, idle_timeout: float = 3600, cleanup_interval: float = 300, **more: Any
    ) -> None:
        super().__init__(max_sandboxes, idle_timeout, cleanup_interval, **{"engine": "docker", **more})

    async def create_sandbox(self, *arguments: Any, **more: Any) -> str:
        """As in `atoll.manager`; what goes wrong is a RuntimeError, as there, and its `__cause__` says what it was."""
        try:
            return await super().create_sandbox(*arguments, **more)
        except SandboxError as error:
            if isinstance(error, RuntimeError):
                raise
            said = error.reason.removeprefix("Failed to create sandbox: ")
            raise OperationError(f"Failed to create sandbox: {said}", hint=error.hint) from error
