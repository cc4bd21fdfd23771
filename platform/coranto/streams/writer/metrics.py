"""Prometheus metrics of stream writers."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class WriterMetrics:
    """Metrics of writers, by default in a registry of their own. Writers of a process may share them."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.open = gauge("coranto_stream_transactions_open", "Transactions that are open.")
        self.transactions = counter(
            "coranto_stream_transactions",
            "Transactions by how they ended: committed, empty, deduplicated, aborted, timed_out, failed, unknown.",
            ["outcome"],
        )
        self.committed_transactions = self.transactions.labels("committed")
        self.events = counter(
            "coranto_stream_events",
            "Events outside of transactions by how they ended: committed, deduplicated, failed, unknown.",
            ["outcome"],
        )
        self.committed_events = self.events.labels("committed")
        self.retried = counter("coranto_stream_appends_retried", "Appends that were sent again.")
        self.deduplicated = counter(
            "coranto_stream_deduplicated",
            "Events and transactions that were not appended, as an earlier attempt was durable.",
        )
        self.bytes = counter("coranto_stream_bytes", "Bytes that became durable.")
        self.commit_seconds = Histogram(
            "coranto_stream_commit_seconds",
            "Time from when a transaction was to be committed until it was durable.",
            buckets=_SECONDS,
            registry=self.registry,
        )
