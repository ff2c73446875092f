"""Named volumes: the part of the contract for engines that have directories which outlive their sandboxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from atoll.model.volume import VolumeInfo


@runtime_checkable
class NamedVolumes(Protocol):
    """An engine with named volumes. It declares `Capability.NAMED_VOLUMES` where it has them.

    A sandbox mounts the volumes that its spec names. One that does not exist is made with the default size. A volume
    belongs to an owner, as a sandbox does (`SandboxSpec.owner`), and for everybody else it does not exist. It is not
    part of checkpoints and snapshots of a sandbox; forks mount the same volumes. Each call has its effect as a whole or
    not at all, also if this process is killed.
    """

    async def create_volume(self, name: str, *, size_bytes: int | None = None, owner: str = "") -> VolumeInfo:
        """Make an empty volume. Raises SpecError for an invalid name or size, UnsupportedError for a size that the
        engine cannot enforce, and ConflictError if there is a volume of that name."""

    async def copy_volume(
        self, source: str, name: str, *, read_only: bool = False, size_bytes: int | None = None, owner: str = ""
    ) -> VolumeInfo:
        """Make a volume with the present content of another one, which may be in use. With `read_only` it is a snapshot
        that no sandbox can change. Raises VolumeNotFoundError, and the errors of `create_volume`."""

    async def restore_volume(self, name: str, source: str, *, owner: str = "") -> VolumeInfo:
        """Replace the content of a volume by the present content of another one. Raises VolumeNotFoundError, and
        ConflictError if a sandbox mounts the volume."""

    async def volumes(self, *, owner: str | None = "") -> Sequence[VolumeInfo]:
        """Return the volumes of an owner, or (None) of all, oldest first, without their users. May be repeated."""

    async def volume(self, name: str, *, owner: str = "") -> VolumeInfo:
        """Return one volume, with its users. May be repeated. Raises VolumeNotFoundError."""

    async def remove_volume(self, name: str, *, owner: str = "") -> None:
        """Remove a volume with everything in it. May be repeated: a volume that does not exist is not an error. Raises
        ConflictError, which names them, if sandboxes mount it."""
