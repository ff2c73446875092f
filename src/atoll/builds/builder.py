"""Building an image from a Dockerfile: from the request to the image of that name.

A step that changes files runs in a sandbox of the engine, with limits and a network policy, and the state after it is
kept under a key. A build whose steps are all known makes no sandbox. What is not finished is never used: a step, and an
image, is complete or not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atoll import workers
from atoll.archive.root import open_in_root
from atoll.builds.archives import builds_of, drafts_of, sweep_drafts
from atoll.builds.bases import SCRATCH, Bases
from atoll.builds.dockerfile.checks import check
from atoll.builds.dockerfile.ignore import IgnoreRules
from atoll.builds.dockerfile.instructions import Dockerfile, Stage
from atoll.builds.dockerfile.parser import parse
from atoll.builds.known_digests import KnownDigests
from atoll.builds.labels import sweep
from atoll.builds.mounted import CACHE_BYTES, needs_volumes, volumes_of
from atoll.builds.planning import Planner
from atoll.builds.renewals import Renewals, remove_unused
from atoll.builds.reporting import Reporter
from atoll.builds.request import BuildRequest, BuiltImage, OnBuildEvent
from atoll.builds.site import Site
from atoll.builds.source_tree import SourceTree
from atoll.builds.stages import Stages
from atoll.builds.steps import MakeDirectory, RunCommand, StagePlan, Step, key_of
from atoll.builds.supplies import supplies_for
from atoll.cancellation import finish
from atoll.engines.contract import Building, Engine, building
from atoll.errors import BuildError, SandboxError, SpecError
from atoll.images import Image, ImageConfig, Images, Kind
from atoll.model import Cause
from atoll.settings import Settings
from atoll.tracing import traced
from atoll.waiting import Deadline

_RECENT_S = 3600.0
"""Steps that were used within this time stay: a build that runs may need them."""
_MAX_DOCKERFILE = 4 << 20
_MAX_IGNORE = 1 << 20
_DEFAULT = "Dockerfile"
_RENEWALS, _DIGESTS = "renewals", "digests"
_GRACE_S = 10.0
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


class Builder:
    """Builds images on an engine that can save states. May be used by many builds at once."""

    def __init__(self, engine: Engine, images: Images, settings: Settings) -> None:
        self._engine = engine
        self._images = images
        self._settings = settings
        self._renewals = Renewals(builds_of(settings.data_dir) / _RENEWALS)

    @traced("image.build")
    async def build(self, request: BuildRequest, on_event: OnBuildEvent | None = None) -> BuiltImage:
        """Build the image. Raises DockerfileError for what is wrong before anything runs, and BuildError for a step
        that fails. Cancelling deletes the sandboxes of the build; finished steps stay in the cache."""
        began = time.monotonic()
        able = await building(self._engine)
        name = self._checked_name(request.name)
        await self._clean_up()
        reporter = Reporter(on_event, request.secrets.values())
        try:
            async with self._in_time(request):
                image = await self._build(request, name, able, reporter)
        except SandboxError as error:
            reporter.failed(error)
            raise
        return BuiltImage(image, reporter.steps, reporter.steps - reporter.carried_out, time.monotonic() - began)

    async def _build(self, request: BuildRequest, name: str, able: Building, reporter: Reporter) -> Image:
        deadline = Deadline.after(request.timeout_s)
        async with self._context(request) as (dockerfile, context):
            checked = check(dockerfile, args=request.args, target=request.target)
            for warning in checked.warnings:
                reporter.warn(warning)
            bases = Bases(self._engine, self._images, reporter.emit, request.owner, request.name_base)
            planner = Planner(request, dockerfile, checked, context, bases, self._renewals)
            plans = await planner.plan()
            target = plans[-1]
            _need_a_step(target, planner, checked.stages[-1].stage)
            for note in context.notes:
                reporter.warn(note)
            request = dataclasses.replace(request, mirrors=await supplies_for(request, plans, reporter))
            reporter.plan(sum(len(plan.steps) for plan in plans))
            site = Site(
                self._engine,
                able,
                self._images,
                self._settings,
                request,
                reporter,
                context,
                planner.selections,
                deadline,
            )
            stages = Stages(site, self._renewals)
            try:
                await stages.need(target)
            finally:
                await finish(stages.stop())
        config = dataclasses.replace(target.config, labels={**target.config.labels, **request.labels})
        image = await self._commit(able, target.files_key, name, config, request.owner)
        if reporter.carried_out:
            await finish(self._prune(able, plans, request.owner))
        return image

    async def _commit(self, able: Building, key: str, name: str, config: ImageConfig, owner: str) -> Image:
        """Store the image, unless it is there already exactly as it would be."""
        name = name or f"built-{key[:12]}"
        known = await workers.run(workers.ENGINE, self._images.store.find, str(self._images.parse(name)), owner)
        if known is not None and known.source == f"step:{key}" and known.config == config:
            return known
        return await finish(able.commit_step(key, name, config, owner=owner))

    def _checked_name(self, name: str) -> str:
        """Return the name of the image to be made. Raises SpecError if it means something else."""
        if not name:
            return name
        parsed = self._images.parse(name)
        if parsed.kind is not Kind.OCI or parsed.digest or parsed.name == f"library/{SCRATCH}":
            raise SpecError(f"{name!r} already means something else", hint="Choose a name such as mine or team/mine:1.")
        return str(parsed)

    async def _clean_up(self) -> None:
        """Remove what builds left that were killed."""
        await sweep(self._engine)
        await workers.run(workers.ENGINE, sweep_drafts, drafts_of(self._settings.data_dir))
        for name in (_RENEWALS, _DIGESTS):
            await workers.run(workers.ENGINE, remove_unused, builds_of(self._settings.data_dir) / name)

    async def _prune(self, able: Building, plans: list[StagePlan], owner: str) -> None:
        """Remove the steps and caches that were used longest ago, if there are too many."""
        await able.prune_steps(None, unused_s=_RECENT_S)
        actions = [step.action for plan in plans for step in plan.steps]
        if any(isinstance(action, RunCommand) and needs_volumes(action) for action in actions):
            await workers.run(workers.ENGINE, volumes_of(self._settings).evict_caches, owner, CACHE_BYTES)

    @asynccontextmanager
    async def _in_time(self, request: BuildRequest) -> AsyncIterator[None]:
        try:
            # A RUN has the time that is left, and its error says which step it was. Anything else gets a little more.
            seconds = request.timeout_s + _GRACE_S if math.isfinite(request.timeout_s) else None
            async with asyncio.timeout(seconds) as limit:
                yield
        except TimeoutError as error:
            if isinstance(error, SandboxError) or not limit.expired():
                raise
            raise BuildError(
                f"the build took longer than {request.timeout_s:g} s",
                hint="Give it more time: --timeout SECONDS. Finished steps are in the cache.",
                cause=str(Cause.TIMEOUT),
            ) from error

    @asynccontextmanager
    async def _context(self, request: BuildRequest) -> AsyncIterator[tuple[Dockerfile, SourceTree]]:
        """Open the context, and read the Dockerfile and what it is to leave out."""
        stopped = asyncio.Event()

        def check_stopped() -> None:
            if stopped.is_set():
                raise BuildError("the build was cancelled")

        try:
            root = os.open(request.context, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SpecError(
                f"the context '{request.context}' cannot be read: {error.strerror}", hint="Name a directory."
            ) from error
        try:
            text, path = await workers.run(workers.ENGINE, _dockerfile, root, request.dockerfile)
            rules = await workers.run(workers.ENGINE, _rules, root, path)
            known = KnownDigests(builds_of(self._settings.data_dir) / _DIGESTS / key_of(request.owner)[:32])
            await workers.run(workers.ENGINE, known.load)
            tree = SourceTree(root, "the context", rules=rules, known=known, check=check_stopped)
            try:
                yield await workers.run(workers.ENGINE, parse, text, path), tree
            finally:
                with contextlib.suppress(OSError):  # the files are read again then
                    await finish(workers.run(workers.ENGINE, known.save))
        finally:
            stopped.set()
            os.close(root)


def _need_a_step(plan: StagePlan, planner: Planner, stage: Stage) -> None:
    """Give a stage that changes no files a step, because an image is made from a step."""
    if plan.last_step() is None:
        step = Step(
            planner.next_number(), plan.name, stage.place, stage.text, MakeDirectory("/"), key_of(plan.base_key)
        )
        plan.steps.append(step)


def _dockerfile(root: int, asked: str | bytes | None) -> tuple[bytes, str]:
    """Return the text of the Dockerfile, and its path in the context."""
    if isinstance(asked, bytes):
        return asked, _DEFAULT
    path = asked or _DEFAULT
    text = _read(root, path, _MAX_DOCKERFILE)
    if text is None:
        raise SpecError(
            f"there is no {path[:200]!r} in the context",
            hint="Name the file with -f, or the directory that it is in." if asked is None else None,
        )
    return text, path


def _rules(root: int, dockerfile: str) -> IgnoreRules:
    """Return what the context leaves out: by a file beside the Dockerfile, or by the one at the top."""
    for name in (f"{dockerfile}.dockerignore", ".dockerignore"):
        text = _read(root, name, _MAX_IGNORE)
        if text is not None:
            return IgnoreRules.parse(text, name)
    return IgnoreRules()


def _read(root: int, path: str, limit: int) -> bytes | None:
    """Return the content of a file in the context, or None if there is none. No link leads out of the context."""
    try:
        fd = open_in_root(root, os.fsencode(path), _READ)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SpecError(f"{path[:200]!r} in the context cannot be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SpecError(f"{path[:200]!r} in the context is not a file")
        text = file.read(limit + 1)
    if len(text) > limit:
        raise SpecError(f"{path[:200]!r} in the context has more than {limit:,} bytes")
    return text
