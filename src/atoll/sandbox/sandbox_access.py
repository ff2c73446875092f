"""How a sandbox object reaches its sandbox: the engine that has it, its handle there, and the agent inside.

This is not part of the public API. Every group of methods of `AsyncSandbox` uses it, and so do the layers of Atoll that
manage sandboxes, as `sandbox.access`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import posixpath
import secrets
from collections.abc import AsyncIterator, Mapping

from atoll.engines import leases, registry
from atoll.engines.checkpointing import Checkpointing
from atoll.engines.contract import ByteStream, Engine, Listing, Lookup, checkpointing
from atoll.errors import (
    AgentUnreachableError,
    EngineError,
    SandboxError,
    SandboxGoneError,
    SandboxPausedError,
    SpecError,
    UnsupportedError,
)
from atoll.guest.connection import Connection
from atoll.guest.files import Files
from atoll.guest.guest import Guest
from atoll.guest.processes import FollowedProcess
from atoll.model import Cause, Handle, Observation, SandboxSpec, StartPlan, State, default_user, start_plan
from atoll.model.network_policy import NetworkPolicy
from atoll.sandbox import naming
from atoll.sandbox.command import DEFAULT_OUTPUT_BYTES, AsyncCommand
from atoll.sandbox.shell import AsyncShell
from atoll.sandbox.terminal import AsyncTerminal
from atoll.settings import Settings

_INSPECT_S = 5.0
_DYING_S = (0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
_MAX_NAMED = 10
"""How many open connections an error message names."""
_MAKE_ANOTHER = "Make another sandbox."


def new_sandbox_id() -> str:
    return secrets.token_hex(12)


class EngineChoice:
    """The engine that a sandbox runs on: an object passed by the caller, or an engine chosen by name and shared with
    other sandboxes of the program.

    A named engine is created when it is first needed. With a server it is the engine `remote`.
    """

    def __init__(self, engine: str | Engine, server: str | None, api_key: str | None, settings: Settings) -> None:
        if server is None and api_key is None and engine == "auto":
            server = os.environ.get("ATOLL_URL") or None
        if server is not None or api_key is not None:
            if engine not in ("auto", "remote"):
                raise SpecError(f"give either a server or the engine {engine!r}, not both")
            engine = "remote"
        self.server, self.api_key, self.settings = server, api_key, settings
        self.name = registry.canonical(engine) if isinstance(engine, str) else engine.name
        self.lease: leases.EngineLease | None = None
        """The shared use of a named engine. An engine object that was passed in is not shared: its caller owns it."""
        self._engine: Engine | None = engine if not isinstance(engine, str) else None

    async def engine(self, isolation: str | None) -> Engine:
        """Return the engine, created if necessary, for a sandbox that requests this isolation level."""
        if self._engine is None:
            self.lease = await leases.acquire(self._wanted(isolation), self.settings, self.server, self.api_key)
            self._engine = self.lease.engine
        return self._engine

    def engine_name(self, isolation: str | None) -> str:
        """Return the name of the engine, which need not have been created yet."""
        if self._engine is not None:
            return self._engine.name
        name = self._wanted(isolation)
        return registry.auto(self.settings)[0].name if name == "auto" else name

    def candidates(self) -> list[EngineChoice]:
        """Return the engines that may have an existing sandbox, the likeliest first."""
        return [self] if self.name != "auto" else [self, *self.everywhere()]

    def everywhere(self) -> list[EngineChoice]:
        """Return this engine or, for `auto`, every engine that sandboxes of this machine may be on."""
        if self.name != "auto":
            return [self]
        return [EngineChoice(name, None, None, self.settings) for name in registry.names()]

    def shared(self) -> str | Engine:
        """Return the engine, or its name, for another sandbox on the same engine."""
        if self.lease is None and self._engine is not None:
            return self._engine
        return self.name

    def release(self) -> None:
        """End the use of a shared, named engine. May be repeated."""
        if self.lease is not None:
            leases.release(self.lease)
            self.lease = None

    def _wanted(self, isolation: str | None) -> str:
        return registry.auto_for(isolation) if self.name == "auto" else self.name


class SandboxAccess:
    """The access of one sandbox object to its sandbox.

    Subclasses override methods to count the uses of the sandbox or to end it in another way.
    """

    def __init__(self, sandbox_id: str, spec: SandboxSpec, choice: EngineChoice) -> None:
        self.sandbox_id = sandbox_id
        self.spec = spec
        self.choice = choice
        self.guest = self.new_guest()
        self.shells: dict[str, AsyncShell] = {}
        self.deleted = False
        self.detached = False
        """Whether this object has let the sandbox go, which continues."""
        self._handle: Handle | None = None

    # --- the engine, and the handle there -----------------------------------------------------------------------------

    async def engine(self) -> Engine:
        return await self.choice.engine(self.spec.isolation)

    @property
    def exists(self) -> bool:
        """Whether the sandbox has been created. It may have been deleted since."""
        return self._handle is not None

    def handle(self) -> Handle:
        """Return the engine's handle. Raises SandboxError before creation and SandboxGoneError after deletion."""
        if self._handle is None:
            raise SandboxError("Sandbox not initialized", hint="Use it in a `with` block, or call create() first.")
        if self.detached:
            raise SandboxError(
                f"this object was detached from sandbox {self.sandbox_id}, which goes on without it",
                hint=f"Sandbox.attach({self.sandbox_id!r}) gives another object for it.",
            )
        if self.deleted:
            raise SandboxGoneError(f"sandbox {self.sandbox_id} was cleaned up", cause=Cause.USER, hint=_MAKE_ANOTHER)
        return self._handle

    def start_plan(self) -> StartPlan:
        """Return what the sandbox starts, according to its spec and its image. Raises SpecError."""
        return start_plan(self.spec, self.handle().image_defaults.labels)

    def created_before(self) -> SandboxError:
        """Return the error for creating the sandbox once more."""
        if self.deleted:
            return SandboxGoneError(
                f"sandbox {self.sandbox_id} was cleaned up and cannot be created again",
                cause=Cause.USER,
                hint=_MAKE_ANOTHER,
            )
        return SandboxError("this sandbox was already created", hint="Use it as it is, or make another one.")

    def adopt(self, handle: Handle) -> None:
        """Use this existing sandbox from now on, with the spec that its engine knows."""
        self.spec, self._handle = handle.spec, handle

    def made(self, handle: Handle) -> None:
        """Record that the engine has created the sandbox from the spec."""
        self._handle = handle

    def has_network(self, policy: NetworkPolicy) -> None:
        """Record that the sandbox has another network policy."""
        self.spec = self.spec.model_copy(update={"network": policy})
        self._handle = dataclasses.replace(self.handle(), spec=self.spec)

    def listed_id(self) -> str:
        """Return the id under which others find the sandbox: on a server, the server's id for it."""
        return self.handle().details.get("remote_id", self.sandbox_id)

    async def find(self, sandbox_id: str) -> bool:
        """Adopt the sandbox with this id or name if the engine has it, and return whether it does."""
        engine = await self.engine()
        if isinstance(engine, Lookup):
            handle = await engine.find(sandbox_id)
        else:
            handle = next((each for each in await engine.list() if each.sandbox_id == sandbox_id), None)
        if handle is None and not isinstance(engine, Listing):  # which finds sandboxes by name itself
            handle = await naming.called(sandbox_id, engine)
        if handle is not None:
            self.sandbox_id = handle.sandbox_id
            self.adopt(handle)
        return handle is not None

    async def delete(self) -> None:
        """Delete the sandbox if there is one and this object still has it. May be repeated."""
        if self._handle is not None and not self.deleted and not self.detached:
            await (await self.engine()).delete(self._handle)
            self.deleted = True

    async def checkpointing(self) -> Checkpointing:
        """Return the engine if it can make saved states. Raises UnsupportedError otherwise."""
        return await checkpointing(await self.engine())

    # --- the agent inside ---------------------------------------------------------------------------------------------

    def new_guest(self) -> Guest:
        # No work directory is passed: only the agent knows its real path.
        return Guest(
            self.connect, diagnose=self.diagnose, user=lambda: default_user(self.spec), variables=self._variables
        )

    def _variables(self) -> Mapping[str, str]:
        """Return the variables that the agent has wrong, because its memory is that of an earlier sandbox."""
        return {"ATOLL_SANDBOX_ID": self.sandbox_id} if self.handle().is_prewarmed else {}

    async def connect(self) -> ByteStream:
        """Open a new connection to the agent."""
        try:
            return await (await self.engine()).connect(self.handle())
        except AgentUnreachableError:
            await self.explain()
            raise

    async def let_go(self) -> None:
        """Close the connection; pending calls on it fail. The sandbox keeps running; the next use connects again."""
        self.shells.clear()
        await self.guest.aclose()

    async def let_go_of_all(self, drop_connections: bool) -> None:
        """Close the connection before memory is saved. Raises UnsupportedError if the sandbox has connections to the
        outside, which saved memory cannot include, unless `drop_connections` is set."""
        if not drop_connections and (found := await self.open_connections()):
            raise UnsupportedError(
                f"the sandbox has open connections, which cannot be saved: {', '.join(found[:_MAX_NAMED])}",
                hint="Close them inside the sandbox, or give drop_connections=True to drop them.",
            )
        await self.let_go()

    async def open_connections(self) -> list[str]:
        """Return the remote ends, as ADDRESS:PORT, of the sandbox's TCP connections to the outside."""
        return await self.outside_connections()

    async def outside_connections(self) -> list[str]:
        """Return the same as `open_connections` for a sandbox that is not in use yet."""
        if self.spec.network == "none":
            return []
        from atoll.guest.socket_tables import MAX_TABLE_BYTES, TCP_TABLES, established

        found: list[str] = []
        for path in TCP_TABLES:
            with contextlib.suppress(OSError):
                table = await self.guest.files.read(path, length=MAX_TABLE_BYTES)
                found += established(table.decode(errors="replace"))
        return found

    def files(self) -> Files:
        self.handle()
        return self.guest.files

    def path(self, path: str) -> str:
        """Validate a path: not empty, no zero byte, and `..` only if the result stays below the work directory."""
        if not path or "\0" in path:
            raise ValueError(f"{path!r} is not a path")
        if ".." in path.split("/"):
            full = posixpath.normpath(posixpath.join(self.spec.directory, path))
            if full != self.spec.directory and not full.startswith(self.spec.directory.rstrip("/") + "/"):
                raise ValueError(f"Path contains potentially unsafe patterns: {path!r} leaves the work directory")
            # A relative path stays relative, because only the agent knows the real path of the work directory.
            return full if path.startswith("/") else posixpath.normpath(path)
        return path

    @contextlib.asynccontextmanager
    async def transfer(self) -> AsyncIterator[None]:
        """Wrap a copy that uses a separate connection: if that one is lost, raise the reason, as `explain` does."""
        await self.guest.connection()
        try:
            yield
        except AgentUnreachableError:
            await self.explain()
            raise

    def new_command(
        self, id: str, process: FollowedProcess, limit_bytes: int, asked: tuple[int, int] | None = None
    ) -> AsyncCommand:
        return AsyncCommand(self.guest, id, process, limit_bytes, self.explain, asked)

    def new_shell(self, name: str) -> AsyncShell:
        return AsyncShell(self.guest, name, None, DEFAULT_OUTPUT_BYTES, self.explain)

    def new_terminal(self, id: str, process: FollowedProcess) -> AsyncTerminal:
        return AsyncTerminal(self.guest, id, process)

    # --- why the agent does not answer --------------------------------------------------------------------------------

    async def explain(self) -> None:
        """Find out why a connection was lost: raise SandboxGoneError with the cause if the sandbox has ended or is
        ending, and SandboxPausedError if it is paused. Return if its agent answers again.

        The connection breaks a moment before the engine can see the end of the sandbox, so the check is repeated for
        about a second while the agent does not answer.
        """
        for pause_s in _DYING_S:
            await asyncio.sleep(pause_s)
            self._refuse(await (await self.engine()).inspect(self.handle()))
            if await self._answers():
                return

    async def diagnose(self) -> None:
        """Check a sandbox whose answer is late: raise SandboxPausedError or SandboxGoneError if it cannot answer."""
        try:
            async with asyncio.timeout(_INSPECT_S):
                seen = await (await self.engine()).inspect(self.handle())
        except (TimeoutError, EngineError):
            return  # the state is unknown, so the caller continues to wait
        self._refuse(seen)

    def _refuse(self, seen: Observation) -> None:
        if seen.state in (State.STOPPED, State.ERROR, State.MISSING):
            cause = seen.cause or Cause.LOST
            raise SandboxGoneError(f"sandbox {self.sandbox_id} has ended: {seen.reason or cause}", cause=cause)
        if seen.state is State.PAUSED and not seen.wakes:
            raise SandboxPausedError.of(self.sandbox_id)

    async def _answers(self) -> bool:
        try:
            connection = await Connection.open(await (await self.engine()).connect(self.handle()), timeout_s=1.0)
        except (AgentUnreachableError, SandboxGoneError):
            return False
        await connection.aclose()
        return True
