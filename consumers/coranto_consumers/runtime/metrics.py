"""Prometheus metrics of a consumer process."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from coranto.member.etcd_budget import EtcdBudgetMetrics
from coranto_consumers.runtime.transaction import PHASES, Times


class ConsumerMetrics:
    """The metrics of one process, by shard, in a registry of their own."""

    def __init__(self) -> None:
        self._journals: defaultdict[str, set[str]] = defaultdict(set)
        self.registry = CollectorRegistry()
        counter = partial(Counter, labelnames=["shard"], registry=self.registry)
        gauge = partial(Gauge, labelnames=["shard"], registry=self.registry)
        self.etcd_budget = EtcdBudgetMetrics(self.registry)
        self._transactions = counter("coranto_shard_transactions", "Completed transactions.")
        self._messages = counter(
            "coranto_shard_messages", "Messages of completed transactions, acknowledgements aside."
        )
        self._bytes = counter("coranto_shard_message_bytes", "Content of completed transactions.")
        self._phases = counter(
            "coranto_shard_phase_seconds",
            f"Time of completed transactions: {', '.join(PHASES)}.",
            labelnames=["shard", "phase"],
        )
        self._read_through = gauge(
            "coranto_shard_read_through", "Offset read through.", labelnames=["shard", "journal"]
        )
        self.status = gauge(
            "coranto_shard_status",
            "Status of the local replica: 0 idle, 100 backfill, 200 standby, 300 primary, 400 failed.",
        )
        self.restarts = counter(
            "coranto_shard_restarts", "Times that a shard started again from its checkpoint after an error."
        )
        self.outage = gauge(
            "coranto_shard_outage_seconds",
            "Time since a store, a broker or etcd failed; 0 once the shard has restored its checkpoint.",
        )
        self.resets = counter(
            "coranto_sequencer_resets",
            "Acknowledgements below an earlier one: their producer lost exactly-once semantics.",
        )
        self.skewed_producers = counter(
            "coranto_shard_skewed_producers",
            "Producers of sources that were found with a clock more than an hour ahead of this process's, or behind "
            "another one's earlier messages: check the clocks of their machines.",
            labelnames=["shard", "direction"],
        )
        self.open_transactions = gauge(
            "coranto_shard_open_transactions",
            "Transactions in sources that are neither acknowledged nor rolled back, as of the last look, each minute.",
        )

    def completed(self, shard: str, times: Times) -> None:
        """Count a transaction that was committed and acknowledged."""
        self._transactions.labels(shard).inc()
        self._messages.labels(shard).inc(times.messages)
        self._bytes.labels(shard).inc(times.bytes)
        for phase, begin, end in times.phases:
            self._phases.labels(shard, phase).inc(max(0.0, end - begin))

    def failed(self, shard: str, seconds: float) -> None:
        """Count a restart after an error. `seconds` is the time since the first of consecutive errors."""
        self.restarts.labels(shard).inc()
        self.outage.labels(shard).set(seconds)

    def read_through(self, shard: str, offsets: dict[str, int]) -> None:
        self._journals[shard].update(offsets)
        for journal, offset in offsets.items():
            self._read_through.labels(shard, journal).set(offset)

    def forget(self, shard: str) -> None:
        """Remove the metrics of a shard that no longer belongs to this process."""
        for family in (
            self._transactions,
            self._messages,
            self._bytes,
            self.status,
            self.restarts,
            self.outage,
            self.resets,
            self.open_transactions,
        ):
            _remove(family, shard)
        for direction in ("ahead", "behind"):
            _remove(self.skewed_producers, shard, direction)
        for phase in PHASES:
            _remove(self._phases, shard, phase)
        for journal in self._journals.pop(shard, ()):
            _remove(self._read_through, shard, journal)


def _remove(family: Counter | Gauge, *labels: str) -> None:
    with contextlib.suppress(KeyError):  # Nothing was counted under these labels.
        family.remove(*labels)
