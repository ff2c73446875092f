"""The rows of the store, as plain data."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Role(enum.StrEnum):
    USER = "user"
    ADMIN = "admin"


class Quotas(BaseModel):
    """What one user may have at once. None: no limit but those of the server."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    max_sandboxes: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_cpus: Annotated[float, Field(ge=0, le=1_000_000)] | None = None
    max_memory_bytes: Annotated[int, Field(ge=0, le=1 << 62)] | None = None
    max_pids: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    max_disk_bytes: Annotated[int, Field(ge=0, le=1 << 62)] | None = None
    max_snapshots: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_snapshot_bytes: Annotated[int, Field(ge=0, le=1 << 62)] | None = None
    max_specs: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_keys: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    requests_per_s: Annotated[float, Field(gt=0, le=1_000_000)] | None = None


class User(BaseModel):
    model_config = ConfigDict(frozen=True)
    id: str
    role: Role = Role.USER
    quotas: Quotas = Quotas()
    created_at: datetime
    disabled_at: datetime | None = None
    identity: str | None = None
    """The name at the identity provider, as `ISSUER|SUBJECT`. None: a user of this server alone."""


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
    """The key that it was made with. It ends no later than that one, if both belong to the same user."""


class StoredSpec(BaseModel):
    """A spec of the catalogue. `body` is as its service wrote it."""

    model_config = ConfigDict(frozen=True)
    id: str
    owner_id: str | None
    """Whose it is; None: everybody's."""
    body: str
    created_at: datetime
