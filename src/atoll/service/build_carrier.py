"""What carries out the builds of a server: its engine, and the images of its installation."""

from __future__ import annotations

from atoll.builds import BuildRequest, BuiltImage, OnBuildEvent
from atoll.cancellation import finish
from atoll.engines.contract import Building, Engine
from atoll.errors import UnsupportedError
from atoll.images import Image, Images, allowance
from atoll.settings import Settings


class BuildCarrier:
    def __init__(self, engine: Engine, images: Images | None, settings: Settings) -> None:
        """`images` are those of this machine, or None if the engine keeps its images elsewhere."""
        self._engine, self._images, self._settings = engine, images, settings

    def check(self) -> None:
        """Raise UnsupportedError if images cannot be built here."""
        if not isinstance(self._engine, Building):
            raise UnsupportedError(
                f"the engine '{self._engine.name}' of this server cannot build images",
                hint="Engines 'native' and 'oci' can, as root and with btrfs-progs installed.",
            )

    async def build(self, request: BuildRequest, on_event: OnBuildEvent) -> BuiltImage:
        """Carry out a build. Cancelling it leaves nothing behind but finished steps in the cache. Raises
        LimitReachedError if the image exceeds the quota of its owner, and then it is not kept."""
        from atoll.builds.builder import Builder  # not needed before the first build

        self.check()
        images = self._images or Images(self._settings.data_dir)
        name = str(images.parse(request.name)) if request.name else ""
        before = await images.work(lambda _: self._before(images, name, request.owner))
        built = await Builder(self._engine, images, self._settings).build(request, on_event)
        await finish(images.work(lambda work: allowance.current(images.store).keep_within(built.image, before, work)))
        return built

    def _before(self, images: Images, name: str, owner: str) -> Image | None:
        """Return the image that the build will replace. Raises LimitReachedError if there is no room for another."""
        allowance.current(images.store).room(name)
        return images.store.find(name, owner) if name else None

    async def sweep(self) -> None:
        """Remove the sandboxes of builds whose process has died."""
        if isinstance(self._engine, Building):
            from atoll.builds.labels import sweep

            await sweep(self._engine)
