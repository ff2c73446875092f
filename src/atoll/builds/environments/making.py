"""Making the image of a ready-made environment: from the cache of this user, otherwise by a build."""

from __future__ import annotations

import dataclasses
import os

from atoll.archive.work import Progress, ProgressCallback
from atoll.builds import Builder, BuildEvent, BuildRequest, OnBuildEvent
from atoll.builds.environments import CONTEXT, NAMES, base, digest
from atoll.builds.mirrors import VARIABLE, parse
from atoll.engines import leases
from atoll.errors import BuildError, ImageError
from atoll.images import Image, Images, Kind
from atoll.images.image_cache import ImageCache
from atoll.model import Limits
from atoll.model.network_policy import NetworkPolicy, NetworkRules, Rule
from atoll.settings import Settings

LIMITS = Limits(disk_bytes=12 << 30, pids=2048)
_TIMEOUT_S = 7200.0
_PUBLIC = NetworkRules(rules=(Rule(domain="*"),))
_SHOWN = 100

__all__ = ["digest", "make"]


async def make(
    images: Images,
    name: str,
    progress: ProgressCallback | None = None,
    *,
    refresh: bool = False,
    on_event: OnBuildEvent | None = None,
) -> Image:
    """Make the image. With `refresh` it is built even if the cache has it. The caller makes sure that nobody else makes
    the same one in this data directory."""
    cache = ImageCache.of_user()
    if cache is not None and not refresh:
        found = await images.work(lambda work: cache.load(images.store, name, digest(name), work), progress)
        if found is not None:
            return found
    if (below := base(name)) in NAMES:
        await images.ensure(below, progress)
    image = await _built(images, name, _Report(name, progress, on_event), no_cache=refresh)
    if cache is not None:
        await images.work(lambda work: cache.keep(images.store, image, work), progress)
    return image


async def _built(images: Images, name: str, report: _Report, *, no_cache: bool) -> Image:
    version = digest(name)
    settings = images.settings or dataclasses.replace(Settings.load(), data_dir=images.data_dir)
    choice = parse(os.environ.get(VARIABLE, ""))
    policy: NetworkPolicy = _PUBLIC if choice is False else "none"
    lease = await leases.acquire("auto", settings)
    try:
        request = BuildRequest(
            context=CONTEXT,
            dockerfile=f"{name}.Dockerfile",
            no_cache=no_cache,
            network=policy,
            use_mirrors=True if choice is None else choice,
            limits=LIMITS,
            timeout_s=_TIMEOUT_S,
        )
        built = (await Builder(lease.engine, images, settings).build(request, report)).image
    except BuildError as error:
        said = " ".join(error.output.split()[-40:])
        raise ImageError(
            f"the environment {name!r} could not be built: {error.reason}{f': {said[-400:]}' if said else ''}",
            hint=error.hint or f"It needs this machine's mirrors of Debian, PyPI and npm, see {VARIABLE}.",
        ) from error
    finally:
        leases.release(lease)
    named = dataclasses.replace(built, reference=name, kind=Kind.ENVIRONMENT, source=version, layers=())
    image = await images.work(lambda work: images.store.name(named, built.digest, work))
    await images.remove_of(built.reference, "")
    return image


class _Report:
    """Passes on the events of a build, as they are and as progress of an image."""

    def __init__(self, name: str, progress: ProgressCallback | None, on_event: OnBuildEvent | None) -> None:
        self._name, self._progress, self._on_event = name, progress, on_event

    def __call__(self, event: BuildEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)
        if self._progress is None:
            return
        if event.kind in ("step", "cached"):
            text = f"{self._name}, step {event.step} of {event.steps}: {event.text}"
            self._progress(Progress("build", text[:_SHOWN], step=event.step, steps=event.steps))
        elif event.kind == "progress":
            self._progress(Progress("build", event.text[:_SHOWN]))
