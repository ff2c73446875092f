"""Whether an engine can work on this machine, and what to do if not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Availability:
    name: str
    available: bool
    reasons: tuple[str, ...] = ()
    """Why it is not available; or, if it is, what one should know."""
    hints: tuple[str, ...] = ()
    """What to do about the reasons, as commands where possible."""
    version: str | None = None
    """Of the program that the engine stands on."""
