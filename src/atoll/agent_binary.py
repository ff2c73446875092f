"""Where the compiled agent is."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.errors import EngineUnavailableError


def path() -> Path:
    """Return the path of the agent in this package. Raises EngineUnavailableError if it is missing."""
    binary = Path(__file__).parent / "bin" / "atoll-agent"
    if not os.access(binary, os.X_OK):
        raise EngineUnavailableError(
            f"the agent is missing: there is no program at '{binary}'",
            hint="In a working copy run 'make agent'; otherwise install the package again.",
        )
    return binary
