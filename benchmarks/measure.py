"""How all benchmarks measure: the candidates take turns, so that a noisy moment affects all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

Timed = Callable[[], Awaitable[float | None]]
"""Performs the operation once. Returns the seconds it took, or None to have the whole call timed."""


@dataclass(frozen=True, slots=True)
class Samples:
    seconds: tuple[float, ...]

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(len(self.seconds) * 0.99))]


@dataclass(frozen=True, slots=True)
class Figure:
    """One promise: Atoll's value, the peer's, and the promised ratio."""

    name: str
    ours: float
    peer: float
    unit: str
    peer_name: str
    at_most: float | None = None
    """The promised maximum of ours / peer, where smaller is better."""
    at_least: float | None = None
    """The promised minimum of ours / peer, where larger is better."""
    detail: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    @property
    def kept(self) -> bool:
        if self.at_most is not None:
            return self.ratio <= self.at_most
        return self.at_least is None or self.ratio >= self.at_least


async def take_turns(candidates: Mapping[str, Timed], rounds: int, warm_up: int = 3) -> dict[str, Samples]:
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(warm_up + rounds):
        for name, once in candidates.items():
            started = time.perf_counter()
            seconds = await once()
            elapsed = time.perf_counter() - started if seconds is None else seconds
            if number >= warm_up:
                found[name].append(elapsed)
    return {name: Samples(tuple(seconds)) for name, seconds in found.items()}
