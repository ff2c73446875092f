"""The class `AsyncSandbox`: create a sandbox, run commands in it, move files in and out, delete it."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from atoll.cancellation import finish
from atoll.engines.contract import Engine, Leasing, PortExposing
from atoll.errors import EngineUnavailableError, SandboxError, SandboxNotFoundError, SpecError
from atoll.model import NAME_LABEL, Observation, SandboxDetails, SandboxSpec, State, Stats, UndoRule, manus_names
from atoll.model.checkpoint import Checkpoint, Undo
from atoll.model.network_policy import NetworkRules
from atoll.sandbox import naming, start_up
from atoll.sandbox import prewarm as prewarming
from atoll.sandbox import setup as setup_commands
from atoll.sandbox.class_methods import ClassMethods
from atoll.sandbox.command_methods import CommandMethods
from atoll.sandbox.execution import valid_timeout_s
from atoll.sandbox.export import Export
from atoll.sandbox.file_methods import FileMethods
from atoll.sandbox.hooks import begin, hook_of_new
from atoll.sandbox.limit_methods import LimitMethods
from atoll.sandbox.network_methods import NetworkMethods
from atoll.sandbox.on_class import on_class_too
from atoll.sandbox.options import NamedImage, spec_of
from atoll.sandbox.sandbox_access import EngineChoice, SandboxAccess, new_sandbox_id
from atoll.sandbox.saved_state_methods import SavedStateMethods, UndoHistory, id_of
from atoll.settings import Settings
from atoll.tracing import traced

DEFAULT_TIMEOUT_S = 300.0
MAX_LEASE_S = 86400.0
"""The maximum length of a lease, so that a forgotten lease ends within a day. Leases can be renewed."""
_WITH_SPEC = ("ports", "undo")
"""What may be given beside a spec."""


class AsyncSandbox(CommandMethods, FileMethods, SavedStateMethods, NetworkMethods, LimitMethods, ClassMethods):
    """An isolated Linux environment. Use it as an async context manager, or call `create` and `cleanup`.

    `exec` runs one process and returns its result; `run_command` types into a persistent shell. A command that fails
    is a result; an exception means that the sandbox itself failed. Relative paths start at the work directory.

    `engine` is the name of an engine; `auto` is the first of `native`, `oci` and `bubblewrap` that works on this
    machine, and `oci` for the isolation levels `gvisor` and `vm`. With `server` (or ATOLL_URL, if no engine is named)
    the sandbox runs on that server; everything else stays the same. Each entry of `ports`
    sets an environment variable `NAME=PORT` inside, and a server exposes that port.
    """

    def __init__(
        self,
        spec: SandboxSpec | Mapping[str, object] | None = None,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        image: str | NamedImage | None = None,
        isolation: str | None = None,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        disk: str | int | None = None,
        inodes: int | None = None,
        open_files: int | None = None,
        shm: str | int | None = None,
        env: Mapping[str, str] | None = None,
        volumes: Mapping[str, str] | Sequence[str] | None = None,
        work_dir: str | None = None,
        user: str | None = None,
        hostname: str | None = None,
        network: str | Mapping[str, object] | NetworkRules | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        lifetime: float | None = None,
        setup: Sequence[str] | None = None,
        setup_timeout: float | None = None,
        start: Sequence[object] | None = None,
        ready: object = None,
        sudo: bool | None = None,
        prewarm: str | None = None,
        undo: bool | Undo | UndoRule = False,
        name: str | None = None,
        task_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        ports: Mapping[str, int] | None = None,
        settings: Settings | None = None,
        **names: Unpack[manus_names.SandboxNames],
    ) -> None:
        """Describe a sandbox, without creating it yet. All times are in seconds.

        `spec` may be a `SandboxSpec`, a mapping as in a request to a server, or a mapping as in the Manus
        example, where `timeout` is the lifetime of the sandbox; it takes the place of the options. As a
        keyword, `timeout` is how long a command may take, and `lifetime` how long the sandbox may exist.
        `setup` holds command lines that run before `create` returns, `start` commands that run from then on,
        and `ready` is what `create` waits for. `atoll.sandbox.options.SpecOptions` explains each option.
        """
        options: dict[str, object] = {
            "image": image,
            "isolation": isolation,
            "memory": memory,
            "cpus": cpus,
            "pids": pids,
            "disk": disk,
            "inodes": inodes,
            "open_files": open_files,
            "shm": shm,
            "env": env,
            "volumes": volumes,
            "work_dir": work_dir,
            "user": user,
            "hostname": hostname,
            "network": network,
            "lifetime": lifetime,
            "setup": setup,
            "setup_timeout": setup_timeout,
            "start": start,
            "ready": ready,
            "sudo": sudo,
            "prewarm": prewarm,
            "undo": None if isinstance(undo, Undo) and undo.risky is not None else undo or None,
            "name": name,
            "task_id": task_id,
            "labels": labels or None,
            "ports": ports,
            **names,
        }
        if spec is None:
            wanted = spec_of(options)
        elif given := [option for option, value in options.items() if value is not None and option not in _WITH_SPEC]:
            raise SpecError(
                f"'spec' and {', '.join(map(repr, given))} both describe the sandbox", hint="Give only one of them."
            )
        else:
            wanted = spec if isinstance(spec, SandboxSpec) else spec_of(spec)
            beside = spec_of({option: options[option] for option in _WITH_SPEC})
            changes = {"undo": beside.undo or wanted.undo, "env": {**beside.env, **wanted.env}}
            wanted = wanted.model_copy(update=changes)
        self.timeout_s = valid_timeout_s(timeout)
        self._undo = UndoHistory(undo if isinstance(undo, Undo) else _undo_of(wanted))
        self._named_ports = dict(ports or {})
        choice = EngineChoice(engine, server, api_key, settings or Settings.load())
        self.access = SandboxAccess(new_sandbox_id(), wanted, choice)

    @property
    def id(self) -> str:
        """The sandbox's id, by which `attach` finds it."""
        return self.access.sandbox_id

    @property
    def spec(self) -> SandboxSpec:
        """The sandbox's spec."""
        return self.access.spec

    @property
    def engine_name(self) -> str:
        """The name of the engine that the sandbox runs on."""
        return self.access.choice.engine_name(self.spec.isolation)

    @on_class_too
    @traced("sandbox.create")
    async def create(self) -> Self:
        """Create the sandbox, run its setup commands, start its start commands and wait until it is ready. A failure
        leaves nothing behind.

        On the class, `create` takes the options of a sandbox: `await AsyncSandbox.create(image="host")`.
        """
        if self.access.exists:
            raise self.access.created_before()
        try:
            engine = await self.access.engine()
            async with naming.reserved(self.spec, engine, self.access.choice.settings):
                handle = await engine.create(self.id, self.spec)
                self.access.made(handle)
            self.access.spec = self.spec.settled(handle.spec)
            await self.access.guest.connection()
            await self._expose_named()
            await begin(self.access, hook_of_new(self.access))
            await setup_commands.set_up(self.access)
            await self._start_up()
            await prewarming.keep(self.access)
        except BaseException as error:
            await finish(prewarming.distrust(self.access, error))
            await finish(self.cleanup())
            raise
        return self

    @classmethod
    async def attach(
        cls,
        sandbox_id: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        settings: Settings | None = None,
    ) -> Self:
        """Find an existing sandbox by its id or name, whichever program created it. Raises SandboxNotFoundError.

        `auto` looks at every engine of this machine.
        """
        sandbox = cls(engine=engine, server=server, api_key=api_key, timeout=timeout, settings=settings)
        for number, choice in enumerate(sandbox.access.choice.candidates()):
            sandbox.access.choice = choice
            try:
                if await sandbox.access.find(sandbox_id):
                    await _completed(sandbox.access)
                    sandbox._undo = UndoHistory(_undo_of(sandbox.spec))
                    return sandbox
            except EngineUnavailableError:
                if number == 0:  # the others are tried because the sandbox might be there
                    raise
            choice.release()
        raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", hint="Sandbox.list() returns those there are.")

    @traced("sandbox.cleanup")
    async def cleanup(self) -> None:
        """Delete the sandbox and everything in it. May be repeated."""
        await self.access.let_go()
        await self.access.delete()
        self.access.choice.release()

    async def delete(self, *, export: Export | str | Path | None = None) -> None:
        """Delete the sandbox, like `cleanup`. With `export`, first copy `/output` to that directory of the host; if
        that fails, the sandbox stays. Pass an `Export` to copy another directory or change the limits of the copy."""
        if export is not None:
            await Export.of(export).run(self)
        await self.cleanup()

    async def detach(self) -> None:
        """Close the connection and leave the sandbox running. `attach` finds it again."""
        await self.access.let_go()
        self.access.detached = True
        self.access.choice.release()

    async def inspect(self) -> Observation:
        """Return the current state of the sandbox according to its engine, and the cause of its end if it has ended."""
        return await (await self.access.engine()).inspect(self.access.handle())

    async def info(self) -> SandboxDetails:
        """Return the sandbox's engine, its image and what that says, and the isolation level, limits, work directory
        and user that it has, requested or not."""
        handle = self.access.handle()
        isolation = handle.isolation or (await (await self.access.engine()).describe()).isolation
        return dataclasses.replace(SandboxDetails.of(handle), isolation=isolation)

    async def stats(self) -> Stats:
        """Return the resources that the sandbox uses now."""
        return await (await self.access.engine()).stats(self.access.handle())

    async def keep_alive(self, seconds: float) -> None:
        """Count the sandbox as in use for this many seconds from now, at most a day. Its lifetime still ends it.

        This matters only for the sandboxes of a manager or a server, which end or pause idle ones.
        """
        wanted, handle, engine = lease_seconds(seconds), self.access.handle(), await self.access.engine()
        if isinstance(engine, Leasing):
            await engine.keep_alive(handle, wanted)

    async def fork(
        self,
        count: int = 1,
        checkpoint: Checkpoint | str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> list[Self]:
        """Create sandboxes that start with the files of this one, as they are now or were at a checkpoint.

        With `memory` (or from a checkpoint with saved memory) its processes continue in each of them. The rules for
        open connections are then those of `checkpoint` with memory.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        await self.access.engine()
        choice = self.access.choice
        labels = {label: value for label, value in self.spec.labels.items() if label != NAME_LABEL}
        spec = self.spec.model_copy(update={"labels": labels})  # a name belongs to one sandbox only
        twins = [
            type(self)(
                spec,
                engine=choice.shared(),
                server=choice.server,
                api_key=choice.api_key,
                timeout=self.timeout_s,
                undo=self._undo.rule or False,
                settings=choice.settings,
            )
            for _ in range(count)
        ]
        source = None if checkpoint is None else id_of(checkpoint)
        if memory:
            await self.access.let_go_of_all(drop_connections)
        ids = [twin.id for twin in twins]
        handles = await (await self.access.checkpointing()).fork(
            self.access.handle(), ids, source, memory=memory, labels=[labels] * count
        )
        for twin, handle in zip(twins, handles, strict=True):
            twin.access.made(handle)
        try:
            await asyncio.gather(*(_forked(twin.access) for twin in twins))
        except BaseException:
            for twin in twins:
                await finish(twin.cleanup())
            raise
        return twins

    async def __aenter__(self) -> Self:
        """Create the sandbox, unless it exists already because it comes from `attach` or `fork`."""
        return self if self.access.exists else await self.create()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish(self.cleanup())

    def __del__(self) -> None:
        access = getattr(self, "access", None)
        if access is not None and access.exists and not (access.deleted or access.detached):
            warnings.warn(f"sandbox {self.id} was not cleaned up", ResourceWarning, stacklevel=2)

    async def _expose_named(self) -> None:
        engine = await self.access.engine()
        if isinstance(engine, PortExposing):
            for name, port in self._named_ports.items():
                await engine.expose_port(self.access.handle(), name, port)


async def _completed(access: SandboxAccess) -> None:
    """Complete the beginning of a running sandbox that has start commands. Errors are left to its next use."""
    with suppress(SandboxError):
        plan = access.start_plan()
        if not (plan.start or plan.sudo):
            return
        seen = await (await access.engine()).inspect(access.handle())
        if seen.state is State.RUNNING:
            await start_up.start_missing(access)


async def _forked(access: SandboxAccess) -> None:
    await begin(access, "forked")
    await start_up.start_up(access)


def _undo_of(spec: SandboxSpec) -> Undo | None:
    return Undo.of(spec.undo) if spec.undo is not None else None


def lease_seconds(seconds: float) -> float:
    """Validate the length of a lease. Raises ValueError."""
    if not 0 < seconds <= MAX_LEASE_S:
        raise ValueError(f"a lease must be more than 0 and at most {MAX_LEASE_S:g} seconds, not {seconds!r}")
    return float(seconds)
