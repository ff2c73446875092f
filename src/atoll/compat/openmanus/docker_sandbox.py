"""`DockerSandbox`: one sandbox on the engine `docker`."""

from __future__ import annotations

import io
import os
import posixpath
import shlex
import tarfile
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.compat.openmanus import policy as policies
from atoll.compat.openmanus.dockerized_terminal import AsyncDockerizedTerminal
from atoll.compat.openmanus.error_names import NOT_INITIALIZED, failing_to
from atoll.compat.openmanus.policy import Asker, Policy
from atoll.compat.openmanus.sandbox_settings import SandboxSettings
from atoll.engines.docker.engine import DockerEngine
from atoll.errors import OperationError, SandboxError, SandboxResourceError
from atoll.model import Capability, Cause, ExecutionResult, SandboxSpec
from atoll.sandbox.execution import CommandLine
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings

_KILLED = 128 + 9


@dataclass(frozen=True, slots=True)
class Container:
    """The container of a sandbox, as it was when the sandbox was created."""

    id: str
    name: str
    status: str
    image: str

    @property
    def short_id(self) -> str:
        return self.id[:12]


class DockerSandbox:
    """A sandbox in a container. Use it as an async context manager, or call `create` and `cleanup`.

    `container` and `terminal` are None before `create` and after `cleanup`. It may be used from several event loops,
    one after another.
    """

    def __init__(
        self,
        config: SandboxSettings | None = None,
        volume_bindings: dict[str, str] | None = None,
        *,
        policy: Policy | None = None,
        asker: Asker | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.config = config or SandboxSettings()
        self.volume_bindings = dict(volume_bindings or {})
        self.client = DockerEngine(settings or Settings.load())
        self.container: Container | None = None
        self.terminal: AsyncDockerizedTerminal | None = None
        self._policy = policy
        self._asker = asker
        self._settings = settings
        self._sandbox: AsyncSandbox | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    async def create(self) -> Self:
        """Create the sandbox. If that fails nothing is left, and the `__cause__` of the error is its reason."""
        if self._sandbox is not None:
            raise OperationError("Failed to create sandbox: it was already created")
        with failing_to("create sandbox"):
            sandbox = AsyncSandbox(
                await spec_of(self.config, self.volume_bindings, self.client),
                engine=self.client,
                timeout=self.config.timeout,
                settings=self._settings,
            )
            self._sandbox = await sandbox.create()
            try:
                await self._introduce(sandbox)
            except BaseException:
                await self.cleanup()
                raise
        return self

    async def cleanup(self) -> None:
        """Delete the sandbox. May be repeated. Raises OperationError if it still exists; then call `cleanup` again."""
        if self._sandbox is None:
            return
        with failing_to("clean up sandbox"):
            await self._sandbox.cleanup()
        self._sandbox = self.terminal = self.container = None

    async def __aenter__(self) -> Self:
        return await self.create()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cleanup()

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox with everything that Atoll offers. Raises OperationError before `create`."""
        if self._sandbox is None:
            raise OperationError(NOT_INITIALIZED)
        return self._sandbox

    # --- commands --------------------------------------------------------------------------------------------------

    async def run_command(self, cmd: str, timeout: float | None = None) -> str:
        """Type a command into the sandbox's one persistent shell. Returns what a person would see.

        A timeout kills the command, keeps the shell and raises SandboxTimeoutError. SandboxResourceError means that a
        limit of the sandbox ended the command.
        """
        if self.terminal is None or self.terminal.session is None:
            raise OperationError(NOT_INITIALIZED)
        started = time.time()
        with failing_to("execute command"):
            result = await self.terminal.session.run(cmd, self.config.timeout if timeout is None else timeout)
            if result.exit_code == _KILLED:
                await self._check_memory(started)
            return result.stdout.rstrip("\n")

    async def exec(self, cmd: CommandLine, timeout: float | None = None) -> ExecutionResult:
        """Run one command in a process of its own. Returns exit code, stdout and stderr."""
        sandbox = self.sandbox
        await self._may_run(cmd if isinstance(cmd, str) else shlex.join(cmd))
        started = time.time()
        with failing_to("execute command"):
            result = await sandbox.exec(cmd, timeout=timeout)
            if result.exit_code == _KILLED and result.cause is not Cause.TIMEOUT:
                await self._check_memory(started)
            return result

    # --- files -----------------------------------------------------------------------------------------------------

    async def read_file(self, path: str) -> str:
        """Return the text of a file. Raises FileNotFoundError if there is none."""
        with failing_to("read file", tells_missing=True):
            try:
                return await self.sandbox.read_file(path)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"File not found: {path}") from error

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file atomically. Missing parent directories are created."""
        with failing_to("write file"):
            await self.sandbox.write_file(path, content)

    async def copy_from(self, src_path: str, dst_path: str | Path) -> None:
        """Copy a file or a directory to the host. Missing parent directories are created. A directory is copied into an
        existing directory."""
        sandbox, target = self.sandbox, Path(dst_path)
        with failing_to("copy file", tells_missing=True):
            try:
                found = await sandbox.stat(src_path)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"Source file not found: {src_path}") from error
            if found.kind == "directory" and target.is_dir():
                target /= posixpath.basename(src_path.rstrip("/")) or "root"
            os.makedirs(target.parent, exist_ok=True)
            await sandbox.copy_from(src_path, target)

    async def copy_to(self, src_path: str | Path, dst_path: str) -> None:
        """Copy a file or a directory from the host; a directory becomes `dst_path`. Raises FileNotFoundError if it is
        missing."""
        sandbox = self.sandbox
        if not os.path.exists(src_path):
            raise FileNotFoundError(f"Source file not found: {src_path}")
        with failing_to("copy file"):
            await sandbox.copy_to(src_path, dst_path)

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _introduce(self, sandbox: AsyncSandbox) -> None:
        found = await self.client.container(sandbox.id)
        status = str(found["State"]["Status"])
        self._meet(sandbox, Container(str(found["Id"]), str(found["Name"]).lstrip("/"), status, self.config.image))

    def _meet(self, sandbox: AsyncSandbox, container: Container) -> None:
        self.container = container
        self.terminal = AsyncDockerizedTerminal.of_sandbox(
            self.container, self.config.work_dir, self.config.timeout, sandbox.shell(), self._may_run
        )

    @staticmethod
    async def _create_tar_stream(name: str, content: bytes) -> io.BytesIO:
        """Return an archive of one file."""
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
        stream.seek(0)
        return stream

    @staticmethod
    async def _read_from_tar(tar_stream: Iterable[bytes]) -> bytes:
        """Return the content of the first file in an archive that comes in pieces. Raises OperationError if there is
        none."""
        with tempfile.TemporaryFile() as file:
            for piece in tar_stream:
                file.write(piece)
            file.seek(0)
            try:
                with tarfile.open(fileobj=file) as archive:
                    for entry in archive:
                        if entry.isreg() and (content := archive.extractfile(entry)) is not None:
                            return content.read()
                        raise OperationError("Failed to extract file content")
            except tarfile.TarError as error:
                raise OperationError(f"Failed to read the archive: {error}") from error
        raise OperationError("Empty tar archive")

    async def _may_run(self, command: str) -> None:
        await policies.apply(self._policy, self._asker, command)

    async def _check_memory(self, since: float) -> None:
        sandbox = self.sandbox
        try:
            ran_out = await self.client.ran_out_of_memory(sandbox.id, since)
        except SandboxError:
            return
        if ran_out:
            raise SandboxResourceError(
                f"Command ran out of memory: the limit is {self.config.memory_limit}",
                hint="Give the sandbox a higher memory_limit, or let the command take less.",
            )


class ManagedDockerSandbox(DockerSandbox):
    """A sandbox of a manager, which also ends it."""

    def __init__(self, sandbox: AsyncSandbox, client: DockerEngine, container_id: str, config: SandboxSettings) -> None:
        # `DockerSandbox.__init__` is not called: everything that it creates exists already.
        self.config, self.volume_bindings, self.client = config, {}, client
        self._policy = self._asker = self._settings = None
        self._sandbox = sandbox
        self._meet(sandbox, Container(container_id, client.container_name(sandbox.id), "running", config.image))


async def spec_of(config: SandboxSettings, volume_bindings: dict[str, str], engine: DockerEngine) -> SandboxSpec:
    """Return the spec of a sandbox. The default limit of processes is left out where the engine has none, as under
    gVisor."""
    spec = config.spec(volume_bindings)
    if "pids_limit" in config.model_fields_set or await engine.can(Capability.PIDS):
        return spec
    return spec.model_copy(update={"limits": spec.limits.model_copy(update={"pids": None})})
