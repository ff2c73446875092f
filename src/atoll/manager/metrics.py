"""Counters and latencies of a manager, and the metric families of Prometheus that they become."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_POOL_GAUGES = {"ready": "Spares that can be claimed.", "target": "Spares that the pool keeps ready."}
_POOL_COUNTERS = {
    "hits": "Sandboxes that were claimed from the pool.",
    "misses": "Sandboxes that were created because the pool had no spare.",
    "discarded": "Spares that were deleted unused.",
    "refills": "Spares that were created.",
    "failures": "Spares that could not be created.",
}


class Histogram:
    def __init__(self, bounds_s: Sequence[float] = _BOUNDS_S) -> None:
        self.count = 0
        self.sum_s = 0.0
        self._bounds_s = bounds_s
        self._buckets = [0] * (len(bounds_s) + 1)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        self._buckets[bisect_left(self._bounds_s, seconds)] += 1

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield the upper bound of each bucket in Prometheus notation, and how many values were at most that."""
        total = 0
        bounds = (*(f"{bound:g}" for bound in self._bounds_s), "+Inf")
        for bound, count in zip(bounds, list(self._buckets), strict=True):
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


def families(
    states: Mapping[str, int],
    gauges: Mapping[str, tuple[str, float]],
    pools: Mapping[str, Mapping[str, int | float]],
    metrics: Metrics,
) -> Iterator[Metric]:
    """Yield the metric families. May be called from any thread: what changes meanwhile is copied first."""
    yield gauge("atoll_sandboxes", "Sandboxes by state.", states, "state")
    for name, (meaning, value) in gauges.items():
        yield gauge(f"atoll_{name}", meaning, {"": value})
    yield counter("atoll_sandbox_deaths", "Sandboxes that ended, by cause.", metrics.deaths, "cause")
    refused = "Sandboxes that were not created or resumed because a limit was reached."
    yield counter("atoll_limit_refusals", refused, metrics.refusals, "limit")
    yield counter("atoll_failures", "Failures of an engine or the journal.", metrics.failures, "operation")
    for figure, meaning in _POOL_GAUGES.items():
        yield gauge(f"atoll_pool_{figure}", meaning, {pool: of[figure] for pool, of in pools.items()}, "pool")
    for figure, meaning in _POOL_COUNTERS.items():
        yield counter(f"atoll_pool_{figure}", meaning, {pool: of[figure] for pool, of in pools.items()}, "pool")
    yield histogram("atoll_create_seconds", "How long the creation of a sandbox took.", {(): metrics.create_s})
    yield histogram("atoll_exec_seconds", "How long commands took.", {(): metrics.exec_s})


def gauge(name: str, meaning: str, values: Mapping[str, float], label: str | None = None) -> Metric:
    """Return a gauge with one value for each value of the label, or with one value and no label."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(name, meaning, labels=[label] if label else [])
    for text, value in dict(values).items():
        family.add_metric([text] if label else [], value)
    return family


def counter(name: str, meaning: str, values: Mapping[str, float], label: str | None = None) -> Metric:
    """Return a counter in the same way. Its samples are named `NAME_total`."""
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(name, meaning, labels=[label] if label else [])
    for text, value in dict(values).items():
        family.add_metric([text] if label else [], value)
    return family


def histogram(
    name: str, meaning: str, values: Mapping[tuple[str, ...], Histogram], labels: Iterable[str] = ()
) -> Metric:
    """Return a histogram with one series for each combination of labels."""
    from prometheus_client.metrics_core import HistogramMetricFamily

    family = HistogramMetricFamily(name, meaning, labels=list(labels))
    for texts, found in dict(values).items():
        family.add_metric(list(texts), buckets=list(found.cumulative()), sum_value=found.sum_s)
    return family


class Collected:
    """Metric families as something that Prometheus's client can write."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(families: Iterable[Metric]) -> str:
    """Return the metrics in the text format of Prometheus."""
    from prometheus_client.exposition import generate_latest

    return generate_latest(Collected(families)).decode()
