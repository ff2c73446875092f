"""Runtimes, as OpenHands calls the sandboxes of its remote back end: one for each session of a user.

A session id is chosen by its user, so it is looked up among that user's sandboxes only, whatever ids other users have.
It is a label of the sandbox, so nothing is stored twice and recovered sandboxes are found again.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from contextlib import suppress
from dataclasses import dataclass

from atoll import buffers
from atoll.errors import SandboxError, SandboxGoneError, SandboxNotFoundError, SpecError
from atoll.manager import ConflictError, Record
from atoll.model import Cause, Limits
from atoll.model.network_policy import NetworkPolicy
from atoll.service.caller import Caller
from atoll.service.failures import SessionNotFoundError, without_paths
from atoll.service.models.exposed_port import ExposedPort
from atoll.service.models.openhands_runtime import PORTS, RuntimeInfo, RuntimeStart
from atoll.service.models.sandbox_info import SandboxInfo
from atoll.service.models.sandbox_request import SandboxRequest, SandboxSettings
from atoll.service.runtime_view import UNMADE, RuntimeView, stopped, unmade
from atoll.service.sandbox_creation import Workload
from atoll.service.sandboxes import SandboxService
from atoll.workers import in_portions

SESSION_LABEL = "runtime_session_id"
_REQUEST_LABEL = f"{SESSION_LABEL}.request"
"""Label with a hash of the request, so that a request with another command, for example, counts as a different one."""
_PATIENCE_S = 8.0
"""OpenHands waits 15 s for an answer. What takes longer than this time, such as a pull, continues in the background."""
_MAX_FAILURES = 32
"""How many failed starts of each user are remembered with their reason."""


@dataclass(frozen=True, slots=True)
class _Starting:
    wanted: RuntimeStart
    task: asyncio.Task[SandboxInfo]


class RuntimeService:
    def __init__(
        self,
        sandboxes: SandboxService,
        *,
        network: NetworkPolicy = "all",
        origin: str = "",
        by_host: bool = False,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`origin` is that of the server's public URL. `by_host` says that runtimes have host names that lead to this
        server."""
        self._sandboxes = sandboxes
        self._network = network
        self._view = RuntimeView(sandboxes.credentials, origin=origin, by_host=by_host)
        self._patience_s = patience_s
        self._starting: dict[tuple[str, str], _Starting] = {}
        self._failed: dict[str, dict[str, tuple[RuntimeStart, str]]] = {}

    async def aclose(self) -> None:
        """Cancel all starts in progress."""
        going = [each.task for each in self._starting.values()]
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)

    async def start(self, caller: Caller, wanted: RuntimeStart) -> RuntimeInfo:
        """Return the runtime of a session, with status `starting` if that takes long. Raises ConflictError if a
        different request started the session."""
        place = (caller.user_id, wanted.session_id)
        going = self._starting.get(place)
        if going is None:
            self._failed.get(caller.user_id, {}).pop(wanted.session_id, None)
            context = contextvars.copy_context()
            context.run(buffers.reservation.set, None)  # it may outlive the request, whose memory is released
            task = asyncio.create_task(self._make(caller, wanted), name=f"start {wanted.session_id}", context=context)
            going = self._starting[place] = _Starting(wanted, task)
            task.add_done_callback(lambda task: self._over(place, wanted, task))
        elif going.wanted != wanted:
            raise ConflictError(f"session {wanted.session_id!r} is being started by another request")
        done, _ = await asyncio.wait({going.task}, timeout=self._patience_s)
        if done:
            return self._view.info(caller, going.task.result(), wanted.session_id)
        return await self.get(caller, wanted.session_id)

    async def get(self, caller: Caller, session_id: str) -> RuntimeInfo:
        """Return the runtime of a session. Raises SessionNotFoundError if the caller has no such session."""
        record = await self._of_session(caller, session_id)
        info = await self._sandboxes.get_sandbox(caller, record.id) if record is not None else None
        if info is not None:
            return self._view.info(caller, info, session_id)
        unmade = self._without_sandbox(caller, session_id)
        if unmade is None:
            raise SessionNotFoundError(f"Session {session_id[:128]} not found")
        return unmade

    async def batch(self, caller: Caller, session_ids: list[str]) -> list[RuntimeInfo | None]:
        """Return runtimes in the order of the session ids, with None for each one that does not exist."""
        found = {info.session_id: info for info in reversed(await self._all(caller))}
        return [found.get(session_id) or self._without_sandbox(caller, session_id) for session_id in session_ids]

    async def running(self, caller: Caller) -> list[RuntimeInfo]:
        """Return the caller's running and starting runtimes, newest first. OpenHands counts all that it finds here."""
        return [info for info in await self._all(caller) if info.status in ("running", "starting")]

    async def describe(self, caller: Caller, runtime_id: str) -> RuntimeInfo:
        record = await self._runtime(caller, runtime_id)
        return await self.get(caller, record.labels[SESSION_LABEL])

    async def pause(self, caller: Caller, runtime_id: str) -> RuntimeInfo:
        """Stop the processes of a runtime where they are. Its key is invalid meanwhile. May be repeated."""
        record = await self._runtime(caller, runtime_id)
        if not await self._sandboxes.pause_sandbox(caller, record.id):
            raise _no_runtime(runtime_id)
        return await self.describe(caller, record.id)

    async def resume(self, caller: Caller, runtime_id: str) -> RuntimeInfo:
        record = await self._runtime(caller, runtime_id)
        if not await self._sandboxes.resume_sandbox(caller, record.id):
            raise _no_runtime(runtime_id)
        return await self.describe(caller, record.id)

    async def stop(self, caller: Caller, runtime_id: str) -> RuntimeInfo:
        """Delete a runtime. Nothing of the session remains, and its id may be used again."""
        if runtime_id.startswith(UNMADE):
            return await self._forget(caller, runtime_id.removeprefix(UNMADE))
        record = await self._runtime(caller, runtime_id)
        shown = self._view.info(caller, self._sandboxes.view.info(caller, record), record.labels[SESSION_LABEL])
        if not await self._sandboxes.delete_sandbox(caller, record.id):
            raise _no_runtime(runtime_id)
        return stopped(shown)

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _make(self, caller: Caller, wanted: RuntimeStart) -> SandboxInfo:
        there = await self._of_session(caller, wanted.session_id)
        workload = Workload(
            command=wanted.command,
            user=wanted.user,
            variables=lambda sandbox_id: _variables(self._sandboxes.credentials.inside_key(sandbox_id, caller.user_id)),
            # OpenHands opens these URLs without a credential of this server. The programs that listen there ask for
            # their own.
            ports=[ExposedPort(name=name, port=port, public=True) for name, port in PORTS.items()],
            labels={SESSION_LABEL: wanted.session_id, _REQUEST_LABEL: _mark(wanted)},
        )
        start = await self._described(caller, wanted)
        try:
            return await self._sandboxes.creation.start(caller, start, key=_key(wanted.session_id), workload=workload)
        except (SandboxError, OSError):
            # A session whose command did not start would block the next attempt.
            made = await self._of_session(caller, wanted.session_id) if there is None else None
            if made is not None:
                with suppress(SandboxError):
                    await self._sandboxes.delete_sandbox(caller, made.id)
            raise

    async def _described(self, caller: Caller, wanted: RuntimeStart) -> SandboxRequest:
        """Return the sandbox to start. If `image` is the id of a spec of the catalogue, that spec defines everything
        else."""
        if await self._sandboxes.specs.get_sandbox_spec(caller, wanted.image) is not None:
            if wanted.resource_factor != 1 or wanted.runtime_class is not None:
                raise SpecError(
                    f"the spec {wanted.image!r} already defines the size and isolation of its sandboxes",
                    hint="Leave out resource_factor and runtime_class.",
                )
            return SandboxRequest(sandbox_spec_id=wanted.image, env=wanted.environment)
        settings = SandboxSettings(
            image=wanted.image,
            isolation=wanted.isolation,
            work_dir=wanted.working_dir,
            network=self._network,
        )
        if wanted.resource_factor != 1:
            defaults = await self._sandboxes.manager.default_limits(settings.spec())
            settings = settings.model_copy(update={"limits": _scaled(defaults, wanted.resource_factor)})
        return SandboxRequest(settings=settings, env=wanted.environment)

    async def _forget(self, caller: Caller, session_id: str) -> RuntimeInfo:
        """Stop a runtime that is being started, or that could not be started."""
        shown = self._without_sandbox(caller, session_id)
        if shown is None:
            raise _no_runtime(UNMADE + session_id)
        if (going := self._starting.get((caller.user_id, session_id))) is not None:
            going.task.cancel()
            await asyncio.wait({going.task})
        self._failed.get(caller.user_id, {}).pop(session_id, None)
        made = await self._of_session(caller, session_id)
        if made is not None:
            await self._sandboxes.delete_sandbox(caller, made.id)
        return stopped(shown)

    def _over(self, place: tuple[str, str], wanted: RuntimeStart, task: asyncio.Task[SandboxInfo]) -> None:
        del self._starting[place]
        error = None if task.cancelled() else task.exception()
        was_deleted = isinstance(error, SandboxGoneError) and error.cause == Cause.USER
        if error is None or was_deleted or isinstance(error, ConflictError):
            return
        reason = error.reason if isinstance(error, SandboxError) else str(error)
        failures = self._failed.setdefault(place[0], {})
        failures[place[1]] = (wanted.model_copy(update={"environment": {}}), without_paths(reason)[:2000])
        while len(failures) > _MAX_FAILURES:
            del failures[next(iter(failures))]

    async def _all(self, caller: Caller) -> list[RuntimeInfo]:
        records = await self._sandboxes.manager.list_sandboxes(owner=caller.user_id)
        runtimes = [record for record in records if _is_runtime(record)]
        return await in_portions(
            lambda each: self._view.info(caller, self._sandboxes.view.info(caller, each), each.labels[SESSION_LABEL]),
            runtimes,
        )

    async def _of_session(self, caller: Caller, session_id: str) -> Record | None:
        # Even an administrator finds only their own sessions, because a session id means nothing beyond its user.
        labels = {SESSION_LABEL: session_id}
        found = await self._sandboxes.manager.list_sandboxes(owner=caller.user_id, labels=labels)
        return next((record for record in found if _is_runtime(record)), None)

    async def _runtime(self, caller: Caller, runtime_id: str) -> Record:
        with suppress(SandboxNotFoundError):
            record = await self._sandboxes.manager.describe(runtime_id)
            if record.owner == caller.user_id and _is_runtime(record) and record.ended_at is None:
                return record
        raise _no_runtime(runtime_id)

    def _without_sandbox(self, caller: Caller, session_id: str) -> RuntimeInfo | None:
        """Return a runtime that has no sandbox yet, or could not get one."""
        going = self._starting.get((caller.user_id, session_id))
        failed = self._failed.get(caller.user_id, {}).get(session_id)
        if going is None and failed is None:
            return None
        if going is not None:
            return unmade(going.wanted, starting=True)
        assert failed is not None
        wanted, reason = failed
        return unmade(wanted, starting=False, reason=reason)


def _key(session_id: str) -> str:
    return f"runtime-{session_id}"


def _is_runtime(record: Record) -> bool:
    """Whether the sandbox is a runtime. A fork of a runtime has its labels too, but was created by another request."""
    return SESSION_LABEL in record.labels and record.key == _key(record.labels[SESSION_LABEL])


def _mark(wanted: RuntimeStart) -> str:
    return hashlib.sha256(wanted.model_dump_json().encode()).hexdigest()


def _variables(key: str) -> dict[str, str]:
    """Return the variables that tell an agent server its users' key: the current name, and the one in older
    releases."""
    return {"OH_SESSION_API_KEYS_0": key, "SESSION_API_KEY": key}


def _scaled(limits: Limits, factor: float) -> Limits:
    found: dict[str, float] = {}
    if limits.memory_bytes is not None:
        found["memory_bytes"] = int(limits.memory_bytes * factor)
    if limits.cpus is not None:
        found["cpus"] = limits.cpus * factor
    if limits.pids is not None:
        found["pids"] = max(2, int(limits.pids * factor))
    return Limits.model_validate(found)


def _no_runtime(runtime_id: str) -> SessionNotFoundError:
    return SessionNotFoundError(f"Runtime {runtime_id[:128]} not found")
