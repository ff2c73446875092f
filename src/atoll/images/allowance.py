"""How much the images of one user of a server may take: checked before an image is made, while it is, and afterwards.

An image counts for each user who has it, although it is stored once. What images of everybody take counts for nobody.
"""

from __future__ import annotations

import contextlib

from atoll.archive.work import Work
from atoll.errors import ImageNotFoundError, LimitReachedError
from atoll.images import access
from atoll.images.access import Access
from atoll.images.image import Image
from atoll.images.image_store import Store
from atoll.images.usage import charged_bytes

_HINT = "Remove images that are not needed: `atoll image ls`, `atoll image rm`, `atoll image prune --all`."


class Allowance:
    """What one access leaves to its owner."""

    def __init__(self, store: Store, access: Access) -> None:
        self._store, self._access = store, access

    def room(self, reference: str) -> int | None:
        """Return how many bytes one more image may have, or None if there is no limit. The image that now has this name
        will be replaced, so it does not count. Raises LimitReachedError if there may be no more images."""
        mine = self._mine()
        others = [image for image in mine if image.reference != reference]
        most = self._access.most_images
        if most is not None and len(others) >= most:
            raise LimitReachedError(
                f"user {self._access.owner!r} has {len(others)} images, which is the limit", hint=_HINT
            )
        if self._access.most_bytes is None or not self._access.owner:
            return None
        left = self._access.most_bytes - charged_bytes(self._store, others)
        if left <= 0:
            raise self._error()
        return left

    def refuse(self, size_bytes: int, room: int | None) -> None:
        """Raise LimitReachedError if this is more than there is room for."""
        if room is not None and size_bytes > room:
            raise self._error()

    def keep_within(self, made: Image, before: Image | None, work: Work) -> Image:
        """Return the image that was just made. If it exceeds the limit after all, its name is given back to the image
        that had it before, or removed. Raises LimitReachedError then."""
        most = self._access.most_bytes
        if most is None or not made.owner or made.owner != self._access.owner:
            return made
        if charged_bytes(self._store, self._mine()) <= most:
            return made
        if before is not None:
            with contextlib.suppress(ImageNotFoundError):
                self._store.name(before, before.digest, work)
                self._store.gc(work)
                raise self._error()
        self._store.remove(made.reference, work, made.owner)
        raise self._error()

    def _mine(self) -> list[Image]:
        owner = self._access.owner
        return [image for image in self._store.ls() if image.owner == owner] if owner else []

    def _error(self) -> LimitReachedError:
        return LimitReachedError(
            f"the images of user {self._access.owner!r} would have more than {self._access.most_bytes:,} bytes",
            hint=_HINT,
        )


class Room:
    """Counts what is written for one image, and refuses more than there is room for."""

    def __init__(self, allowance: Allowance, room: int) -> None:
        self._allowance, self._room = allowance, room
        self._used = 0

    def __call__(self, count: int) -> None:
        self._used += count
        self._allowance.refuse(self._used, self._room)


def current(store: Store) -> Allowance:
    """Return what the access of this context leaves."""
    return Allowance(store, access.current())
