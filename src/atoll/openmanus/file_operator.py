"""Files and commands of a sandbox in the form that OpenManus's editing tools use."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from atoll.errors import SandboxError
from atoll.guest.files import FileInfo
from atoll.model import Cause
from atoll.openmanus.client import SANDBOX_CLIENT, LocalSandboxClient
from atoll.openmanus.failures import ToolError
from atoll.openmanus.settings import SandboxSettings

PathLike = str | Path
_COMMAND_S = 120.0


@runtime_checkable
class FileOperator(Protocol):
    async def read_file(self, path: PathLike) -> str: ...

    async def write_file(self, path: PathLike, content: str) -> None: ...

    async def is_directory(self, path: PathLike) -> bool: ...

    async def exists(self, path: PathLike) -> bool: ...

    async def run_command(self, cmd: str, timeout: float | None = _COMMAND_S) -> tuple[int, str, str]: ...


class SandboxFileOperator:
    """A `FileOperator` on a client's sandbox, which is made with `config` when it is first needed."""

    def __init__(self, config: SandboxSettings | None = None, client: LocalSandboxClient | None = None) -> None:
        self.config = config or SandboxSettings()
        self.sandbox_client = SANDBOX_CLIENT if client is None else client

    async def read_file(self, path: PathLike) -> str:
        """The text of a file."""
        client = await self._ready()
        try:
            return await client.read_file(str(path))
        except (SandboxError, OSError, ValueError) as error:
            raise ToolError(f"Failed to read {path} in sandbox: {error}") from error

    async def write_file(self, path: PathLike, content: str) -> None:
        """Write a file; parents are made."""
        client = await self._ready()
        try:
            await client.write_file(str(path), content)
        except (SandboxError, OSError, ValueError) as error:
            raise ToolError(f"Failed to write to {path} in sandbox: {error}") from error

    async def is_directory(self, path: PathLike) -> bool:
        found = await self._stat(path)
        return found is not None and found.kind == "directory"

    async def exists(self, path: PathLike) -> bool:
        return await self._stat(path) is not None

    async def run_command(self, cmd: str, timeout: float | None = _COMMAND_S) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command in a process of its own. TimeoutError when its time is up."""
        client = await self._ready()
        try:
            result = await client.exec(cmd, timeout)
        except SandboxError as error:
            raise ToolError(f"Failed to run a command in sandbox: {error}") from error
        if result.cause is Cause.TIMEOUT:
            seconds = f"{timeout:g}" if timeout is not None else f"{self.config.timeout}"
            raise TimeoutError(f"Command '{cmd}' timed out after {seconds} seconds in sandbox")
        return result.exit_code, result.stdout, result.stderr

    async def _ready(self) -> LocalSandboxClient:
        if self.sandbox_client.sandbox is None:
            await self.sandbox_client.create(config=self.config)
        return self.sandbox_client

    async def _stat(self, path: PathLike) -> FileInfo | None:
        client = await self._ready()
        assert client.sandbox is not None
        try:
            return await client.sandbox.sandbox.stat(str(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (SandboxError, OSError, ValueError) as error:
            raise ToolError(f"Failed to look at {path} in sandbox: {error}") from error
