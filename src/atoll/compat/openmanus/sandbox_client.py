"""Clients: objects that create a sandbox on request and pass all calls on to it."""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from atoll.compat.openmanus.docker_sandbox import DockerSandbox
from atoll.compat.openmanus.error_names import NOT_INITIALIZED
from atoll.compat.openmanus.sandbox_settings import SandboxSettings
from atoll.errors import OperationError
from atoll.model import ExecutionResult
from atoll.sandbox.execution import CommandLine


class SandboxFileOperations(Protocol):
    """The file operations of a sandbox."""

    async def copy_from(self, container_path: str, local_path: str) -> None: ...

    async def copy_to(self, local_path: str, container_path: str) -> None: ...

    async def read_file(self, path: str) -> str: ...

    async def write_file(self, path: str, content: str) -> None: ...


class BaseSandboxClient(ABC):
    """The interface of a client."""

    @abstractmethod
    async def create(
        self, config: SandboxSettings | None = None, volume_bindings: dict[str, str] | None = None
    ) -> None: ...

    @abstractmethod
    async def run_command(self, command: str, timeout: float | None = None) -> str: ...

    @abstractmethod
    async def copy_from(self, container_path: str, local_path: str | Path) -> None: ...

    @abstractmethod
    async def copy_to(self, local_path: str | Path, container_path: str) -> None: ...

    @abstractmethod
    async def read_file(self, path: str) -> str: ...

    @abstractmethod
    async def write_file(self, path: str, content: str | bytes) -> None: ...

    @abstractmethod
    async def cleanup(self) -> None: ...


class LocalSandboxClient(BaseSandboxClient):
    """Passes all calls on to one `DockerSandbox`. Before `create` every call raises OperationError (a RuntimeError)."""

    def __init__(self) -> None:
        self.sandbox: DockerSandbox | None = None

    async def create(
        self, config: SandboxSettings | None = None, volume_bindings: dict[str, str] | None = None
    ) -> None:
        """Create the sandbox. A previous one is cleaned up first."""
        await self._end()
        sandbox = DockerSandbox(config, volume_bindings)
        await sandbox.create()
        self.sandbox = sandbox

    async def run_command(self, command: str, timeout: float | None = None) -> str:
        return await self._made().run_command(command, timeout)

    async def exec(self, command: CommandLine, timeout: float | None = None) -> ExecutionResult:
        """Run one command in a process of its own. Returns exit code, stdout and stderr."""
        return await self._made().exec(command, timeout)

    async def copy_from(self, container_path: str, local_path: str | Path) -> None:
        await self._made().copy_from(container_path, local_path)

    async def copy_to(self, local_path: str | Path, container_path: str) -> None:
        await self._made().copy_to(local_path, container_path)

    async def read_file(self, path: str) -> str:
        return await self._made().read_file(path)

    async def write_file(self, path: str, content: str | bytes) -> None:
        await self._made().write_file(path, content)

    async def cleanup(self) -> None:
        """Delete the sandbox. May be repeated, also without `create`."""
        await self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cleanup()

    def _made(self) -> DockerSandbox:
        if self.sandbox is None:
            raise OperationError(NOT_INITIALIZED)
        return self.sandbox

    async def _end(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.cleanup()
            self.sandbox = None


class SharedSandboxClient(LocalSandboxClient):
    """A client that several tasks share without knowing of each other.

    The client keeps track of the tasks that use it. `cleanup` in one task keeps the sandbox as long as another running
    task has used it; the last of them deletes it. A `create` while others use the sandbox leaves it to all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._users: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Return the client itself. Tools are pydantic models, which copy their attributes, and nothing would end a
        copy's sandbox."""
        return self

    async def create(
        self, config: SandboxSettings | None = None, volume_bindings: dict[str, str] | None = None
    ) -> None:
        others = self._others()
        if self.sandbox is None or not others:
            await super().create(config, volume_bindings)
        self._note_user()

    async def cleanup(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._users.discard(task)
        if not self._others():
            await super().cleanup()

    def _made(self) -> DockerSandbox:
        sandbox = super()._made()
        self._note_user()
        return sandbox

    def _note_user(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._users.add(task)

    def _others(self) -> list[asyncio.Task[Any]]:
        mine = asyncio.current_task()
        return [
            task for task in self._users if task is not mine and not task.done() and not task.get_loop().is_closed()
        ]


def create_sandbox_client() -> LocalSandboxClient:
    """Return a client that is not shared."""
    return LocalSandboxClient()


SANDBOX_CLIENT = SharedSandboxClient()
"""The client of this process, for programs that expect a global one."""
