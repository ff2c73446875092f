"""The rules of a manager: how many sandboxes there may be, for how long, and how much history is kept."""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
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


class AdjustableRules(abc.ABC):
    """The rules that can be changed while the manager runs. Changes apply to existing sandboxes too.

    Setting an invalid value raises ValueError.
    """

    _rules: Rules

    @property
    def max_sandboxes(self) -> int:
        """The cap on sandboxes. Lowering it below the current number ends none of them."""
        return self._rules.max_sandboxes

    @max_sandboxes.setter
    def max_sandboxes(self, number: int) -> None:
        self._change_rules(max_sandboxes=number)

    @property
    def idle_timeout(self) -> float:
        """The default idle timeout of sandboxes, in seconds."""
        return self._rules.idle_timeout

    @idle_timeout.setter
    def idle_timeout(self, seconds: float) -> None:
        self._change_rules(idle_timeout=seconds)

    @property
    def cleanup_interval(self) -> float:
        """How often all sandboxes are checked, in seconds."""
        return self._rules.cleanup_interval

    @cleanup_interval.setter
    def cleanup_interval(self, seconds: float) -> None:
        self._change_rules(cleanup_interval=seconds)

    def _change_rules(self, **changes: float) -> None:
        self._rules = replace(self._rules, **changes)  # type: ignore[arg-type]
        self._rules_changed()

    @abc.abstractmethod
    def _rules_changed(self) -> None:
        """Apply the new rules."""


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
