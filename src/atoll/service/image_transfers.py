"""Images of users on their way: to a registry, to a file, and from a file. What arrives belongs to who sent it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import StoredImageNotFoundError, UnsupportedError
from atoll.images.access import Access, pulling_with
from atoll.service.models.image_transfer import ImagePushRequest, PushedImage
from atoll.service.specs import SandboxSpecService

if TYPE_CHECKING:
    from atoll.images import Image, Images
    from atoll.service.caller import Caller


class ImageTransfers:
    """For a caller, an image of another user does not exist: StoredImageNotFoundError."""

    def __init__(self, images: Images | None, specs: SandboxSpecService) -> None:
        """`images` are those of this machine, or None if the engine keeps its images elsewhere."""
        self._kept, self._specs = images, specs

    async def push(self, caller: Caller, wanted: ImagePushRequest) -> PushedImage:
        """Send an image to a registry. Only what the caller may reach is reached."""
        image = await self._found(caller, wanted.name)
        access = self._specs.access(caller, wanted.registry_login)
        with pulling_with(access):
            pushed = await self._images.push(image.reference, wanted.target or "")
        return PushedImage(name=pushed.reference, digest=pushed.digest, sent_bytes=pushed.sent_bytes)

    async def write(self, caller: Caller, name: str, file: Path, room: Callable[[int], None]) -> None:
        """Write an image to a new file. `room` is told how large it may become, and may refuse."""
        image = await self._found(caller, name)
        room(image.size_bytes)
        with pulling_with(Access(owner=caller.user_id)):
            await self._images.save(image.reference, file)

    async def read(self, caller: Caller, file: Path, name: str) -> Image:
        """Make an image from an archive, which is untrusted. Without a name, it has the one in the archive."""
        with pulling_with(self._specs.access(caller)):
            return await (self._images.import_tar(file, name) if name else self._images.load(file))

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _images(self) -> Images:
        if self._kept is None:
            raise UnsupportedError("the engine of this server does not keep its images here")
        return self._kept

    async def _found(self, caller: Caller, name: str) -> Image:
        """Return the caller's image of this name, else everybody's, unless it was pulled with a login."""
        with pulling_with(Access(owner=caller.user_id)):
            image = await self._images.get(name)
        if image.owner or caller.is_admin or not image.private:
            return image
        raise StoredImageNotFoundError(f"there is no image {name[:80]!r}", hint="`GET /images` lists yours.")
