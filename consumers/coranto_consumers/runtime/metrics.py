"""What a consumer process counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from coranto_consumers.runtime.transaction import Times


class ConsumerMetrics:
    """Counters of one process, by shard, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._transactions = Counter(
            "coranto_shard_transactions", "Completed transactions.", ["shard"], registry=self.registry
        )
        self._messages = Counter(
            "coranto_shard_messages", "Messages of completed transactions.", ["shard"], registry=self.registry
        )
        self._bytes = Counter(
            "coranto_shard_message_bytes", "Content of completed transactions.", ["shard"], registry=self.registry
        )
        self._phases = Counter(
            "coranto_shard_phase_seconds",
            "Time of completed transactions: consuming, stalled, committing, acknowledging.",
            ["shard", "phase"],
            registry=self.registry,
        )
        self._read_through = Gauge(
            "coranto_shard_read_through", "Offset read through.", ["shard", "journal"], registry=self.registry
        )
        self.status = Gauge(
            "coranto_shard_status",
            "Status of the local replica: 0 idle, 100 backfill, 200 standby, 300 primary, 400 failed.",
            ["shard"],
            registry=self.registry,
        )
        self.restarts = Counter(
            "coranto_shard_restarts",
            "Times that a shard started anew from its checkpoint after an error.",
            ["shard"],
            registry=self.registry,
        )
        self.resets = Counter(
            "coranto_sequencer_resets",
            "Acknowledgements below an earlier one: their producer lost exactly-once semantics.",
            ["shard"],
            registry=self.registry,
        )

    def completed(self, shard: str, times: Times) -> None:
        """A transaction was committed and acknowledged."""
        self._transactions.labels(shard).inc()
        self._messages.labels(shard).inc(times.messages)
        self._bytes.labels(shard).inc(times.bytes)
        for phase, begin, end in (
            ("consuming", times.began, times.stalled),
            ("stalled", times.stalled, times.commit_began),
            ("committing", times.commit_began, times.committed),
            ("acknowledging", times.committed, times.acknowledged),
        ):
            self._phases.labels(shard, phase).inc(max(0.0, end - begin))

    def read_through(self, shard: str, offsets: dict[str, int]) -> None:
        for journal, offset in offsets.items():
            self._read_through.labels(shard, journal).set(offset)

    def forget(self, shard: str) -> None:
        """The shard is not this process's any longer."""
        self.status.remove(shard)
