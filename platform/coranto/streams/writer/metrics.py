"""Prometheus metrics of stream writers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class WriterMetrics:
    """Metrics of writers, by default in a registry of their own. Writers of a process may share them."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.open = Gauge("coranto_stream_transactions_open", "Transactions that are open.", registry=self.registry)
        self.transactions = Counter(
            "coranto_stream_transactions",
            "Transactions by how they ended: committed, empty, deduplicated, aborted, timed_out, failed, unknown.",
            ["outcome"],
            registry=self.registry,
        )
        self.committed_transactions = self.transactions.labels("committed")
        self.events = Counter(
            "coranto_stream_events",
            "Events outside of transactions by how they ended: committed, deduplicated, failed, unknown.",
            ["outcome"],
            registry=self.registry,
        )
        self.committed_events = self.events.labels("committed")
        self.retried = Counter(
            "coranto_stream_appends_retried", "Appends that were sent again.", registry=self.registry
        )
        self.deduplicated = Counter(
            "coranto_stream_deduplicated",
            "Events and transactions that were not appended, as an earlier attempt was durable.",
            registry=self.registry,
        )
        self.bytes = Counter("coranto_stream_bytes", "Bytes that became durable.", registry=self.registry)
        self.commit_seconds = Histogram(
            "coranto_stream_commit_seconds",
            "Time from when a transaction was to be committed until it was durable.",
            buckets=_SECONDS,
            registry=self.registry,
        )
