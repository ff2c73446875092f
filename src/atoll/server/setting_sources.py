"""Where the settings of a server come from: a table of a TOML file, and variables of the environment.

A setting that does not exist is reported with the name that was probably meant. In the file it is an error. In the
environment it is a warning, because other programs and other parts of Atoll have variables there too.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource

from atoll.errors import SpecError
from atoll.printable import printable

PREFIX = "ATOLL_"
TABLE = "server"
_ELSEWHERE = re.compile(
    r"ATOLL_(URL|API_KEY|CONFIG|DATA_DIR|RUN_DIR|DOCKER_IMAGE|IMAGE_CACHE|DATABASE_PASSWORD"
    r"|(SANDBOX|USER|TOTAL|NETWORK|TEST)_\w+)"
)
"""The variables of other parts: of clients, of the installation, of its limits, of the gateway and of tests."""
_SHOWN = 80


class Variables(EnvSettingsSource):
    """The variables `ATOLL_NAME` in upper case. Empty ones count as absent, and lists are separated by commas."""

    def __init__(self, settings_cls: type[BaseSettings], environ: Mapping[str, str]) -> None:
        super().__init__(settings_cls, case_sensitive=False, env_prefix=PREFIX)
        own = {variable_of(name): name for name in settings_cls.model_fields}
        self.env_vars = {name.lower(): environ[name] for name in own if environ.get(name)}

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> list[str]:
        return [part.strip() for part in str(value).split(",")]


class ServerTable(PydanticBaseSettingsSource):
    """The table `[server]` of a file, or nothing without a file."""

    def __init__(self, settings_cls: type[BaseSettings], path: Path | None) -> None:
        super().__init__(settings_cls)
        self._table = {} if path is None else _read(path, settings_cls.model_fields)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._table.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(self._table)


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def unknown_variables(environ: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Return a sentence for each variable that looks like one of Atoll's but is read by nothing."""
    known = {variable_of(name) for name in names}
    unknown = [name for name in environ if name.startswith(PREFIX) and name not in known]
    found = []
    for name in sorted(unknown):
        if not _ELSEWHERE.fullmatch(name):
            near = _nearest(name.removeprefix(PREFIX), names)
            meant = f"; did you mean {variable_of(near)}?" if near else ""
            found.append(f"the variable {printable(name, _SHOWN)} is not a setting and is ignored{meant}")
    return found


def _read(path: Path, names: Collection[str]) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError(
            f"cannot read the configuration '{path}': {error}", hint="It has to be a readable TOML file."
        ) from error
    _check_tables(path, document, names)
    table = document.get(TABLE, {})
    if not isinstance(table, dict):
        raise SpecError(
            f"'{TABLE}' in '{path}' is not a table", hint=f"Write `[{TABLE}]` on a line above the settings."
        )
    for name in table:
        if name not in names:
            near = _nearest(name, names)
            raise SpecError(
                f"Invalid server configuration: there is no setting {printable(name, _SHOWN)!r} ('{path}')",
                hint=(f"Did you mean {near}? " if near else "") + "`atoll config` lists all settings.",
            )
    return table


def _check_tables(path: Path, document: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise SpecError for settings outside of the table, or in one whose name is nearly right: they would be ignored
    silently. Other tables belong to other programs."""
    for name in document:
        if name != TABLE and (name in names or difflib.get_close_matches(name, [TABLE], cutoff=0.8)):
            raise SpecError(
                f"{printable(name, _SHOWN)!r} in '{path}' is not below [{TABLE}]",
                hint=f"Settings of the server belong below a line `[{TABLE}]`.",
            )


def _nearest(name: str, names: Collection[str]) -> str | None:
    """Return the name that was probably meant, if one is near."""
    return next(iter(difflib.get_close_matches(name[:_SHOWN].lower(), names, 1, 0.6)), None)
