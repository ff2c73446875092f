"""Builds of images for the users of a server: their queue, their states and their logs.

A build goes on when the client that requested it is gone, until it ends or is cancelled. Each user has a few at once,
and waiting users take turns. What is known about a build is on disk, so it outlives the server; the build itself does
not: one that had not ended when the server did has failed. Values of arguments and secrets are only ever in memory.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from atoll import buffers, tracing, workers
from atoll.builds import BuildEvent, BuildRequest, BuiltImage, OnBuildEvent
from atoll.builds.mirrors import Choice
from atoll.cancellation import finish
from atoll.errors import BuildError, ConflictError, ImageBuildNotFoundError, LimitReachedError, SandboxError
from atoll.images.access import Access, pulling_with
from atoll.manager import SandboxManager
from atoll.model import Limits, SandboxSpec
from atoll.model.network_policy import NetworkPolicy
from atoll.service.build_records import BuildLog, BuildRecords, StoredBuild
from atoll.service.caller import Caller
from atoll.service.failures import without_paths
from atoll.service.models.image_build import (
    BuildFailure,
    BuildState,
    BuiltImageInfo,
    ImageBuildInfo,
    ImageBuildRequest,
)
from atoll.service.quotas import Reservations
from atoll.service.snapshots import SnapshotService
from atoll.service.specs import SandboxSpecService
from atoll.waiting import EventSignal, happens_within
from atoll.workers import Shares

_log = logging.getLogger(__name__)
_OVER: frozenset[BuildState] = frozenset(("done", "failed", "cancelled"))
_SWEEP_S = 600.0
_PROGRESS_S = 1.0
_MAX_OUTPUT = 16 << 10
_RESTARTED = BuildFailure(
    code="server_restarted", detail="the server was restarted", hint="Build again: finished steps are in the cache."
)


@dataclass(frozen=True, slots=True)
class BuildRules:
    """What the operator allows."""

    at_once: int = 4
    """Builds of all users at once."""
    at_once_of_one: int = 2
    """Builds of one user at once."""
    waiting_of_one: int = 20
    """Builds of one user that wait or run."""
    kept_of_one: int = 50
    """Builds of one user that have ended and are remembered."""
    kept_s: float = 30 * 86400
    log_bytes: int = 4 << 20
    timeout_s: float = 3600.0
    network: NetworkPolicy = "none"
    """What steps reach if the request does not say it."""
    mirrors: Choice = False
    """Whether steps get this machine's configuration of package managers, or what it says of these hosts."""


class Carrier(Protocol):
    """Carries out builds."""

    def check(self) -> None:
        """Raise UnsupportedError if images cannot be built here."""

    async def build(self, request: BuildRequest, on_event: OnBuildEvent) -> BuiltImage:
        """Carry out a build. Cancelling it leaves nothing behind but finished steps in the cache."""

    async def sweep(self) -> None:
        """Remove what is left of builds whose process has died."""


@dataclass(slots=True)
class _Build:
    stored: StoredBuild
    log: BuildLog
    task: asyncio.Task[None] | None = None
    changed: EventSignal = field(default_factory=EventSignal)
    work: asyncio.Future[BuiltImage] | None = None
    is_given_up: bool = False
    progress_at: float = 0.0

    def give_up(self) -> None:
        """End the work, whether it has begun or not. May be repeated."""
        self.is_given_up = True
        if self.work is not None:
            self.work.cancel()

    @property
    def info(self) -> ImageBuildInfo:
        return self.stored.info

    @property
    def is_over(self) -> bool:
        return self.info.state in _OVER


