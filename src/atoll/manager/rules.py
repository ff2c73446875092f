"""The rules of a manager: how many sandboxes there may be, for how long, and how much history is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atoll.manager.record import OnIdle


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that the user of a manager sets. None means no limit."""

    max_sandboxes: int = 100
    idle_timeout: float = 3600.0
    cleanup_interval: float = 300.0
    at_cap: Literal["refuse", "pause", "pause-any"] = "refuse"
    max_per_owner: int | None = None
    max_paused: int | None = None
    max_lifetime: float | None = None
    max_starting: int = 64
    create_s: float = 120.0
    delete_s: float = 45.0
    inspect_s: float = 10.0
    on_idle: OnIdle = "end"
    disk_timeout: float | None = None
    paused_timeout: float = 7 * 86400.0

    def __post_init__(self) -> None:
        for name in ("max_sandboxes", "max_per_owner", "max_paused"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} must be a number of sandboxes, not {value!r}")
        for name in (
            *("idle_timeout", "disk_timeout", "paused_timeout", "cleanup_interval", "max_lifetime"),
            *("create_s", "delete_s", "inspect_s"),
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {value!r}; math.inf means never")
        if self.at_cap not in ("refuse", "pause", "pause-any"):
            raise ValueError(f"at_cap must be 'refuse', 'pause' or 'pause-any', not {self.at_cap!r}")
        if self.on_idle not in ("end", "pause", "disk"):
            raise ValueError(f"on_idle must be 'end', 'pause' or 'disk', not {self.on_idle!r}")


@dataclass(frozen=True, slots=True)
class Retention:
    """How much history is kept. Entries beyond any of these limits are deleted, the oldest first.

    Entries of one owner never displace those of another, except by the limits on everything, which keep the disk from
    filling up.
    """

    ended_per_owner: int = 1_000
    events_per_owner: int = 10_000
    reports_per_owner: int = 2_000
    age_s: float = 30 * 86400.0
    ended: int = 100_000
    events: int = 1_000_000

    def __post_init__(self) -> None:
        for name in ("ended_per_owner", "events_per_owner", "reports_per_owner", "ended", "events"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not self.age_s > 0:
            raise ValueError("age_s must be more than 0 seconds; math.inf means never")
