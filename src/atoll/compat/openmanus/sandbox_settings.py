"""The settings of a sandbox under their OpenManus names, and `config`, which holds those of the running program."""

from __future__ import annotations

import math
import os
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from atoll.errors import SpecError
from atoll.model import Limits, SandboxSpec, parse_size

_LEAST_MEMORY = 6 << 20
"""The minimum that the Docker engine accepts."""


class SandboxSettings(BaseModel):
    """Settings that are validated when they are created and when they are changed."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)
    use_sandbox: Annotated[bool, Field(description="whether tools use the sandbox")] = False
    image: Annotated[str, Field(min_length=1, description="the image it starts from")] = "python:3.12-slim"
    work_dir: Annotated[str, Field(description="where commands and relative paths start")] = "/workspace"
    memory_limit: Annotated[str, Field(description="such as '512m' or '1g'")] = "512m"
    cpu_limit: Annotated[float, Field(gt=0, le=4096, description="processors, also parts of one")] = 1.0
    timeout: Annotated[int, Field(gt=0, description="seconds that a command may take by default")] = 300
    network_enabled: Annotated[bool, Field(description="whether it can reach the network")] = False
    pids_limit: Annotated[int, Field(ge=16, le=4_194_304, description="processes at once")] = 1024

    @field_validator("memory_limit")
    @classmethod
    def _memory(cls, value: str) -> str:
        if parse_size(value) < _LEAST_MEMORY:
            raise ValueError("the minimum is 6 MiB")
        return value

    @field_validator("work_dir")
    @classmethod
    def _work_dir(cls, value: str) -> str:
        return SandboxSpec.of(work_dir=value).directory

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the section `[sandbox]` of a TOML file; without it the defaults apply. Raises SpecError if it is
        invalid."""
        try:
            section = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("sandbox", {})
            return cls.model_validate(section)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SpecError(f"'{path}' is not a TOML file: {error}") from error
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise SpecError(f"[sandbox] in '{path}': {where}: {problem['msg']}") from error

    @classmethod
    def of_spec(cls, spec: SandboxSpec, timeout_s: float | None = None) -> Self:
        """Return the settings of an existing sandbox, with defaults for everything that its spec does not contain."""
        limits = spec.limits
        given = {
            "image": spec.image,
            "work_dir": spec.directory,
            "memory_limit": limits.memory_bytes and str(limits.memory_bytes),
            "cpu_limit": limits.cpus,
            "pids_limit": limits.pids,
            "timeout": timeout_s and max(1, math.ceil(timeout_s)),
        }
        return cls(
            **{name: value for name, value in given.items() if value},  # type: ignore[arg-type]
            network_enabled=spec.network != "none",
        )

    def spec(self, volume_bindings: dict[str, str] | None = None) -> SandboxSpec:
        """Return the spec for these settings. `volume_bindings` are `{host: inside}` or `{host: "inside:ro"}`."""
        return SandboxSpec.of(
            image=self.image,
            work_dir=self.work_dir,
            limits=Limits(memory_bytes=parse_size(self.memory_limit), cpus=self.cpu_limit, pids=self.pids_limit),
            network="all" if self.network_enabled else "none",
            volumes=tuple(_volume(host, inside) for host, inside in (volume_bindings or {}).items()),
        )


def _volume(host: str, inside: str) -> dict[str, object]:
    path, _, mode = inside.partition(":")
    if mode not in ("", "rw", "ro"):
        raise SpecError(f"'{host}:{inside}' is not a volume", hint="Write {'/host': '/inside'} or '/inside:ro'.")
    return {"host": str(Path(host).expanduser().absolute()), "path": path, "read_only": mode == "ro"}


_PLACES = (Path("config/config.toml"), Path("config/config.example.toml"))
_VARIABLE = "OPENMANUS_CONFIG"


class Config:
    """The settings of the running program, for tools that expect them in one global place.

    They are read at the first use, from the file that the variable `OPENMANUS_CONFIG` names, or else from
    `config/config.toml` below the working directory. Without such a file all settings have their defaults.
    """

    @cached_property
    def sandbox(self) -> SandboxSettings:
        """The section `[sandbox]`, which may be changed or replaced. Raises SpecError if it is invalid."""
        named = os.environ.get(_VARIABLE)
        if named:
            return SandboxSettings.load(named)
        found = next((place for place in _PLACES if place.is_file()), None)
        return SandboxSettings() if found is None else SandboxSettings.load(found)


config = Config()
