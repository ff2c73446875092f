"""A sandbox described in a file: JSON or TOML, with our names or those of the Manus example."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.errors import SpecError
from atoll.model import SandboxSpec

_MAX_BYTES = 1 << 20
FileOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="A JSON or TOML file that describes the sandbox.", metavar="FILE"),
]


def read(path: Path) -> dict[str, Any]:
    """What the file says, checked as far as that is possible here. Raises SpecError."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise SpecError(f"'{path}' is larger than {_MAX_BYTES:,} bytes")
        found = tomllib.loads(text.decode()) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, SpecError):
            raise
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise SpecError(
            f"'{path}' is not {kind}: {error}", hint="Name it *.json or *.toml, according to its content."
        ) from None
    SandboxSpec.described(found)
    return dict(found)
