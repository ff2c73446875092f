"""Files and commands of a sandbox, or of this machine, in the form that OpenManus's editing tools use, and
which files these tools leave out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import signal
from pathlib import Path
from typing import Protocol, runtime_checkable

from atoll import workers
from atoll.compat.openmanus.sandbox_client import SANDBOX_CLIENT, LocalSandboxClient
from atoll.compat.openmanus.sandbox_settings import SandboxSettings
from atoll.errors import SandboxError, SpecError, ToolError
from atoll.guest.files import FileInfo
from atoll.model import Cause

PathLike = str | Path
_COMMAND_S = 120.0


@runtime_checkable
class FileOperator(Protocol):
    async def read_file(self, path: PathLike) -> str: ...

    async def write_file(self, path: PathLike, content: str) -> None: ...

    async def is_directory(self, path: PathLike) -> bool: ...

    async def exists(self, path: PathLike) -> bool: ...

    async def run_command(self, cmd: str, timeout: float | None = _COMMAND_S) -> tuple[int, str, str]: ...


class LocalFileOperator:
    """A `FileOperator` on this machine, without any sandbox, for programs that choose between the two."""

    encoding: str = "utf-8"

    async def read_file(self, path: PathLike) -> str:
        """Return the text of a file."""
        try:
            return await workers.run(workers.TRANSFER, Path(path).read_text, self.encoding)
        except (OSError, ValueError) as error:
            raise ToolError(f"Failed to read {path}: {error}") from error

    async def write_file(self, path: PathLike, content: str) -> None:
        """Write a file, whose directory must exist."""
        try:
            await workers.run(workers.TRANSFER, Path(path).write_text, content, self.encoding)
        except (OSError, ValueError) as error:
            raise ToolError(f"Failed to write to {path}: {error}") from error

    async def is_directory(self, path: PathLike) -> bool:
        return await workers.run(workers.TRANSFER, Path(path).is_dir)

    async def exists(self, path: PathLike) -> bool:
        return await workers.run(workers.TRANSFER, Path(path).exists)

    async def run_command(self, cmd: str, timeout: float | None = _COMMAND_S) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr of a command.

        At the timeout, the command and everything it started in its session are killed, and TimeoutError is raised.
        """
        process = await asyncio.create_subprocess_shell(
            cmd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            async with asyncio.timeout(timeout):
                stdout, stderr = await process.communicate()
        except TimeoutError as error:
            raise TimeoutError(f"Command '{cmd}' timed out after {timeout} seconds") from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        code = process.returncode or 0
        code = 128 - code if code < 0 else code  # as a shell reports it, and a sandbox too
        return code, stdout.decode(self.encoding, "replace"), stderr.decode(self.encoding, "replace")


class SandboxFileOperator:
    """A `FileOperator` on a client's sandbox, which is created with `config` when it is first needed."""

    def __init__(self, config: SandboxSettings | None = None, client: LocalSandboxClient | None = None) -> None:
        self.config = config or SandboxSettings()
        self.sandbox_client = SANDBOX_CLIENT if client is None else client

    async def read_file(self, path: PathLike) -> str:
        """Return the text of a file."""
        client = await self._ready()
        try:
            return await client.read_file(str(path))
        except (SandboxError, OSError, ValueError) as error:
            raise ToolError.because(f"Failed to read {path} in sandbox", error) from error

    async def write_file(self, path: PathLike, content: str) -> None:
        """Write a file. Missing parent directories are created."""
        client = await self._ready()
        try:
            await client.write_file(str(path), content)
        except (SandboxError, OSError, ValueError) as error:
            raise ToolError.because(f"Failed to write to {path} in sandbox", error) from error

    async def is_directory(self, path: PathLike) -> bool:
        found = await self._stat(path)
        return found is not None and found.kind == "directory"

    async def exists(self, path: PathLike) -> bool:
        return await self._stat(path) is not None

    async def run_command(self, cmd: str, timeout: float | None = _COMMAND_S) -> tuple[int, str, str]:
        """Run a command in a process of its own. Returns exit code, stdout and stderr. Raises TimeoutError at the
        timeout."""
        client = await self._ready()
        try:
            result = await client.exec(cmd, timeout)
        except SandboxError as error:
            raise ToolError.because("Failed to run a command in sandbox", error) from error
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
            raise ToolError.because(f"Failed to look at {path} in sandbox", error) from error


# OpenManus's tools leave these files, directories and extensions of a workspace out.
EXCLUDED_FILES = frozenset(
    {
        *(".DS_Store", ".gitignore", "components.json", "jsconfig.json", "package-lock.json"),
        *("postcss.config.js", "postcss.config.mjs", "tsconfig.json", "tsconfig.tsbuildinfo"),
    }
)
EXCLUDED_DIRS = frozenset({".git", ".next", "build", "dist", "node_modules"})
EXCLUDED_EXT = frozenset({".bmp", ".db", ".gif", ".ico", ".jpeg", ".jpg", ".png", ".sql", ".svg", ".tiff", ".webp"})


def should_exclude_file(rel_path: str) -> bool:
    """Whether OpenManus's tools leave this file of a workspace out.

    A directory counts by its whole name: `rebuild/x` is not in `build`.
    """
    *directories, name = rel_path.split("/")
    extension = posixpath.splitext(name)[1].lower()
    return name in EXCLUDED_FILES or not EXCLUDED_DIRS.isdisjoint(directories) or extension in EXCLUDED_EXT


def clean_path(path: str, workspace_path: str = "/workspace") -> str:
    """Return the path relative to the workspace, such as `src/main.py`; empty for the workspace itself.

    Raises SpecError (a ValueError) for a path that leads out of the workspace.
    """
    parts, root = _path_parts(path), _path_parts(workspace_path)
    if parts[: len(root)] == root:
        parts = parts[len(root) :]
    elif parts[:1] == ["workspace"]:
        parts = parts[1:]
    clean = _path_parts(posixpath.normpath("/".join(parts)))
    if clean[:1] == [".."]:
        raise SpecError(f"'{path}' leads out of the workspace", hint="Name a file below it, without '..'.")
    return "/".join(clean)


def _path_parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
