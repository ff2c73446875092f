"""The asynchronous interface to images."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from atoll import workers
from atoll.archive.archive_limits import ImageLimits
from atoll.archive.tree import Measure
from atoll.archive.work import Progress, ProgressCallback, Work, WorkCancelledError
from atoll.cancellation import finish, finish_or_stop
from atoll.errors import ImageError, ImageNotFoundError, SpecError
from atoll.images import access, environments, tree_view, usage
from atoll.images.blobs import BLOB_CACHE_BYTES, Blobs
from atoll.images.image import HOST, Collected, Image, Pushed
from atoll.images.image_store import Store
from atoll.images.layer_roots import LayerInfo
from atoll.images.mirrors import parse_mirrors
from atoll.images.recipes import Recipe, Recipes
from atoll.images.reference import Kind, Reference, debian_suite, parse, parse_name
from atoll.images.usage import ImageUsage, Pruned
from atoll.settings import Settings
from atoll.tracing import span

if TYPE_CHECKING:
    from atoll.images.maker import ImageMaker

T = TypeVar("T")
_SHORT_S = 60.0
_BUILD_S = 7200.0
"""How long to wait for another process that builds the same environment."""
_BUILT = "Use debian:SUITE, the name of a recipe or of an environment; `atoll build DIR` builds a Dockerfile."


class Images:
    """The images of one data directory, which any number of these objects and processes may share.

    The methods raise only errors of `atoll.errors`. Cancelling a call stops its work and removes unfinished files
    before the cancellation reaches the caller. `progress` is called in the event loop.
    """

    def __init__(
        self,
        data_dir: Path | str,
        *,
        limits: ImageLimits | None = None,
        plain_http_registries: Collection[str] = (),
        settings: Settings | None = None,
        registry_mirrors: Collection[str] = (),
        blob_cache_bytes: int = BLOB_CACHE_BYTES,
    ) -> None:
        """`registry_mirrors` are asked before the registry of an image, and `blob_cache_bytes` is how much the layers
        that are kept for later pulls may take. `settings` are those of the sandboxes in which environments are built;
        without them, the settings of this user are used, with this data directory."""
        directory = Path(data_dir).absolute() / "images"
        self.store = Store(directory)
        self.recipes = Recipes(directory / "recipes")
        self.settings = settings
        self.data_dir = directory.parent
        self._limits = limits or ImageLimits()
        self._plain_http_registries = frozenset(plain_http_registries)
        self._mirrors = parse_mirrors(registry_mirrors)
        self._blobs = Blobs(directory / "blobs", blob_cache_bytes)
        self._locks: weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock] = weakref.WeakValueDictionary()

    def parse(self, reference: str) -> Reference:
        return parse(reference, self.recipes.all())

    async def ensure(self, reference: str, progress: ProgressCallback | None = None) -> Image:
        """Return the image. It is made first if it is missing or its recipe or archive has changed.

        A registry or a Docker engine is asked only if the image is missing. Use `pull` to update it.
        """
        return await self._make(await self._resolved(reference), progress, refresh=False)

    async def acquire(self, reference: str, sandbox_id: str, progress: ProgressCallback | None = None) -> Image:
        """Return the image, like `ensure`, and lease it for this sandbox. `release` ends the lease."""
        while True:
            image = await self.ensure(reference, progress)
            if image.root is None:
                return image
            # If the image is removed before it is leased, make it again.
            with contextlib.suppress(ImageNotFoundError):
                await self.lease(sandbox_id, image.digest)
                return image

    async def pull(self, reference: str, progress: ProgressCallback | None = None) -> Image:
        """Get the current image of a reference from its registry or Docker engine.

        Unchanged images are not transferred again.
        """
        parsed = self.parse(reference)
        if parsed.kind not in (Kind.OCI, Kind.DOCKER):
            raise SpecError(f"{reference!r} does not come from a registry", hint="Use build, or import.")
        return await self._make(parsed, progress, refresh=True)

    async def build(self, recipe: str | Recipe, progress: ProgressCallback | None = None) -> Image:
        """Build the image of a suite or a recipe again. A `Recipe` object is stored under its name."""
        if isinstance(recipe, Recipe):
            await workers.run(workers.ENGINE, self.recipes.add, recipe)
            recipe = f"{Kind.RECIPE}:{recipe.name}"
        parsed = self.parse(recipe)
        if parsed.kind not in (Kind.DEBIAN, Kind.RECIPE, Kind.ENVIRONMENT):
            raise SpecError(f"{recipe!r} is not built here", hint=_BUILT)
        return await self._make(parsed, progress, refresh=True)

    async def import_tar(self, path: Path | str, name: str = "", progress: ProgressCallback | None = None) -> Image:
        """Import an archive, compressed or not: a root file system or a saved image.

        The image is named `tar:PATH` or `name`, which must have the form of a registry's reference, such as `mine` or
        `team/mine:1`.
        """
        source = parse(f"tar:{Path(path).absolute()}")
        target = self.parse(name) if name else source
        if target.kind is not Kind.OCI and target != source:
            raise SpecError(f"{name!r} already means something else", hint="Choose a name such as mine or team/mine:1.")
        return await self._make(target, progress, refresh=True, archive=source)

    async def get(self, reference: str) -> Image:
        """Return an image of the store, without pulling or building it. Raises ImageNotFoundError."""
        parsed = await self._resolved(reference)
        return HOST if parsed.kind is Kind.HOST else await workers.run(workers.ENGINE, self._get, str(parsed))

    async def ls(self) -> list[Image]:
        """Return the images of all owners."""
        return await workers.run(workers.ENGINE, self.store.ls)

    async def usage(self) -> list[ImageUsage]:
        """Return the images of all owners with what each takes alone and shares with others, and who uses it."""
        return await self._run(lambda _: usage.usage(self.store))

    async def verify(self, reference: str, progress: ProgressCallback | None = None) -> Measure:
        image = await self.get(str(self._stored(reference)))
        return await self._run(lambda work: self.store.verify(image.reference, work, image.owner), progress)

    async def remove(self, reference: str) -> None:
        image = await self.get(str(self._stored(reference)))
        await self._run(lambda work: self.store.remove(image.reference, work, image.owner))

    async def remove_of(self, name: str, owner: str) -> None:
        """Remove the image that has this full name for this owner."""
        await self._run(lambda work: self.store.remove(name, work, owner))

    async def layer_infos(self, image: Image) -> Sequence[LayerInfo]:
        """Return the layers of an image, topmost first."""
        return await workers.run(workers.ENGINE, self.store.layer_infos, image.digest)

    async def give(self, name: str, owner: str, to: str) -> bool:
        """Give the image that has this full name to another owner, or to everybody (""). Returns False if there is
        none. What everybody has is not private any more."""

        def change(work: Work) -> bool:
            image = self.store.find(name, owner)
            if image is None:
                return False
            given = dataclasses.replace(image, owner=to, private=image.private and bool(to))
            self.store.name(given, image.digest, work)
            if to != owner:
                self.store.remove(name, work, owner)
            return True

        return await self._run(change)

    async def prune(
        self,
        *,
        all: bool = False,
        unused_s: float = 0.0,
        chosen: Callable[[Image], bool] | None = None,
        shared_things: bool = True,
    ) -> Pruned:
        """Remove what nobody uses: images without a name, and layers kept for later pulls. With `all`, images with a
        name are removed as well if no sandbox and no saved state uses them, or those of them that are `chosen`.

        With `unused_s`, only what is that many seconds old is removed; without `shared_things`, only images.
        """
        which = (chosen or _any) if all else None
        return await self._run(
            lambda work: usage.prune(
                self.store, self._blobs, work, chosen=which, unused_s=unused_s, shared_things=shared_things
            )
        )

    async def save(
        self, reference: str, file: Path | str, progress: ProgressCallback | None = None, *, name: str = ""
    ) -> int:
        """Write an image to an archive that `docker load`, skopeo and `load` read, and return its size. The archive
        calls the image `name`, by default as it is called here."""
        from atoll.images import oci_archive

        parsed = self._stored(reference)
        image = await self.get(str(parsed))
        called = oci_archive.docker_name(parse_name(name) if name else self.parse(image.reference))
        target = Path(file).absolute()

        def write(work: Work) -> int:
            with self.store.reading(image, work), self.store.draft(work) as draft:
                packed = oci_archive.packed(image, draft.scratch, work)
                return oci_archive.write_archive(packed, called, target, work)

        return await self._run(write, progress)

    async def load(self, file: Path | str, name: str = "", progress: ProgressCallback | None = None) -> Image:
        """Store the image of an archive that `save`, `docker save` or another program wrote. It gets the name that it
        has in the archive, unless there is another one."""
        maker = self._maker()
        return await self._run(lambda work: maker.load(Path(file).absolute(), name, work), progress)

    async def push(self, reference: str, target: str = "", progress: ProgressCallback | None = None) -> Pushed:
        """Send an image to a registry, under its own name or as `target`. Layers that the registry has are not sent."""
        from atoll.images import oci_archive
        from atoll.images.push import Push
        from atoll.images.registry_client import RegistryClient

        parsed = self._stored(reference)
        image = await self.get(str(parsed))
        to = parse_name(target) if target else parsed
        if to.kind is not Kind.OCI or to.digest:
            raise SpecError(f"{str(to)!r} is not a name in a registry", hint="Say where to: [REGISTRY/]NAME[:TAG].")
        who = access.current()

        def send(work: Work) -> Pushed:
            client = RegistryClient(
                to,
                self._limits,
                work,
                plain_http_registries=self._plain_http_registries,
                access=who,
                actions="pull,push",
            )
            with self.store.reading(image, work), self.store.draft(work) as draft:
                return Push(client).push(oci_archive.packed(image, draft.scratch, work))

        with span("image.push", image=str(to)):
            return await self._run(send, progress)

    async def gc(self) -> Collected:
        def collect(work: Work) -> Collected:
            self._blobs.sweep()
            return self.store.gc(work)

        return await self._run(collect)

    async def lease(self, sandbox_id: str, digest: str) -> tuple[Path, ...]:
        """Prevent the removal of an image while a sandbox uses it. Returns its layers, topmost first."""
        return await self._run(
            lambda work: self.store.lease(sandbox_id, digest, work), timeout_s=_SHORT_S, kind=workers.ENGINE
        )

    async def release(self, sandbox_id: str) -> None:
        await workers.run(workers.ENGINE, self.store.release, sandbox_id)

    async def leases(self) -> dict[str, str]:
        return await workers.run(workers.ENGINE, self.store.leases)

    @contextlib.contextmanager
    def view(self, reference: str) -> Iterator[int]:
        """Provide a descriptor of the files of a stored image, for reading. Blocks, see `tree_view.view`."""
        self._stored(reference)
        with tree_view.view(self._get(str(self._meaning(reference))).layers) as fd:
            yield fd

    async def work(self, function: Callable[[Work], T], progress: ProgressCallback | None = None) -> T:
        """Run blocking work on images in a thread, like all work of this class."""
        return await self._run(function, progress)

    async def _resolved(self, reference: str) -> Reference:
        if not debian_suite(reference):
            return self.parse(reference)
        return await workers.run(workers.ENGINE, self._meaning, reference)

    def _meaning(self, reference: str) -> Reference:
        """Parse a reference. `debian:12` and the like mean an image of that name which is here, else the suite that is
        built here. The name of a recipe means the recipe."""
        suite = debian_suite(reference)
        if not suite or reference in self.recipes.all():
            return self.parse(reference)
        named = parse_name(reference)
        return named if self._find(str(named)) is not None else Reference(Kind.DEBIAN, suite)

    def _find(self, name: str) -> Image | None:
        """Return the image that this name means for the present access: the owner's, else that of everybody."""
        owner = access.current().owner
        return (self.store.find(name, owner) if owner else None) or self.store.find(name)

    def _get(self, name: str) -> Image:
        return self._find(name) or self.store.get(name)

    def _stored(self, reference: str) -> Reference:
        parsed = self.parse(reference)
        if parsed.kind is Kind.HOST:
            raise SpecError("'host' is this machine itself, not a stored image")
        return parsed

    async def _make(
        self,
        reference: Reference,
        progress: ProgressCallback | None,
        *,
        refresh: bool,
        archive: Reference | None = None,
    ) -> Image:
        if reference.kind is Kind.HOST:
            return HOST
        if reference.kind is Kind.ENVIRONMENT and archive is None:
            return await self._environment(reference.name, progress, refresh=refresh)
        maker = self._maker()
        source = archive or reference
        if not refresh:
            # An image that exists already must not wait for the pulls of other callers.
            image = await self._run(lambda _: maker.present(reference, source), kind=workers.ENGINE)
            if image is not None:
                return image
        is_pulled = source.kind in (Kind.OCI, Kind.DOCKER)
        with span("image.pull" if is_pulled else "image.make", image=str(reference) if is_pulled else reference.kind):
            async with self._one_at_a_time(f"{access.current().owner}\0{reference}"):
                return await self._run(
                    lambda work: maker.make(reference, source, work, refresh=refresh), progress, kind=None
                )

    async def _environment(self, name: str, progress: ProgressCallback | None, *, refresh: bool) -> Image:
        """Return the image of an environment. Of all callers and processes that want it, one builds it.

        No slot for work on images is held meanwhile, because the build itself needs some.
        """
        maker = environments.maker()
        if not refresh and (image := await self._current(name, maker.digest(name))) is not None:
            return image
        lock = self._locks.setdefault((id(asyncio.get_running_loop()), name), asyncio.Lock())
        async with lock, self._alone(name, progress):
            if not refresh and (image := await self._current(name, maker.digest(name))) is not None:
                return image
            # Environments are Atoll's own, so whoever wants one first makes it as the operator, for everybody.
            with span("image.make", image=Kind.ENVIRONMENT), access.pulling_with(access.OPERATOR):
                return await maker.make(self, name, progress, refresh=refresh)

    async def _current(self, name: str, source: str) -> Image | None:
        image = await workers.run(workers.ENGINE, self.store.find, name)
        return image if image is not None and image.source == source else None

    @contextlib.asynccontextmanager
    async def _alone(self, name: str, progress: ProgressCallback | None) -> AsyncIterator[None]:
        """Hold the lock for making an environment, among all processes."""

        def taken(work: Work) -> contextlib.AbstractContextManager[None]:
            lock = self.store.making(name, work)
            lock.__enter__()
            return lock

        lock = await self._run(taken, progress, _BUILD_S)
        try:
            yield
        finally:
            await finish(workers.run(workers.ENGINE, lock.__exit__, None, None, None))

    def _maker(self) -> ImageMaker:
        from atoll.images.maker import ImageMaker  # not needed for `host`, and slow to import

        return ImageMaker(
            self.store,
            self.recipes,
            self._limits,
            access.current(),
            blobs=self._blobs,
            plain_http=self._plain_http_registries,
            mirrors=self._mirrors,
        )

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self, name: str) -> AsyncIterator[None]:
        """Hold a slot for work on images, for only one task of this event loop per image.

        Callers that want the same image wait without a slot. The lock of an image is not held while waiting for a slot,
        because another account may still have a slot and want the same image.
        """
        key = (id(asyncio.get_running_loop()), name)
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        shares = workers.workers(workers.IMAGE).shares
        while True:
            async with shares.slot():
                if not lock.locked():
                    async with lock:
                        yield
                        return
            async with lock:
                pass

    async def _run(
        self,
        function: Callable[[Work], T],
        progress: ProgressCallback | None = None,
        timeout_s: float | None = None,
        *,
        kind: workers.Kind | None = workers.IMAGE,
    ) -> T:
        """Run blocking work in a thread. A cancelled caller continues only when the thread has cleaned up.

        `kind` None means that the caller already holds a slot for work on images.
        """
        loop = asyncio.get_running_loop()

        def report(step: Progress) -> None:
            if progress is not None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(progress, step)

        threads, done = workers.workers(kind or workers.IMAGE), _nothing
        if kind is not None:
            done = functools.partial(threads.shares.release, await threads.shares.acquire())
        work = Work(report, timeout_s=timeout_s or self._limits.timeout_s)
        running = threads.run_in_slot(functools.partial(_translated, function, work), done)
        return await finish_or_stop(running, work.cancel)


def _nothing() -> None:
    pass


def _any(_: Image) -> bool:
    return True


def _translated(function: Callable[[Work], T], work: Work) -> T:
    """Run the function, and convert errors of the operating system to ImageErrors with hints for the user."""
    try:
        return function(work)
    except OSError as error:
        work.check()
        hint = None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "Free some space: remove images that you do not need, and run gc."
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "Choose a data directory that you may write to."
        raise ImageError(
            f"the image store failed: {error.strerror or error} ({error.filename or 'no file'})", hint=hint
        ) from error
    except WorkCancelledError:
        raise ImageError("the work was cancelled") from None
