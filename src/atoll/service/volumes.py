"""Named volumes as the users of a server see them. Each user has separate names."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from collections.abc import AsyncIterator, Sequence
from weakref import WeakValueDictionary

from atoll.errors import ConflictError, LimitReachedError, SandboxError, SpecError, VolumeNotFoundError
from atoll.manager import SandboxManager
from atoll.model.volume import VolumeInfo
from atoll.resources import VolumeSizes
from atoll.service.caller import Caller
from atoll.service.models.sandbox_request import SandboxSettings
from atoll.service.models.volume import NamedVolumeInfo

_HINT = "`GET /volumes` lists yours."


class VolumeService:
    """The volumes of users. For a caller, a volume of another user does not exist: VolumeNotFoundError. Administrators
    may name an owner."""

    def __init__(
        self, manager: SandboxManager, sizes: VolumeSizes, *, most: int = 100, most_bytes: int | None = None
    ) -> None:
        """`most` and `most_bytes` apply to each user who has no quota of their own. The size of a volume counts, not
        what is in it."""
        self._manager = manager
        self._sizes = sizes
        self._most = most
        self._most_bytes = most_bytes
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def list(self, caller: Caller, owner: str | None = None) -> builtins.list[NamedVolumeInfo]:
        """Return the caller's volumes, oldest first. Administrators also see those of all other users."""
        wanted = caller.owner if owner is None else owner
        if not caller.is_admin and wanted != caller.user_id:
            return []
        return [NamedVolumeInfo.of(each) for each in await (await self._manager.named_volumes()).volumes(owner=wanted)]

    async def get(self, caller: Caller, name: str, owner: str | None = None) -> NamedVolumeInfo:
        whose = _owner(caller, name, owner)
        return NamedVolumeInfo.of(await (await self._manager.named_volumes()).volume(name, owner=whose))

    async def create(self, caller: Caller, name: str, size_bytes: int | None = None) -> NamedVolumeInfo:
        """Make a volume for the caller. Raises LimitReachedError, ConflictError."""
        async with self._turn(caller, size_bytes, name):
            volumes = await self._manager.named_volumes()
            return NamedVolumeInfo.of(await volumes.create_volume(name, size_bytes=size_bytes, owner=caller.user_id))

    async def copy(
        self, caller: Caller, source: str, name: str, *, read_only: bool = False, size_bytes: int | None = None
    ) -> NamedVolumeInfo:
        """Copy a volume of the caller. Raises LimitReachedError, ConflictError, VolumeNotFoundError."""
        volumes = await self._manager.named_volumes()
        found = await volumes.volume(source, owner=caller.user_id)
        # A copy is as large as its source unless another size is asked for, and never smaller than what is in it.
        size = max(found.size_bytes or 0 if size_bytes is None else size_bytes, found.used_bytes or 0)
        async with self._turn(caller, size, name):
            made = await volumes.copy_volume(
                source, name, read_only=read_only, size_bytes=size_bytes, owner=caller.user_id
            )
        return NamedVolumeInfo.of(made)

    async def restore(self, caller: Caller, name: str, source: str) -> NamedVolumeInfo:
        volumes = await self._manager.named_volumes()
        found = await volumes.volume(name, owner=caller.user_id)
        more = (await volumes.volume(source, owner=caller.user_id)).used_bytes or 0
        async with self._turn(caller, max(0, more - (found.size_bytes or 0))):
            return NamedVolumeInfo.of(await volumes.restore_volume(name, source, owner=caller.user_id))

    async def remove(self, caller: Caller, name: str, owner: str | None = None) -> None:
        """Remove a volume. Raises ConflictError if sandboxes mount it."""
        whose = _owner(caller, name, owner)
        volumes = await self._manager.named_volumes()
        await volumes.volume(name, owner=whose)
        await volumes.remove_volume(name, owner=whose)

    @contextlib.asynccontextmanager
    async def made_for(self, caller: Caller, settings: SandboxSettings) -> AsyncIterator[None]:
        """Make the volumes that the settings name and that do not exist, within the caller's quota. If the block fails,
        they are removed again, unless another sandbox mounts them by then."""
        names = dict.fromkeys(volume.name for volume in settings.volumes if volume.name)
        if any(name.startswith("@") for name in names):
            raise SpecError("a volume's name begins with a letter or a digit", hint="Choose another name.")
        made = [name for name in names if await self._make_missing(caller, name)]
        try:
            yield
        except BaseException:
            for name in made:
                with contextlib.suppress(SandboxError):
                    await (await self._manager.named_volumes()).remove_volume(name, owner=caller.user_id)
            raise

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _make_missing(self, caller: Caller, name: str) -> bool:
        volumes = await self._manager.named_volumes()
        try:
            await volumes.volume(name, owner=caller.user_id)
        except VolumeNotFoundError:
            try:
                await self.create(caller, name)
            except ConflictError:
                return False  # another request has just made it
            return True
        return False

    @contextlib.asynccontextmanager
    async def _turn(self, caller: Caller, size_bytes: int | None, name: str | None = None) -> AsyncIterator[None]:
        """Let the volumes of each user be made one after another, so that the quotas are exact. Raises ConflictError if
        the name of a new volume is taken, and LimitReachedError if this size is too much."""
        async with self._turns.setdefault(caller.user_id, asyncio.Lock()):
            mine = await (await self._manager.named_volumes()).volumes(owner=caller.user_id)
            quotas = caller.quotas
            most = self._most if quotas.max_volumes is None else quotas.max_volumes
            most_bytes = self._most_bytes if quotas.max_volume_bytes is None else quotas.max_volume_bytes
            if any(each.name == name for each in mine):
                raise ConflictError(
                    f"there is already a volume '{name}'", hint="Remove it first, or choose another name."
                )
            if name is not None and len(mine) >= most:
                raise LimitReachedError(
                    f"user {caller.user_id!r} has {len(mine)} volumes, which is the limit", hint="Remove one first."
                )
            wanted = self._sizes.default_bytes if size_bytes is None else size_bytes
            if most_bytes is not None and _sum(mine) + wanted > most_bytes:
                raise LimitReachedError(
                    f"the volumes of user {caller.user_id!r} would hold more than {most_bytes:,} bytes",
                    hint="Remove one first, or ask for a smaller size.",
                )
            yield


def _sum(volumes: Sequence[VolumeInfo]) -> int:
    return sum(volume.size_bytes or 0 for volume in volumes)


def _owner(caller: Caller, name: str, owner: str | None) -> str:
    whose = caller.user_id if owner is None else owner
    if whose != caller.user_id and not caller.is_admin:
        raise VolumeNotFoundError(f"there is no volume {name[:80]!r}", hint=_HINT)
    return whose
