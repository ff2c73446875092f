"""Images as the users of a server see them: their own, and those that are for everybody.

Names of different users do not collide. What a user fetches, imports or builds belongs to them. Only administrators
remove images of everybody, and make such.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from atoll.errors import ImageNotFoundError
from atoll.images import Image, Images, Kind
from atoll.images.access import Access, pulling_with
from atoll.service.caller import Caller
from atoll.service.failures import ForbiddenError
from atoll.service.models.image_info import (
    ImageInfo,
    ImagePruneRequest,
    ImagePullRequest,
    ImagePushRequest,
    PrunedImages,
    PushedImage,
)
from atoll.service.models.sandbox_request import RegistryLogin
from atoll.service.specs import SandboxSpecService


class ImageService:
    """The images of all users. For a caller, an image of another user does not exist: ImageNotFoundError."""

    def __init__(self, images: Images, specs: SandboxSpecService) -> None:
        self._images, self._specs = images, specs

    async def list(self, caller: Caller) -> list[ImageInfo]:
        """Return the images that the caller may see. Administrators see those of all users."""
        return [ImageInfo.of(image) for image in await self._images.ls() if _may_see(caller, image)]

    async def get(self, caller: Caller, reference: str, owner: str | None = None) -> ImageInfo:
        return ImageInfo.of(await self._found(caller, reference, owner))

    async def remove(self, caller: Caller, reference: str, owner: str | None = None) -> None:
        image = await self._found(caller, reference, owner)
        if not image.owner and not caller.is_admin:
            raise ForbiddenError("only administrators may remove images that are for everybody")
        with pulling_with(Access(owner=image.owner)):
            await self._images.remove(image.reference)

    async def pull(self, caller: Caller, wanted: ImagePullRequest) -> ImageInfo:
        """Fetch an image as it is in its registry now."""
        self._check_shared(caller, shared=wanted.shared)
        if not caller.is_admin and self._images.parse(wanted.reference).kind is not Kind.OCI:
            raise ForbiddenError(f"only administrators may fetch what is no registry's: {wanted.reference[:80]!r}")
        with pulling_with(self._access(caller, wanted.registry_login, shared=wanted.shared)):
            return ImageInfo.of(await self._images.pull(wanted.reference))

    async def push(self, caller: Caller, wanted: ImagePushRequest) -> PushedImage:
        """Send an image to a registry."""
        image = await self._found(caller, wanted.reference, None)
        with pulling_with(self._access(caller, wanted.registry_login)):
            pushed = await self._images.push(image.reference, wanted.target or "")
        return PushedImage(reference=pushed.reference, digest=pushed.digest)

    async def take_in(self, caller: Caller, file: Path, name: str, *, shared: bool) -> ImageInfo:
        """Make an image from an archive, which is untrusted. Without a name, it has the one in the archive."""
        self._check_shared(caller, shared=shared)
        with pulling_with(self._access(caller, shared=shared)):
            return ImageInfo.of(await (self._images.import_tar(file, name) if name else self._images.load(file)))

    async def write(
        self, caller: Caller, reference: str, file: Path, room: Callable[[int], None], owner: str | None = None
    ) -> None:
        """Write an image to a new file. `room` is told how large it may become, and may refuse."""
        image = await self._found(caller, reference, owner)
        room(image.size_bytes)
        with pulling_with(Access(owner=image.owner)):
            await self._images.save(image.reference, file)

    async def prune(self, caller: Caller, wanted: ImagePruneRequest) -> PrunedImages:
        """Remove images that no sandbox and no saved state uses: the caller's own, or for administrators all."""

        def mine(image: Image) -> bool:
            return caller.is_admin or image.owner == caller.user_id

        pruned = await self._images.prune(
            all=True, unused_s=wanted.unused_s, chosen=mine, shared_things=caller.is_admin
        )
        return PrunedImages(references=list(pruned.references), freed_bytes=pruned.freed_bytes)

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _found(self, caller: Caller, reference: str, owner: str | None) -> Image:
        if owner is not None and owner != caller.user_id and not caller.is_admin:
            raise _missing(reference)
        with pulling_with(Access(owner=caller.user_id if owner is None else owner)):
            image = await self._images.get(reference)
        if not _may_see(caller, image) or (owner and image.owner != owner):
            raise _missing(reference)
        return image

    def _access(self, caller: Caller, login: RegistryLogin | None = None, *, shared: bool = False) -> Access:
        return self._specs.access(caller, login, shared=shared)

    def _check_shared(self, caller: Caller, *, shared: bool) -> None:
        if shared and not caller.is_admin:
            raise ForbiddenError("only administrators may make images that are for everybody")


def _may_see(caller: Caller, image: Image) -> bool:
    """An image that was pulled with a login is shown only to its owner: its name may say too much."""
    return caller.is_admin or image.owner == caller.user_id or (not image.owner and not image.private)


def _missing(reference: str) -> ImageNotFoundError:
    return ImageNotFoundError(
        f"there is no image {reference[:200]!r} on this server", hint="`GET /images` lists yours."
    )
