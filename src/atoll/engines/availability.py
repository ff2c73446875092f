"""Whether an engine can work on this machine, and what to do if not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Availability:
    name: str
    available: bool
    reasons: tuple[str, ...] = ()
    """Why the engine is not available; or, if it is, what users should know."""
    hints: tuple[str, ...] = ()
    """What to do about the reasons, as commands where possible."""
    version: str | None = None
    """The version of the program that the engine depends on."""
