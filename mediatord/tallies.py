"""
Counters and histograms that cost as much as an addition.

Those of prometheus-client take a lock for every number, check each time whether they have labels, and go through all
bounds of a histogram one after the other. What is counted several times for each message is counted here, by the
reactor's thread alone; what is exposed is the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Tally:
    """
    One series of a counter.

    :ivar value: what it has come to.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        """:param amount: not less than 0."""
        self.value += amount


class Spread:
    """
    One series of a histogram.

    :param bounds: upper bounds of the buckets, ascending, without infinity.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """:param value: in seconds."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Upper bounds as Prometheus writes them, each with how many values were not above it; and the sum of all."""
        found, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append((floatToGoString(bound), float(total)))
        return found, self._sum


class Tallies:
    """
    A counter with labels, or without; in the latter case its only series is there from the beginning.

    :param name: without `_total`.
    """

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        self._about = name, text, labels
        self._series: dict[tuple[str, ...], Tally] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        """The series of these values, one for each label."""
        return self._series.get(values) or self._series.setdefault(values, Tally())

    def value(self, *values: str) -> int:
        """What the series of these values has come to; asking does not make it."""
        tally = self._series.get(values)
        return 0 if tally is None else tally.value

    def series(self) -> Iterable[tuple[tuple[str, ...], Tally]]:
        """All of them, with their values."""
        return self._series.items()

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, tally in self._series.items():
            family.add_metric(values, tally.value)
        return [family]


class Spreads:
    """A histogram with labels, or without; as :class:`Tallies`."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float], *labels: str
    ) -> None:
        self._about = name, text, labels
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], Spread] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Spread:
        """The series of these values, one for each label."""
        return self._series.get(values) or self._series.setdefault(values, Spread(self._bounds))

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        name, text, labels = self._about
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, spread in self._series.items():
            buckets, total = spread.buckets()
            family.add_metric(values, buckets, total)
        return [family]
