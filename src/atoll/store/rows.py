"""The rows of the store, as plain data."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Role(enum.StrEnum):
    """The role of a user. Administrators see and manage everything on the server."""

    USER = "user"
    ADMIN = "admin"


class Quotas(BaseModel):
    """What one user may have at once. Null: no limit beyond those of the server."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    max_sandboxes: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """The most sandboxes."""
    max_cpus: Annotated[float, Field(ge=0, le=1_000_000)] | None = None
    """The most CPUs of all sandboxes together."""
    max_memory_bytes: Annotated[int, Field(ge=0, le=1 << 62)] | None = None
    """The most memory of all sandboxes together."""
    max_pids: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    """The most processes of all sandboxes together."""
    max_disk_bytes: Annotated[int, Field(ge=0, le=1 << 62)] | None = None
    """The most disk space of all sandboxes together."""
    max_snapshots: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """The most snapshots."""
    max_snapshot_bytes: Annotated[int, Field(ge=0, le=1 << 62)] | None = None
    """The most space of all snapshots together."""
    max_volumes: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """The most named volumes."""
    max_volume_bytes: Annotated[int, Field(ge=0, le=1 << 62)] | None = None
    """The most bytes that all named volumes together may hold."""
    max_images: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """The most images."""
    max_image_bytes: Annotated[int, Field(ge=0, le=1 << 62)] | None = None
    """The most space of all images together. Images of everybody do not count."""
    max_specs: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """The most specs."""
    max_builds: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """The most builds of images at once. Null: as many as the server allows each user. 0: none."""
    max_keys: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """The most valid API keys."""
    requests_per_s: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """The most requests per second."""


class User(BaseModel):
    """A user of the server."""

    model_config = ConfigDict(frozen=True)
    id: str
    """The id of the user."""
    role: Role = Role.USER
    """The role of the user."""
    quotas: Quotas = Quotas()
    """What the user may have."""
    created_at: datetime
    """When the user was created."""
    disabled_at: datetime | None = None
    """When the user was locked out. Null: the user is not locked out."""
    identity: str | None = None
    """The user's name at the identity provider, as `ISSUER|SUBJECT`. Null: the user does not come from a provider."""


class ApiKey(BaseModel):
    """A key without its secret, of which only the hash is kept."""

    model_config = ConfigDict(frozen=True)
    id: str
    user_id: str
    name: str
    hash: bytes
    scopes: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    parent_id: str | None = None
    """The key that this one was created with. If both belong to the same user, this one ends no later."""


class StoredSpec(BaseModel):
    """A spec of the catalogue. `body` is as the service wrote it."""

    model_config = ConfigDict(frozen=True)
    id: str
    owner_id: str | None
    """The owner's id, or None if the spec is shared with everybody."""
    body: str
    created_at: datetime
