"""What all stages of one build share: the engine, the request, the time that is left, and where files are read from."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field

from atoll import workers
from atoll.builds.labels import build_labels
from atoll.builds.reporting import Reporter
from atoll.builds.request import BuildRequest
from atoll.builds.source_tree import Source, SourceTree
from atoll.builds.steps import Origin, StagePlan
from atoll.engines.contract import Building, Engine
from atoll.errors import BuildError
from atoll.images import Images, tree_view
from atoll.model import SandboxSpec, Volume
from atoll.model.network_policy import NetworkPolicy, NetworkRules, Rule
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from atoll.waiting import Deadline

STEP = "step:"
_WORK_DIR = "/tmp"  # noqa: S108
"""A directory that every sandbox has anyway, so that a build does not leave a `/workspace`."""
_LIFETIME_SLACK_S = 120.0


@dataclass(slots=True)
class Site:
    engine: Engine
    building: Building
    images: Images
    settings: Settings
    request: BuildRequest
    reporter: Reporter
    context: SourceTree
    selections: dict[str, list[Source]]
    deadline: Deadline
    build_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def step_timeout_s(self) -> float:
        """Return how long the next RUN may take."""
        left = self.deadline.left()
        return left if self.request.step_timeout_s is None else min(left, self.request.step_timeout_s)

    async def new_sandbox(self, image: str, volumes: Sequence[Volume] = ()) -> AsyncSandbox:
        """Make a sandbox of an image or a step. It gets its variables with each command, and nothing of the host."""
        request = self.request
        limits = request.limits
        if limits.lifetime_s is None:
            limits = limits.model_copy(update={"lifetime_s": request.timeout_s + _LIFETIME_SLACK_S})
        spec = SandboxSpec.of(
            image=image,
            work_dir=_WORK_DIR,
            hostname="build",
            limits=limits,
            volumes=tuple(volumes),
            network=self.policy(),
            labels=build_labels(self.build_id, request.owner),
            account=request.account,
        )
        return await AsyncSandbox(spec, engine=self.engine, settings=self.settings).create()

    async def check_image(self, sandbox: AsyncSandbox, stage: StagePlan) -> None:
        """Raise BuildError if a sandbox does not lie above the image that the keys of its stage were made from, because
        the image of that name was replaced meanwhile."""
        image = stage.start().image
        used = await workers.run(workers.ENGINE, self.images.store.leased_by, sandbox.id)
        if image is not None and used != image.digest:
            raise BuildError(f"the image {image.reference!r} was replaced during the build", hint="Build again.")

    def policy(self) -> NetworkPolicy:
        """Return what RUN steps may reach: what the request allows, and the mirrors of this machine."""
        asked = self.request.network
        rules = tuple(self.request.mirrors.rules) if self.request.mirrors is not None else ()
        if not rules:
            return asked
        if asked == "all":
            return NetworkRules(default="allow", rules=rules)
        if isinstance(asked, NetworkRules):
            return asked.model_copy(update={"rules": _together(asked.rules, rules)})
        return NetworkRules(rules=rules)

    @asynccontextmanager
    async def opened(self, origin: Origin) -> AsyncIterator[SourceTree]:
        """Provide the tree that `--from` names, for reading."""
        if origin.stage is not None:
            view, name = self._view_of(origin.stage), f"the stage '{origin.stage.name}'"
        else:
            assert origin.image is not None
            view, name = tree_view.view(origin.image.layers), f"the image '{origin.image.reference}'"
        fd = await workers.run(workers.ENGINE, view.__enter__)
        try:
            yield SourceTree(fd, name, keeps_owners=True)
        finally:
            await workers.run(workers.ENGINE, view.__exit__, None, None, None)

    def _view_of(self, stage: StagePlan) -> AbstractContextManager[int]:
        step = stage.last_step()
        if step is not None:
            return self.building.step_view(step.key)
        image = stage.start().image
        if image is None:
            raise BuildError("nothing can be copied from a snapshot", hint="Add a RUN true to the stage.")
        return tree_view.view(image.layers)


def _together(one: tuple[Rule, ...], other: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return (*one, *(rule for rule in other if rule not in one))


def start_of(stage: StagePlan, done: int) -> str:
    """Return what a sandbox is made from that continues after `done` steps of a stage."""
    if done:
        return f"{STEP}{stage.steps[done - 1].key}"
    if stage.parent is not None and (last := stage.parent.last_step()) is not None:
        return f"{STEP}{last.key}"
    return stage.spec_image
