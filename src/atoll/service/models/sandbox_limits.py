"""The limits of a sandbox, and the request to change them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from atoll.model import Limits, manus_names
from atoll.model.spec import MAX_BYTES, Size
from atoll.service.models.request_model import RequestModel


class LimitOptions(BaseModel):
    """Limits under the names that they have as options of a sandbox."""

    memory: Annotated[Size, Field(ge=4 << 20, le=MAX_BYTES)] | None = None
    """Memory, in bytes or as text such as `512m`."""
    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    """CPUs; fractions are allowed."""
    pids: Annotated[int, Field(ge=2, le=4_194_304)] | None = None
    """Processes and threads."""
    disk: Annotated[Size, Field(ge=1 << 20, le=MAX_BYTES)] | None = None
    """Disk space, in bytes or as text such as `2g`."""

    def limits(self) -> Limits:
        return Limits(memory_bytes=self.memory, cpus=self.cpus, pids=self.pids, disk_bytes=self.disk)


class LimitsRequest(RequestModel, LimitOptions):
    """The limits to change. Those that are left out stay as they are."""

    @classmethod
    def translated(cls, given: Mapping[Any, Any]) -> dict[str, Any]:
        return manus_names.limit_options(given, cls.model_fields)


class SandboxLimits(BaseModel):
    """The limits of a sandbox."""

    limits: Limits
    """The limits that were requested."""
    effective_limits: Limits
    """The limits that are enforced: those requested, and defaults for the others."""
    limits_left_out: list[str]
    """The names of default limits that this server cannot enforce."""
    changeable: list[str]
    """The options that can be changed while sandboxes of the default isolation level run: some of `memory`, `cpus`,
    `pids` and `disk`."""
