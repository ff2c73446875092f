"""The life cycle of a sandbox that is a tree of processes on this machine."""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.contract import ByteStream, EngineDescription, OnImageProgress
from atoll.engines.enforcement import enforceable_defaults, refuse_unsupported
from atoll.engines.host import agent_socket, process_ref
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.process_tree.launch import Launch, start
from atoll.engines.process_tree.process_observation import observe
from atoll.engines.process_tree.process_record import Record, Records
from atoll.errors import (
    AgentUnreachableError,
    EngineError,
    ImageNotFoundError,
    SandboxError,
    SandboxGoneError,
    SpecError,
)
from atoll.model import Capability, EffectiveLimits, Handle, Observation, SandboxSpec, State, Stats
from atoll.model.handle import ISOLATION
from atoll.settings import Settings
from atoll.waiting import Deadline

_CREATE_S = 20.0
_CONNECT_S = 5.0
_KILL_S = 30.0
_MONITOR_S = 1.0


class ProcessTreeEngine(ABC):
    """An `Engine`, except for how its processes are started and found."""

    name: str
    directory: str
    """The name of its directories in the data directory and the run directory."""
    capabilities: frozenset[Capability]
    isolation: str | None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._records = Records(settings.data_dir / self.directory)

    # --- to be implemented by each engine -----------------------------------------------------------------

    @abstractmethod
    def _check(self, spec: SandboxSpec) -> None:
        """Raise if the engine cannot honour this spec, for reasons that its capabilities do not cover."""

    @abstractmethod
    def _launch(self, record: Record, home: Path, listener: int, resources: ExitStack) -> Launch:
        """Create the sandbox's directories in `home` and return how to start it, with the agent serving descriptor
        `listener`.

        Descriptors that are opened for it are closed with `resources`.
        """

    @abstractmethod
    def _find_processes(self, sandbox_id: str) -> set[ProcessRef]:
        """Return the processes of a sandbox, found without its record."""

    def _claim_user(self, sandbox_id: str) -> int | None:
        """Return a user id for the sandbox, if it gets one."""
        return None

    def _release_user(self, uid: int) -> None:  # noqa: B027
        """Release the user id of a sandbox that is gone."""

    def _sweep(self) -> None:  # noqa: B027
        """Remove what belongs to no sandbox any more, because a process died at a bad moment."""

    # --- the contract -------------------------------------------------------------------------------------

    async def describe(self) -> EngineDescription:
        return EngineDescription(self.capabilities, self.isolation)

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Handle:
        refuse_unsupported(self.name, self.capabilities, spec)
        self._check(spec)
        home = self._make_home(sandbox_id)
        record: Record | None = None
        spawned: set[ProcessRef] = set()
        try:
            socket_path = self._settings.socket_path(self.directory, sandbox_id)
            first = record = self._write_first(sandbox_id, spec)
            started = await start(
                lambda listener, resources: self._launch(first, home, listener, resources),
                socket_path,
                Deadline.after(_CREATE_S),
                spawned.add,
            )
            record = first.model_copy(update={"monitor": started.monitor, "init": started.init})
            self._records.write(record)
        except BaseException as error:
            await self._undo(sandbox_id, record, spawned, error)
            if isinstance(error, OSError):
                raise EngineError(f"the sandbox could not be made: {error}") from error
            raise
        return self._handle(record)

    async def connect(self, handle: Handle) -> ByteStream:
        path = self._settings.socket_path(self.directory, handle.sandbox_id)
        try:
            return await agent_socket.connect(path, Deadline.after(_CONNECT_S))
        except OSError as error:
            seen = await self.inspect(handle)
            if seen.state in (State.RUNNING, State.STARTING, State.PAUSED):
                raise AgentUnreachableError(
                    f"the agent of sandbox '{handle.sandbox_id}' cannot be reached: {error}"
                ) from error
            cause = seen.cause.value if seen.cause else "unknown"
            raise SandboxGoneError(f"sandbox '{handle.sandbox_id}' has ended: {seen.reason}", cause=cause) from error

    async def inspect(self, handle: Handle) -> Observation:
        return await observe(self._records, handle.sandbox_id)

    async def stats(self, handle: Handle) -> Stats:
        record = self._records.read(handle.sandbox_id)
        if record is None or record.init is None or not record.is_of_this_boot() or not record.init.is_alive():
            return Stats()
        return await workers.run(workers.ENGINE, process_ref.usage, record.init.pid)

    async def delete(self, handle: Handle) -> None:
        await finish(self._erase(handle.sandbox_id, self._records.read(handle.sandbox_id), set()))

    async def list(self) -> list[Handle]:
        def find() -> Iterable[Handle]:
            self._sweep()
            return [self._found(sandbox_id) for sandbox_id in self._records.ids()]

        return [*await workers.run(workers.ENGINE, find)]

    async def default_limits(self, spec: SandboxSpec) -> EffectiveLimits:
        return self._defaults(spec)

    async def shared_ceilings(self) -> tuple[str, ...]:
        return ()

    def _defaults(self, spec: SandboxSpec) -> EffectiveLimits:
        return enforceable_defaults(self._settings.resources.sandbox, self.capabilities, spec.limits)

    async def ensure_image(self, image: str, on_progress: OnImageProgress | None = None) -> None:
        """Check the name of the image. There is nothing to fetch."""
        self._check_image(image)

    async def aclose(self) -> None:  # noqa: B027
        """Do nothing: a sandbox is a directory and processes, which outlive this object."""

    # --- its parts ----------------------------------------------------------------------------------------

    def _check_image(self, image: str) -> None:
        if image != "host":
            raise ImageNotFoundError(
                f"engine '{self.name}' has no image '{image}'",
                hint="Its only image is 'host', this machine's own programs.",
            )

    def _make_home(self, sandbox_id: str) -> Path:
        home = self._records.home(sandbox_id)
        self._settings.engine_data_dir(self.directory)
        self._settings.engine_run_dir(self.directory)
        mode = 0o711 if os.geteuid() == 0 else 0o700
        try:
            home.mkdir()
            home.chmod(mode)
        except FileExistsError:
            raise SpecError(f"there is already a sandbox '{sandbox_id}'") from None
        except OSError as error:
            raise EngineError(f"the sandbox could not be made: {error}") from error
        return home

    def _write_first(self, sandbox_id: str, spec: SandboxSpec) -> Record:
        defaults = self._defaults(spec)
        record = Record(
            sandbox_id=sandbox_id,
            engine=self.name,
            installation=self._settings.installation_id(),
            spec=spec,
            defaults=defaults.limits,
            left_out=defaults.left_out,
            created_at=time.time(),
            boot_id=process_ref.boot_id(),
            creator=process_ref.this_process(),
            uid=self._claim_user(sandbox_id),
        )
        self._records.write(record)
        return record

    async def _undo(
        self, sandbox_id: str, record: Record | None, spawned: set[ProcessRef], error: BaseException
    ) -> None:
        try:
            await finish(self._erase(sandbox_id, record, spawned))
        except SandboxError as leftover:
            error.add_note(f"and cleaning up failed: {leftover}")

    async def _erase(self, sandbox_id: str, record: Record | None, spawned: set[ProcessRef]) -> None:
        self._settings.socket_path(self.directory, sandbox_id).unlink(missing_ok=True)
        if not self._records.home(sandbox_id).exists():
            return
        known = spawned | (record.processes() if record else set())
        if not await self._kill(sandbox_id, record, known, Deadline.after(_KILL_S)):
            raise EngineError(f"processes of sandbox '{sandbox_id}' do not end", hint="Delete it again later.")
        process_ref.forget([process.pid for process in known] if record else process_ref.ended_children())
        for last_try in (False, False, False, True):
            try:
                await workers.run(workers.ENGINE, self._records.remove, sandbox_id)
                break
            except FileNotFoundError:
                break  # another deletion was faster
            except OSError as error:
                # An observer of the sandbox has just written its end into the directory.
                if last_try or error.errno != errno.ENOTEMPTY:
                    raise EngineError(f"files of sandbox '{sandbox_id}' cannot be removed: {error}") from error
        if record is None:
            self._sweep()
        elif record.uid is not None:
            self._release_user(record.uid)

    async def _kill(self, sandbox_id: str, record: Record | None, known: set[ProcessRef], deadline: Deadline) -> bool:
        if record is not None and record.init in known:
            # Everything inside ends with it. The process outside then ends by itself, after reaping it.
            if not await process_ref.kill({record.init}, deadline):
                return False
            await process_ref.wait(known, Deadline.after(_MONITOR_S))
        if not await process_ref.kill(known, deadline):
            return False
        if record is not None and record.init is not None:
            return True
        # The sandbox was never complete, so some of its processes may be unknown.
        return await process_ref.kill_all(lambda: self._find_processes(sandbox_id), deadline)

    def _handle(self, record: Record) -> Handle:
        details = {**({"uid": str(record.uid)} if record.uid is not None else {}), **record.limit_details()}
        if self.isolation is not None:
            details[ISOLATION] = self.isolation
        return Handle(self.name, record.sandbox_id, record.spec, record.created_at, details)

    def _found(self, sandbox_id: str) -> Handle:
        record = self._records.read(sandbox_id)
        if record is not None:
            return self._handle(record)
        # Half created or half deleted: only that it exists is known, and that it can be deleted.
        return Handle(self.name, sandbox_id, SandboxSpec(), 0.0, {"damaged": "it has no readable record"})
