"""Hard limits of a sandbox, and sizes as people write them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(value: object) -> int:
    """`512m`, `1.5g`, `4096` → bytes. Units are powers of 1024, as in Docker."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"a size is a number of bytes or text such as '512m', not {value!r}")
    match = _SIZE.match(str(value))
    if not match:
        raise ValueError(f"{value!r} is not a size: write a number of bytes, or '512m', '2g'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


Size = Annotated[int, BeforeValidator(parse_size)]


class Limits(BaseModel):
    """Hard caps. None means that none was asked for: the engine's default holds. A cap that was asked for and cannot be
    enforced is refused; a default that cannot be enforced is left out and reported."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    memory_bytes: Annotated[Size, Field(ge=4 << 20)] | None = None
    """Memory, in bytes or as text such as `512m`."""
    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    """CPUs; fractions are allowed."""
    pids: Annotated[int, Field(ge=2, le=4_194_304)] | None = None
    """Processes and threads."""
    disk_bytes: Annotated[Size, Field(ge=1 << 20)] | None = None
    """Disk space, in bytes or as text such as `2g`."""
    inodes: Annotated[int, Field(ge=16)] | None = None
    """Files and directories."""
    open_files: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """Open files of each process."""
    lifetime_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds until the sandbox ends."""

    def over(self, defaults: Limits) -> Limits:
        """These limits, with `defaults` where none is set."""
        asked = {name: value for name in Limits.model_fields if (value := getattr(self, name)) is not None}
        return defaults.model_copy(update=asked)
