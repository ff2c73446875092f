"""What named volumes are called, and what the store keeps about each."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field

from atoll.errors import SpecError
from atoll.model.spec import VOLUME_NAME_RULE, is_volume_name

_CACHE = re.compile(r"@[0-9a-f]{40}")


class VolumeRecord(BaseModel):
    """What is kept about a volume. It is complete when its record exists."""

    model_config = ConfigDict(frozen=True)
    id: str
    """The name of its subvolume."""
    name: str
    owner: str = ""
    """The user whom it belongs to. Empty: the user of this machine."""
    size_bytes: int = Field(gt=0)
    created_at: float
    read_only: bool = False
    """Whether it can only be mounted read-only, because it is a snapshot."""
    source: str = ""
    """The volume that it was copied from."""
    inherited_bytes: int = 0
    """What it had when it was copied, which counts for it although another subvolume wrote it."""

    @property
    def is_cache(self) -> bool:
        return is_cache(self.name)


def is_cache(name: str) -> bool:
    return name.startswith("@")


def checked_name(name: str) -> str:
    """Return the name of a volume. Raises SpecError if it is none."""
    if not (is_volume_name(name) or _CACHE.fullmatch(name)):
        raise SpecError(f"{name[:80]!r} cannot be the name of a volume", hint=f"{VOLUME_NAME_RULE.capitalize()}.")
    return name
