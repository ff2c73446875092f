"""Images as the users of a server see them: their own, and those of everybody.

A user's image does not exist for other users. What is pulled twice is stored once and counts for each of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from datetime import UTC, datetime

from atoll.engines.contract import Building, Engine
from atoll.errors import (
    LimitReachedError,
    SandboxError,
    SpecError,
    StoredImageNotFoundError,
    UnsupportedError,
)
from atoll.images import Image, Images, ImageUsage, Kind, Progress
from atoll.images.access import pulling_with
from atoll.manager import SandboxManager
from atoll.service.caller import Caller
from atoll.service.failures import ForbiddenError, without_paths
from atoll.service.models.catalogue import ImageProgressInfo
from atoll.service.models.images import (
    ImageDetails,
    ImageInfo,
    ImageLayerInfo,
    ImagePruneRequest,
    ImageSharingRequest,
    ImagesPruned,
    StoredImagePullRequest,
)
from atoll.service.specs import SandboxSpecService
from atoll.workers import Shares

_PULLS = 16
_PULLS_OF_ONE = 2
_MOST_WAITING = 8
_REMEMBERED = 1000
_DAY_S = 86400.0

_Place = tuple[str, str]
"""The owner and the name of an image."""


class ImageService:
    def __init__(
        self, manager: SandboxManager, engine: Engine, specs: SandboxSpecService, images: Images | None
    ) -> None:
        """`images` are those of this machine, or None if the engine keeps its images elsewhere."""
        self._manager, self._engine, self._specs, self._kept = manager, engine, specs, images
        self._pulling: dict[_Place, asyncio.Task[None]] = {}
        self._progress: dict[_Place, ImageProgressInfo] = {}
        self._failed: OrderedDict[_Place, str] = OrderedDict()
        self._slots = Shares(_PULLS, _PULLS_OF_ONE)

    async def aclose(self) -> None:
        for task in self._pulling.values():
            task.cancel()
        await asyncio.gather(*self._pulling.values(), return_exceptions=True)

    @property
    def _images(self) -> Images:
        if self._kept is None:
            raise UnsupportedError(
                f"engine '{self._engine.name}' does not keep its images on this server",
                hint="Ask the server or the Docker engine that makes the sandboxes.",
            )
        return self._kept

    async def list(self, caller: Caller) -> list[ImageInfo]:
        """Return the caller's images, those of everybody, and those that are being pulled. Administrators see all."""
        found = [each for each in await self._images.usage() if _may_see(caller, each.image.owner)]
        mine = await self._sandboxes(caller)
        there = {_place_of(each.image) for each in found}
        infos = [self._info(each, mine) for each in found]
        waiting = dict.fromkeys([*self._pulling, *self._failed])
        return infos + [
            self._without_files(place) for place in waiting if place not in there and _may_see(caller, place[0])
        ]

    async def get(self, caller: Caller, name: str, owner: str | None = None) -> ImageDetails:
        place = self._named(caller, name, owner)
        usages = {_place_of(each.image): each for each in await self._images.usage()}
        found = usages.get(place) or (usages.get(("", place[1])) if owner is None else None)
        if found is None:
            if place in self._pulling or place in self._failed:
                return ImageDetails.model_validate(self._without_files(place).model_dump())
            raise _unknown(name)
        infos = await self._images.layer_infos(found.image)
        config = found.image.config
        return ImageDetails.model_validate(
            self._info(found, await self._sandboxes(caller)).model_dump()
            | {
                "env": config.env,
                "entrypoint": list(config.entrypoint),
                "command": list(config.cmd),
                "work_dir": config.work_dir,
                "user": config.user,
                "labels": config.labels,
                "exposed_ports": list(config.exposed_ports),
                "history": list(config.history),
                "layers": [ImageLayerInfo(digest=each.digest, size_bytes=each.size_bytes) for each in reversed(infos)],
                "notes": [without_paths(note) for note in found.image.notes],
            }
        )

    async def pull(self, caller: Caller, wanted: StoredImagePullRequest) -> ImageInfo:
        """Pull an image from its registry now. Returns at once; `get` shows the progress. Raises LimitReachedError if
        too many pulls of the caller are in progress."""
        reference = self._images.parse(wanted.name)
        if reference.kind is not Kind.OCI:
            raise SpecError(f"{wanted.name!r} does not come from a registry", hint="Write [REGISTRY/]NAME[:TAG].")
        place = (caller.user_id, str(reference))
        if place not in self._pulling:
            if sum(owner == caller.user_id for owner, _ in self._pulling) >= _MOST_WAITING:
                raise LimitReachedError(
                    f"user {caller.user_id!r} pulls {_MOST_WAITING} images at once, which is the limit",
                    hint="Wait until one of them is here.",
                )
            self._failed.pop(place, None)
            access = self._specs.access(caller, wanted.registry_login)
            with pulling_with(access):
                task = self._pulling[place] = asyncio.create_task(self._pull(place), name=f"pull {place[1]}")
            task.add_done_callback(lambda done: self._forget(place, done))
        return self._without_files(place)

    async def delete(self, caller: Caller, name: str, owner: str | None = None) -> None:
        """Delete an image that no sandbox uses, or stop pulling it. Raises ForbiddenError for one of everybody."""
        place = self._named(caller, name, owner)
        task = self._pulling.get(place)
        if task is not None:
            task.cancel()
        was_known = self._failed.pop(place, None) is not None or task is not None
        there = {_place_of(image) for image in await self._images.ls()}
        if place not in there and owner is None and ("", place[1]) in there:
            if not caller.is_admin:
                raise ForbiddenError("only administrators may delete images of everybody")
            place = ("", place[1])
        if place in there:
            await self._images.remove_of(place[1], place[0])
        elif not was_known:
            raise _unknown(name)

    async def prune(self, caller: Caller, wanted: ImagePruneRequest) -> ImagesPruned:
        """Remove what nobody uses: of the caller's own images or, for administrators, of all, with what is kept for
        later pulls and builds."""
        unused_s = wanted.older_days * _DAY_S
        done = await self._images.prune(
            all=wanted.all,
            unused_s=unused_s,
            chosen=None if caller.is_admin else lambda image: image.owner == caller.user_id,
            shared_things=caller.is_admin,
        )
        freed = done.freed_bytes
        if caller.is_admin and isinstance(self._engine, Building):
            freed += await self._engine.prune_steps(unused_s=unused_s)
        return ImagesPruned(names=list(done.references), freed_bytes=freed)

    async def share(self, caller: Caller, wanted: ImageSharingRequest) -> ImageDetails:
        """Give a user's image to everybody, or one of everybody to a user. For administrators."""
        if not caller.is_admin:
            raise ForbiddenError("only administrators may share images")
        name, owner = str(self._images.parse(wanted.name)), wanted.owner or caller.user_id
        here, there = (owner, "") if wanted.shared else ("", owner)
        if not await self._images.give(name, here, there):
            raise _unknown(wanted.name)
        return await self.get(caller, name, there)

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _pull(self, place: _Place) -> None:
        def report(step: Progress) -> None:
            self._progress[place] = ImageProgressInfo.model_validate(step)

        try:
            async with self._slots.slot():
                await self._images.pull(place[1], report)
        except SandboxError as error:
            self._failed[place] = without_paths(str(error))
            while len(self._failed) > _REMEMBERED:
                self._failed.popitem(last=False)
        finally:
            self._progress.pop(place, None)

    def _forget(self, place: _Place, done: asyncio.Task[None]) -> None:
        if self._pulling.get(place) is done:
            del self._pulling[place]

    def _named(self, caller: Caller, name: str, owner: str | None) -> _Place:
        """Return the place of an image: the owner's if an administrator names one, else the caller's."""
        if owner is not None and owner != caller.user_id and not caller.is_admin:
            raise _unknown(name)
        return caller.user_id if owner is None else owner, str(self._images.parse(name))

    async def _sandboxes(self, caller: Caller) -> frozenset[str]:
        records = await self._manager.list_sandboxes(owner=caller.owner)
        return frozenset(record.id for record in records)

    def _info(self, found: ImageUsage, sandboxes: frozenset[str]) -> ImageInfo:
        image, place = found.image, _place_of(found.image)
        return ImageInfo(
            name=image.reference,
            owner_id=image.owner or None,
            status="pulling" if place in self._pulling else "ready",
            detail=self._failed.get(place, ""),
            progress=self._progress.get(place),
            digest=image.digest,
            created_at=datetime.fromtimestamp(image.created_at, UTC),
            size_bytes=image.size_bytes,
            own_bytes=found.own_bytes,
            shared_bytes=found.shared_bytes,
            private=image.private,
            users=[user for user in found.users if user in sandboxes],
        )

    def _without_files(self, place: _Place) -> ImageInfo:
        failed = self._failed.get(place)
        return ImageInfo(
            name=place[1],
            owner_id=place[0] or None,
            status="pulling" if failed is None else "failed",
            detail=failed or "",
            progress=self._progress.get(place),
        )


def _place_of(image: Image) -> _Place:
    return image.owner, image.reference


def _may_see(caller: Caller, owner: str) -> bool:
    return caller.is_admin or owner in ("", caller.user_id)


def _unknown(name: str) -> StoredImageNotFoundError:
    return StoredImageNotFoundError(f"there is no image {name[:80]!r}", hint="`GET /images` lists yours.")
