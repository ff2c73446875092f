"""What FROM and `--from` name: an image of this machine, a suite, a recipe, an image of a registry, or a snapshot."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from atoll import workers
from atoll.archive.work import Progress, Work
from atoll.builds.request import BuildEvent, NameBase, OnBuildEvent
from atoll.builds.steps import key_of
from atoll.engines.checkpointing import Checkpointing
from atoll.engines.contract import Engine, supporting
from atoll.engines.host.environment import PATH
from atoll.errors import BuildError, ImageNotFoundError, SnapshotNotFoundError
from atoll.images import Image, ImageConfig, Images, Kind
from atoll.images.reference import DEFAULT_REGISTRY, SUITES

SCRATCH = "scratch"
_SCRATCH_NAME = f"{DEFAULT_REGISTRY}/library/{SCRATCH}:latest"
_SNAPSHOT = "snapshot:"
_DEBIAN = re.compile(r"^(?:docker\.io/)?(?:library/)?debian(?::(?P<tag>[A-Za-z0-9_.-]+))?\Z")
_NUMBERS = {"11": "bullseye", "12": "bookworm", "13": "trixie", "latest": "stable", "": "stable"}
_SLIM = "-slim"


@dataclass(frozen=True, slots=True)
class Base:
    """What a stage starts from."""

    spec_image: str
    """What a sandbox of it is asked for by."""
    key: str
    config: ImageConfig
    image: Image | None = None
    """None: a snapshot, whose files cannot be read on the host."""


class Bases:
    def __init__(
        self,
        engine: Engine,
        images: Images,
        on_event: OnBuildEvent,
        owner: str,
        name_base: NameBase | None = None,
    ) -> None:
        self._engine = engine
        self._images = images
        self._on_event = on_event
        self._owner = owner
        self._name_base = name_base
        self._known: dict[str, Base] = {}

    async def find(self, name: str) -> Base:
        """Return what this name stands for. An image that is not here is pulled or built first."""
        if name not in self._known:
            found = await self._find(name)
            with_path = {"PATH": PATH} | found.config.env  # as with Docker, PATH is always set
            self._known[name] = replace(found, config=replace(found.config, env=with_path))
        return self._known[name]

    async def _find(self, name: str) -> Base:
        if self._name_base is not None:
            name = await self._name_base(name)
        if name == "host":
            raise BuildError(
                "the image 'host' is a view of this machine's own programs, and no image can be made from it",
                hint="Start from debian:bookworm, an image of a registry, or scratch.",
            )
        if name.startswith(_SNAPSHOT):
            return await self._snapshot(name)
        if name == SCRATCH:
            image = await self._scratch()
            return self._base(SCRATCH, replace(image, config=ImageConfig(work_dir="/")))
        for candidate in await workers.run(workers.ENGINE, self._candidates, name):
            image = await self._images.ensure(candidate, self._progress(name))
            return self._base(candidate, image)
        raise ImageNotFoundError(f"there is no image {name[:200]!r}")

    def _base(self, spec_image: str, image: Image) -> Base:
        # The chain of keys begins with the owner: nobody's steps depend on what somebody else's commands did.
        return Base(spec_image, key_of("base", self._owner, image.digest), image.config, image)

    def _candidates(self, name: str) -> list[str]:
        """Return the name under which an image of FROM is to be looked for: what is here comes before a registry."""
        debian = _DEBIAN.match(name)
        if debian is None:
            return [name]
        tag = debian["tag"] or ""
        suite = _NUMBERS.get(tag.removesuffix(_SLIM), tag.removesuffix(_SLIM))
        full = f"{DEFAULT_REGISTRY}/library/debian:{tag or 'latest'}"
        if name.startswith(DEFAULT_REGISTRY) or self._images.store.find(full) is not None:
            return [full]
        return [f"{Kind.DEBIAN}:{suite}"] if suite in SUITES else [full]

    async def _snapshot(self, name: str) -> Base:
        keeper = await supporting(self._engine, Checkpointing)
        for each in await keeper.snapshots() if keeper is not None else ():
            if each.name == name.removeprefix(_SNAPSHOT):
                key = key_of("snapshot", self._owner, each.name, each.created_at, each.source, each.image_digest)
                return Base(name, key, await self._config_of(each.image))
        raise SnapshotNotFoundError(f"there is no {name[:200]!r}", hint="`atoll snapshot ls` lists them.")

    async def _config_of(self, image: str) -> ImageConfig:
        """Return the configuration of the image that a snapshot was made over."""
        try:
            return (await self._images.get(image)).config
        except ImageNotFoundError:
            return ImageConfig()

    async def _scratch(self) -> Image:
        """Return the image without any file, which is made when it is first needed."""
        found = await workers.run(workers.IMAGE, self._images.store.find, _SCRATCH_NAME)
        return found if found is not None else await workers.run(workers.IMAGE, self._make_scratch)

    def _make_scratch(self) -> Image:
        work = Work()
        store = self._images.store
        with store.making(_SCRATCH_NAME, work):
            found = store.find(_SCRATCH_NAME)
            if found is not None:
                return found
            with store.draft(work) as draft:
                return store.commit(draft, Image(_SCRATCH_NAME, Kind.OCI, source=SCRATCH), work)

    def _progress(self, name: str) -> ProgressReport:
        return ProgressReport(name, self._on_event)


class ProgressReport:
    """Passes the progress of an image on as events, the same step only once for each percent."""

    def __init__(self, name: str, on_event: OnBuildEvent) -> None:
        self._name = name
        self._on_event = on_event
        self._last: tuple[str, int] | None = None

    def __call__(self, step: Progress) -> None:
        part = 100 * step.done_bytes // step.total_bytes if step.total_bytes else step.done_bytes >> 23
        if (now := (step.stage, part)) != self._last:
            self._last = now
            done = f"{part} %" if step.total_bytes else f"{step.done_bytes >> 20} MiB"
            self._on_event(BuildEvent("progress", f"{self._name}: {step.stage} {step.detail[:80]} {done}"))
