"""`AsyncDockerizedTerminal`: a persistent shell in any running container."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from atoll.compat.openmanus.error_names import failing_to
from atoll.engines.docker.connect.attached_container import AttachedContainer
from atoll.engines.docker.engine import DockerEngine
from atoll.errors import OperationError, SandboxTimeoutError
from atoll.guest.guest import Guest
from atoll.model import Cause, ExecutionResult
from atoll.sandbox.command import DEFAULT_OUTPUT_BYTES
from atoll.sandbox.shell import AsyncShell
from atoll.settings import Settings

Before = Callable[[str], Awaitable[None]]
"""A function that is called with each command before it runs. If it raises, the command does not run."""


class HasId(Protocol):
    """A container object of any library."""

    @property
    def id(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class ContainerId:
    """A container of which only the name or id is known."""

    id: str
    name: str = ""


class Session:
    """The shell behind a terminal."""

    def __init__(self, shell: AsyncShell, before: Before | None = None) -> None:
        self._shell = shell
        self._before = before

    async def run(self, command: str, timeout_s: float) -> ExecutionResult:
        """Run a command like `AsyncShell.run`, but raise SandboxTimeoutError for a timeout."""
        if self._before is not None:
            await self._before(command)
        result = await self._shell.run(command, timeout_s)
        if result.cause is Cause.TIMEOUT:
            raise SandboxTimeoutError(
                f"Command execution timed out after {timeout_s:g} seconds",
                hint="The command was killed; the shell goes on. Give a longer timeout if it needs one.",
                output=result.stdout,
            )
        return result

    async def execute(self, command: str, timeout: float) -> str:
        """Run a command. Returns what a person would see."""
        return (await self.run(command, timeout)).stdout.rstrip("\n")

    async def close(self) -> None:
        await self._shell.close()


class AsyncDockerizedTerminal:
    """A persistent shell in a running container, which Atoll need not have created.

    Use it as an async context manager, or call `init` and `close`. Commands run as the container's own user, with no
    more rights than its other processes. Concurrent callers take turns.
    """

    def __init__(
        self,
        container: str | HasId,
        working_dir: str = "/workspace",
        env_vars: Mapping[str, str] | None = None,
        default_timeout: float = 60,
    ) -> None:
        self.client = DockerEngine(Settings.load())
        self.container: HasId = ContainerId(container) if isinstance(container, str) else container
        self.working_dir = working_dir
        self.env_vars = dict(env_vars or {})
        self.default_timeout = default_timeout
        self.session: Session | None = None
        self._visit: AttachedContainer | None = None
        self._guest: Guest | None = None

    @classmethod
    def of_sandbox(
        cls, container: HasId, working_dir: str, default_timeout: float, shell: AsyncShell, before: Before
    ) -> Self:
        """Return a terminal for a sandbox, which already has an agent."""
        terminal = cls(container, working_dir, None, default_timeout)
        terminal.session = Session(shell, before)
        return terminal

    async def init(self) -> None:
        """Enter the container. The work directory is created if it is missing."""
        if self.session is not None:
            return
        if not self.container.id:
            raise OperationError("Failed to create session: the container has no id")
        with failing_to("create session"):
            visit = await AttachedContainer.enter(self.container.id, self.working_dir, self.env_vars)
            self.container = ContainerId(str(visit.container["Id"]), str(visit.container["Name"]).lstrip("/"))
            self._visit = visit
            self._guest = Guest(visit.connect, work_dir=self.working_dir)
            shell = AsyncShell(self._guest, "terminal", self.working_dir, DEFAULT_OUTPUT_BYTES, visit.explain)
            self.session = Session(shell)

    async def run_command(self, cmd: str, timeout: float | None = None) -> str:
        """Run a command. Returns what a person would see. A timeout kills the command, keeps the shell and raises
        TimeoutError."""
        if self.session is None:
            raise OperationError("Terminal not initialized")
        with failing_to("execute command"):
            return await self.session.execute(cmd, self.default_timeout if timeout is None else timeout)

    async def close(self) -> None:
        """End the shell, what it started, and Atoll's agent in the container. May be repeated."""
        with failing_to("close session"):
            if self.session is not None:
                await self.session.close()
            if self._guest is not None:
                await self._guest.aclose()
            if self._visit is not None:
                await self._visit.leave()

    async def __aenter__(self) -> Self:
        await self.init()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