class ImageBuildService:
    """The builds of all users. For a caller, a build of another user does not exist: ImageBuildNotFoundError."""

    def __init__(
        self,
        folder: Path,
        rules: BuildRules,
        carrier: Carrier,
        *,
        manager: SandboxManager,
        specs: SandboxSpecService,
        snapshots: SnapshotService,
        reservations: Reservations,
    ) -> None:
        self.rules = rules
        self._records = BuildRecords(folder)
        self._carrier = carrier
        self._manager, self._specs, self._reservations = manager, specs, reservations
        self._snapshots = snapshots
        self._builds: dict[str, _Build] = {}
        self._turns = Shares(rules.at_once, rules.at_once_of_one)
        self._gates: WeakValueDictionary[tuple[str, int], asyncio.Semaphore] = WeakValueDictionary()
        self._arriving: set[tuple[str, str]] = set()
        self._is_closing = False
        self._sweeping: asyncio.Task[None] | None = None

    # --- life of the service --------------------------------------------------------------------------------------

    async def go_on(self) -> None:
        """Read what an earlier server kept. Builds that it did not finish have failed."""
        for stored in await workers.run(workers.ENGINE, self._records.load):
            log = await workers.run(workers.ENGINE, self._records.open_log, stored.info.id, self.rules.log_bytes)
            build = self._builds[stored.info.id] = _Build(stored, log)
            if not build.is_over:
                await workers.run(workers.ENGINE, _remember_steps, build)
                await self._end(build, "failed", error=_RESTARTED)
        await self._carrier.sweep()
        await self._sweep()
        self._sweeping = asyncio.create_task(self._sweep_again(), name="sweep of builds")

    async def aclose(self) -> None:
        """End all builds. They have failed, because the server ended."""
        self._is_closing = True
        going = [build for build in self._builds.values() if build.task is not None and not build.task.done()]
        for build in going:
            build.give_up()
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.gather(*(build.task for build in going if build.task is not None), return_exceptions=True)

    # --- for callers ----------------------------------------------------------------------------------------------

    def check_room(self, caller: Caller) -> None:
        """Raise LimitReachedError if the caller has as many builds as may wait and run, and UnsupportedError if none
        can be carried out here."""
        self._carrier.check()
        waiting = sum(not build.is_over for build in self._builds.values() if build.info.owner_id == caller.user_id)
        if caller.quotas.max_builds == 0:
            raise LimitReachedError(f"user {caller.user_id!r} may not build images", hint="Ask an administrator.")
        if waiting >= self.rules.waiting_of_one:
            raise LimitReachedError(
                f"user {caller.user_id!r} has {waiting} builds that wait or run, which is the limit",
                hint="Wait for one to end, or cancel one.",
            )

    async def begin(
        self,
        caller: Caller,
        wanted: ImageBuildRequest,
        context: Path,
        held: contextlib.AsyncExitStack,
        *,
        key: str | None = None,
    ) -> ImageBuildInfo:
        """Let a build wait for its turn. `held` is closed when the build has ended, also if this raises an error.

        The same idempotency key with the same request returns the same build. Raises LimitReachedError, ForbiddenError,
        ConflictError and SpecError.
        """
        async with contextlib.AsyncExitStack() as until_begun:
            until_begun.push_async_exit(held)
            if key is not None:
                same = self._same(caller, wanted, key)
                if same is not None:
                    return same
                until_begun.enter_context(self._arrival(caller, key))
            self.check_room(caller)
            request = await self._request(caller, wanted, context)
            access = self._specs.access(caller, wanted.registry_login)
            build = await finish(self._stored(caller, wanted, key))
            until_begun.pop_all()
            if key is not None:
                self._arriving.discard((caller.user_id, key))
            with tracing.apart():
                working = self._run(build, caller, request, access, held)
                build.task = asyncio.create_task(working, name=f"build {build.info.id}")
            return self._shown(build)

    def list(self, caller: Caller, state: BuildState | None = None) -> list[ImageBuildInfo]:
        """Return the builds that the caller may see."""
        mine = [build for build in self._builds.values() if caller.owner in (None, build.info.owner_id)]
        return [self._shown(build) for build in mine if state in (None, build.info.state)]

    def get(self, caller: Caller, build_id: str) -> ImageBuildInfo:
        return self._shown(self._visible(caller, build_id))

    async def cancel(self, caller: Caller, build_id: str) -> None:
        """End a build and wait until nothing of it is left. Has no effect on one that has ended. May be repeated."""
        build = self._visible(caller, build_id)
        if build.task is not None and not build.task.done():
            build.give_up()
            await asyncio.wait({build.task})

    def log(
        self, caller: Caller, build_id: str, offset: int, *, follow: bool
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Return the events of a build from this offset on, each with the offset behind it. With `follow`, they go on
        until the build has ended; the last one then says how."""
        build = self._visible(caller, build_id)
        return self._events(build, offset, follow=follow)

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _events(self, build: _Build, offset: int, *, follow: bool) -> AsyncGenerator[Mapping[str, Any], None]:
        offset = min(offset, build.log.size)
        while True:
            upcoming, is_over = build.changed.next, build.is_over
            found = await workers.run(workers.TRANSFER, build.log.read, offset)
            for event, offset in found:
                yield {**event, "offset": offset, "id": offset}
            if found:
                continue
            if is_over or not follow:
                break
            await upcoming.wait()
        if is_over:
            shown = self._shown(build).model_dump(mode="json", exclude_none=True)
            yield {"type": "end", "state": build.info.state, "build": shown, "offset": offset, "id": offset}

    async def _request(self, caller: Caller, wanted: ImageBuildRequest, context: Path) -> BuildRequest:
        limits = await self._checked_limits(caller, wanted)
        most_s = self.rules.timeout_s
        return BuildRequest(
            context=context,
            dockerfile=wanted.dockerfile if wanted.dockerfile_text is None else wanted.dockerfile_text.encode(),
            name=wanted.name,
            args=dict(wanted.args),
            labels=dict(wanted.labels),
            secrets=dict(wanted.secrets),
            target=wanted.target,
            no_cache=wanted.no_cache,
            network=self.rules.network if wanted.network is None else wanted.network,
            account=await self._manager.account_of(caller.user_id),
            owner=caller.user_id,
            limits=limits,
            name_base=lambda name: self._name_base(caller, name),
            use_mirrors=self.rules.mirrors,
            timeout_s=most_s if wanted.timeout_s is None else min(wanted.timeout_s, most_s),
        )

    async def _name_base(self, caller: Caller, name: str) -> str:
        """Return the full name of a base image. Raises ForbiddenError and SnapshotNotFoundError."""
        self._specs.check_image(caller, name)
        return await self._snapshots.full_image(caller, name)

    async def _checked_limits(self, caller: Caller, wanted: ImageBuildRequest) -> Limits:
        if wanted.network is not None:
            self._specs.check_network(caller, wanted.network)
        self._specs.ceilings.check(caller, wanted.limits)
        defaults = await self._defaults()
        return self._specs.ceilings.applied(caller, wanted.limits, defaults)

    async def _defaults(self) -> Limits:
        return await self._manager.default_limits(SandboxSpec())

    async def _stored(self, caller: Caller, wanted: ImageBuildRequest, key: str | None) -> _Build:
        info = ImageBuildInfo(
            id=secrets.token_hex(12),
            owner_id=caller.user_id,
            name=wanted.name,
            state="queued",
            created_at=datetime.now(UTC),
            args=sorted(wanted.args),
            secrets=sorted(wanted.secrets),
            target=wanted.target,
            no_cache=wanted.no_cache,
        )
        stored = StoredBuild(info=info, key=key or "", fingerprint=_fingerprint(wanted))

        def add() -> BuildLog:
            self._records.add(stored)
            return self._records.open_log(info.id, self.rules.log_bytes)

        build = self._builds[info.id] = _Build(stored, await workers.run(workers.ENGINE, add))
        return build

    async def _run(
        self, build: _Build, caller: Caller, request: BuildRequest, access: Access, held: contextlib.AsyncExitStack
    ) -> None:
        """Supervise a build to its end. This task is never cancelled, only its work is."""
        buffers.reservation.set(None)  # the request that started this task ends soon, and its memory is released
        workers.account.set(caller.user_id)
        work = build.work = asyncio.ensure_future(self._work(build, caller, request, access))
        if build.is_given_up:
            work.cancel()
        await asyncio.wait({work})
        try:
            await held.aclose()  # a build that has ended holds nothing any more
        except OSError:
            _log.exception("the context of build %s cannot be removed", build.info.id)
        if work.cancelled() and not self._is_closing:
            await self._end(build, "cancelled")
        elif work.cancelled():
            await self._end(build, "failed", error=_RESTARTED)
        elif (error := work.exception()) is not None:
            await self._end(build, "failed", error=_failure(error, build.info.id))
        else:
            await self._end(build, "done", image=BuiltImageInfo.of(work.result().image))

    async def _work(self, build: _Build, caller: Caller, request: BuildRequest, access: Access) -> BuiltImage:
        async with self._turn(caller):
            mine = await self._manager.list_sandboxes(owner=caller.user_id)
            limits = request.limits.over(await self._defaults())
            with self._reservations.reserve(caller, f"build {build.info.id}", limits, mine), pulling_with(access):
                await self._change(build, state="running", started_at=datetime.now(UTC))
                return await self._carrier.build(request, lambda event: self._on_event(build, event))

    @contextlib.asynccontextmanager
    async def _turn(self, caller: Caller) -> AsyncGenerator[None, None]:
        """Wait for a turn. A user with a quota waits for their own builds first."""
        most = caller.quotas.max_builds
        if most is None:
            async with self._turns.slot(caller.user_id):
                yield
            return
        gate = self._gates.setdefault((caller.user_id, most), asyncio.Semaphore(most))
        async with gate, self._turns.slot(caller.user_id):
            yield

    def _on_event(self, build: _Build, event: BuildEvent) -> None:
        if event.kind == "progress":
            now = time.monotonic()
            if now < build.progress_at + _PROGRESS_S:
                return
            build.progress_at = now
        update: dict[str, Any] = {}
        if event.kind == "plan":
            update = {"steps": event.steps}
        elif event.kind in ("step", "cached"):
            update = {"stage": event.stage, "step": event.step, "steps": event.steps}
            update["cached_steps"] = build.info.cached_steps + (event.kind == "cached")
        if update:
            build.stored.info = build.info.model_copy(update=update)
        build.log.write(
            {
                "type": event.kind,
                "stage": event.stage,
                "step": event.step,
                "steps": event.steps,
                "text": without_paths(event.text),
                "place": event.place,
                "channel": event.channel,
                "seconds": event.seconds,
                "time": event.time,
            }
        )
        build.changed.notify()

    async def _change(self, build: _Build, **update: Any) -> None:
        build.stored.info = build.info.model_copy(update=update)
        await workers.run(workers.ENGINE, self._records.store, build.stored)
        build.changed.notify()

    async def _end(self, build: _Build, state: BuildState, **more: Any) -> None:
        await self._change(build, state=state, ended_at=datetime.now(UTC), log_bytes=build.log.size, **more)
        await self._sweep()

    def _shown(self, build: _Build) -> ImageBuildInfo:
        return build.info.model_copy(update={"log_bytes": build.log.size})

    def _visible(self, caller: Caller, build_id: str) -> _Build:
        build = self._builds.get(build_id)
        if build is None or caller.owner not in (None, build.info.owner_id):
            raise ImageBuildNotFoundError(
                f"there is no build {build_id[:80]!r}", hint="`GET /images/builds` lists yours."
            )
        return build

    def _same(self, caller: Caller, wanted: ImageBuildRequest, key: str) -> ImageBuildInfo | None:
        for build in self._builds.values():
            if build.stored.key == key and build.info.owner_id == caller.user_id:
                if build.stored.fingerprint != _fingerprint(wanted):
                    raise ConflictError("this idempotency key was used for another build", hint="Use a new key.")
                return self._shown(build)
        return None

    @contextlib.contextmanager
    def _arrival(self, caller: Caller, key: str) -> Iterator[None]:
        place = (caller.user_id, key)
        if place in self._arriving:
            raise ConflictError("a request with this idempotency key is in progress", hint="Ask again in a moment.")
        self._arriving.add(place)
        try:
            yield
        finally:
            self._arriving.discard(place)

    async def _sweep(self) -> None:
        """Forget builds that ended long ago, and the oldest of users who have more than are kept."""
        oldest = time.time() - self.rules.kept_s
        kept: dict[str, int] = {}
        over = [build for build in self._builds.values() if build.is_over]
        for build in sorted(over, key=lambda each: each.info.created_at, reverse=True):
            owner = build.info.owner_id
            kept[owner] = kept.get(owner, 0) + 1
            is_old = kept[owner] > self.rules.kept_of_one or build.info.created_at.timestamp() < oldest
            if is_old and self._builds.pop(build.info.id, None) is not None:
                await workers.run(workers.ENGINE, self._records.remove, build.info.id)

    async def _sweep_again(self) -> None:
        never = asyncio.Event()
        while not await happens_within(never, _SWEEP_S):
            await self._sweep()


def _remember_steps(build: _Build) -> None:
    for event in build.log.events():
        if event.get("type") in ("step", "cached", "plan"):
            known = {name: event[name] for name in ("stage", "step", "steps") if event.get(name)}
            known["cached_steps"] = build.info.cached_steps + (event["type"] == "cached")
            build.stored.info = build.info.model_copy(update=known)


def _failure(error: BaseException, build_id: str) -> BuildFailure:
    """Return what users may read of an error. What their own commands wrote is theirs."""
    if not isinstance(error, SandboxError):
        _log.error("build %s failed", build_id, exc_info=error)
        return BuildFailure(code="server_error", detail="the server failed; its log says more")
    failure = BuildFailure(
        code=error.code, detail=without_paths(error.reason), hint=error.hint and without_paths(error.hint)
    )
    if not isinstance(error, BuildError):
        return failure
    update = {
        "step": error.step or None,
        "place": error.place or None,
        "instruction": error.instruction or None,
        "exit_code": error.exit_code,
        "cause": error.cause or None,
        "output": error.output[-_MAX_OUTPUT:] or None,
    }
    return failure.model_copy(update=update)


def _fingerprint(wanted: ImageBuildRequest) -> str:
    """Return a digest of the request without its secret parts, of which not even a digest is stored."""
    plain = wanted.model_dump(mode="json", exclude={"args", "secrets", "registry_login", "network", "dockerfile_text"})
    plain |= {"args": sorted(wanted.args), "secrets": sorted(wanted.secrets)}
    return base64.b32encode(hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).digest()).decode()
