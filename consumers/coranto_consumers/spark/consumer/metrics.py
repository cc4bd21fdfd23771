"""Prometheus metrics of Spark consumers."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from coranto_consumers.spark.consumer.progress import ConsumeReport


class SparkConsumerMetrics:
    """The metrics of one consumer in one process. Give `observe` to `SparkConsumer` as `on_progress`."""

    def __init__(self, consumer: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._consumer = consumer
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        of_journal = ["consumer", "journal"]
        self._counters = {
            name: counter(f"coranto_spark_{name}", text, ["consumer"]).labels(consumer)
            for name, text in {
                "transactions": "Transactions that were committed and acknowledged.",
                "messages": "Committed messages that were processed.",
                "records_read": "Records read: messages, duplicates, acknowledgements, pending and dropped ones.",
                "published": "Messages that were published and acknowledged.",
                "misfits": "Processed messages that do not fit the application's columns.",
                "retries": "Failures of stores and brokers that the consumer has retried.",
            }.items()
        }
        text = "Time since a store or broker failed; 0 while the consumer makes progress."
        self._outage = gauge("coranto_spark_outage_seconds", text, ["consumer"]).labels(consumer)
        text = "Time of transactions, by phase: reading (waiting for their input), writing, committing, acknowledging."
        self._seconds = counter("coranto_spark_phase_seconds", text, ["consumer", "phase"])
        text = "Unprocessed content of a journal, up to its head when a run listed it last."
        self._lag = gauge("coranto_spark_lag_bytes", text, of_journal)
        text = "Processed content of a journal that is read again once the oldest open transaction there is committed."
        self._open = gauge("coranto_spark_open_transaction_bytes", text, of_journal)
        text = "Ranges of lost content that were skipped."
        self._lost = counter("coranto_spark_lost_ranges", text, ["consumer"]).labels(consumer)
        self._before: ConsumeReport | None = None

    def observe(self, report: ConsumeReport) -> None:
        """Update the metrics from a run's progress. The report of a new run starts at zero again."""
        before = self._before
        if before is not None and before.fence not in (report.fence, 0):  # 0: the new run has not raised the fence yet.
            before = None
        self._outage.set(report.outage_seconds)
        for name, metric in self._counters.items():
            metric.inc(getattr(report, name) - (getattr(before, name) if before else 0))
        for phase, seconds in report.seconds.items():
            known = before.seconds.get(phase, 0.0) if before else 0.0
            self._seconds.labels(self._consumer, phase).inc(max(0.0, seconds - known))
        self._lost.inc(len(report.lost) - (len(before.lost) if before else 0))
        for journal, head in report.heads.items():
            behind = max(0, head - report.offsets.get(journal, 0))
            self._lag.labels(self._consumer, journal).set(behind)
        open_now = {each.journal: each.bytes_read_again for each in report.open_transactions}
        for journal, size in open_now.items():
            self._open.labels(self._consumer, journal).set(size)
        if self._before is not None:
            for ended in {each.journal for each in self._before.open_transactions} - open_now.keys():
                self._open.remove(self._consumer, ended)
            for gone in self._before.heads.keys() - report.heads.keys():
                self._lag.remove(self._consumer, gone)
        self._before = report
