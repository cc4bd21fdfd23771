"""Prometheus metrics of ingests."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class IngestMetrics:
    """Metrics of the ingests of a process, by default in their own registry."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        counter = partial(Counter, labelnames=["ingest"], registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self.rows = counter("coranto_ingest_rows", "Rows that were committed.")
        self.bytes = counter("coranto_ingest_bytes", "Bytes of events that were committed.")
        self.batches = counter("coranto_ingest_batches", "Transactions that were committed.")
        self.dead_letters = counter("coranto_ingest_dead_letters", "Rows that went to the dead letters.")
        self.lost = counter("coranto_ingest_lost_rows", "Rows that the source had removed before they were read.")
        self.overtaken = counter("coranto_ingest_overtaken", "Batches that another process had decided.")
        self.failures = counter("coranto_ingest_failures", "Failures after which the ingest tried again.")
        self.lag = gauge("coranto_ingest_lag", "Rows or bytes of all splits that are not committed yet.", ["ingest"])
        self.retained = gauge(
            "coranto_ingest_retained_bytes", "Bytes that the source keeps until they are read.", ["ingest"]
        )
        self.committed_at = gauge(
            "coranto_ingest_last_commit_timestamp_seconds", "When the last transaction was committed.", ["ingest"]
        )
        self.commit_seconds = Histogram(
            "coranto_ingest_commit_seconds",
            "Time from the end of a batch until it was readable.",
            ["ingest"],
            buckets=_SECONDS,
            registry=self.registry,
        )
