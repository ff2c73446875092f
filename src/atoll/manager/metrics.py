"""Counters and latencies of a manager, and their text for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self._buckets = [0] * (len(_BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        self._buckets[next((n for n, bound in enumerate(_BOUNDS_S) if seconds <= bound), len(_BOUNDS_S))] += 1

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield the upper bound of each bucket in Prometheus notation, and how many values were at most that."""
        total = 0
        for bound, count in zip((*(f"{bound:g}" for bound in _BOUNDS_S), "+Inf"), self._buckets, strict=True):
            total += count
            yield bound, total

    def as_dict(self) -> dict[str, object]:
        return {"count": self.count, "sum_s": self.sum_s, "buckets": dict(self.cumulative())}


class Metrics:
    def __init__(self) -> None:
        self.create_s = Histogram()
        self.exec_s = Histogram()
        self.deaths: Counter[str] = Counter()
        """How many sandboxes ended, by cause."""
        self.failures: Counter[str] = Counter()
        """Failures of the engine or the journal, by operation: create, delete, cleanup (removing the remains of a
        sandbox that was not completed or that nobody owns), inspect, pause, write."""
        self.refusals: Counter[str] = Counter()
        """Sandboxes that were not created or resumed because a limit was reached, by limit: `sandboxes` for the cap,
        `owner` for the maximum of one owner."""


Sample = tuple[Mapping[str, str], float]


def exposition(
    states: Mapping[str, int],
    gauges: Mapping[str, float],
    pools: Mapping[str, Mapping[str, int | float]],
    metrics: Metrics,
) -> str:
    """Return the metrics in the text format of Prometheus."""
    lines: list[str] = []

    def add(name: str, kind: str, samples: Iterable[Sample], of: str | None = None) -> None:
        if of is None:
            lines.append(f"# TYPE atoll_{name} {kind}")
        for labels, value in samples:
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"atoll_{name}{{{inside}}} {value:g}" if inside else f"atoll_{name} {value:g}")

    add("sandboxes", "gauge", [({"state": state}, count) for state, count in states.items()])
    for name, value in gauges.items():
        add(name, "gauge", [({}, value)])
    add("sandbox_deaths_total", "counter", [({"cause": cause}, count) for cause, count in metrics.deaths.items()])
    add("limit_refusals_total", "counter", [({"limit": what}, count) for what, count in metrics.refusals.items()])
    add("failures_total", "counter", [({"operation": what}, count) for what, count in metrics.failures.items()])
    for figure in ("ready", "target"):
        add(f"pool_{figure}", "gauge", [({"pool": name}, pool[figure]) for name, pool in pools.items()])
    for figure in ("hits", "misses", "discarded", "refills", "failures"):
        add(f"pool_{figure}_total", "counter", [({"pool": name}, pool[figure]) for name, pool in pools.items()])
    for name, histogram in (("create_seconds", metrics.create_s), ("exec_seconds", metrics.exec_s)):
        add(f"{name}", "histogram", [])
        add(f"{name}_bucket", "", [({"le": bound}, count) for bound, count in histogram.cumulative()], of=name)
        add(f"{name}_sum", "", [({}, histogram.sum_s)], of=name)
        add(f"{name}_count", "", [({}, histogram.count)], of=name)
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
