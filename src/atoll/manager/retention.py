"""How much of what is over a manager remembers: records of sandboxes that have ended, and events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """What is beyond any of these limits is forgotten, the oldest first. Records of one owner never displace those of
    another, except by the limits on everything, which keep the disk from filling up."""

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
