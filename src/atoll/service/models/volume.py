"""Requests and answers about named volumes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, Field

from atoll.model import MAX_BYTES, Size
from atoll.model.volume import VolumeInfo
from atoll.service.models.request_model import RequestModel

VOLUME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
VolumeSize = Annotated[Size, Field(ge=1 << 20, le=MAX_BYTES)]


class NamedVolumeInfo(BaseModel):
    """A named volume: a directory that outlives the sandboxes which mount it."""

    name: str
    """The name of the volume, unique among its owner's."""
    owner_id: str
    """The user whom the volume belongs to."""
    created_at: datetime
    """When the volume was made."""
    size_bytes: int | None
    """How much it can hold. Null: the engine sets no limit."""
    used_bytes: int | None
    """How much of that is used. Null: the engine does not count it."""
    read_only: bool
    """Whether it is a snapshot, which can only be mounted read-only."""
    source: str | None
    """The volume that it was copied from."""
    users: list[str]
    """The ids of the sandboxes that mount it. Empty in lists."""

    @classmethod
    def of(cls, volume: VolumeInfo) -> NamedVolumeInfo:
        return cls(
            name=volume.name,
            owner_id=volume.owner,
            created_at=datetime.fromtimestamp(volume.created_at, UTC),
            size_bytes=volume.size_bytes,
            used_bytes=volume.used_bytes,
            read_only=volume.read_only,
            source=volume.source,
            users=list(volume.users),
        )


class VolumeRequest(RequestModel):
    """The volume to make."""

    of = "a volume"
    name: Annotated[str, Field(pattern=VOLUME_PATTERN)]
    """A name for the volume, unique among the caller's volumes."""
    size: VolumeSize | None = None
    """How much it can hold, in bytes or as text such as `2g`. Default: the server's."""


class VolumeCopyRequest(VolumeRequest):
    """The copy to make of a volume."""

    of = "a copy"
    read_only: bool = False
    """Whether the copy is a snapshot, which no sandbox can change."""


class RestoreRequest(RequestModel):
    """What to restore a volume from."""

    of = "a restoration"
    source: Annotated[str, Field(pattern=VOLUME_PATTERN)]
    """The snapshot, or another volume, whose content the volume gets."""
