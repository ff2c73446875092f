"""`config.sandbox`: the settings of the program that runs, for tools which expect them in one global place."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

from atoll.compat.openmanus.sandbox_settings import SandboxSettings

_PLACES = (Path("config/config.toml"), Path("config/config.example.toml"))
_VARIABLE = "OPENMANUS_CONFIG"


class Config:
    """Read when it is first asked for, from the file that the variable `OPENMANUS_CONFIG` names, or from
    `config/config.toml` below the working directory; without one all is as by default."""

    @cached_property
    def sandbox(self) -> SandboxSettings:
        """The section `[sandbox]`. SpecError if it is invalid. May be changed and replaced."""
        named = os.environ.get(_VARIABLE)
        if named:
            return SandboxSettings.load(named)
        found = next((place for place in _PLACES if place.is_file()), None)
        return SandboxSettings() if found is None else SandboxSettings.load(found)


config = Config()
