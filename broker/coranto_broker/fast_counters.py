"""Counters and histograms for the hot path of appends, much cheaper than `prometheus_client`'s.

Those take a lock and look up labels for every event. The ones here are used from a single event loop, and build metric
families only at collection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import Enum

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class FastCounter(Collector):
    """A counter without labels: add to `value`."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self.value = 0
        self._name, self._text = name, text
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, value=self.value)


class FastLabeledCounter(Collector):
    """A counter with one label, whose values are from an enumeration."""

    def __init__(self, name: str, text: str, label: str, registry: CollectorRegistry) -> None:
        self._values: dict[Enum, int] = {}
        self._name, self._text, self._label = name, text, label
        registry.register(self)

    def count(self, value: Enum) -> None:
        """Add one to the count of this label value."""
        values = self._values
        values[value] = values.get(value, 0) + 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in self._values.items():
            family.add_metric([str(value.value)], count)
        yield family


class FastHistogram(Collector):
    """A histogram without labels. `bounds` are the inclusive upper bounds of its buckets, without +Inf."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self.sum = 0.0
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._name, self._text = name, text
        registry.register(self)

    def observe(self, value: float) -> None:
        self.sum += value
        self._counts[bisect_left(self._bounds, value)] += 1

    def collect(self) -> Iterator[HistogramMetricFamily]:
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((str(float(bound)).replace("inf", "+Inf"), float(total)))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self.sum)
