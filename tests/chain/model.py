"""The journals and shards of the chain, and the expected results of published numbers, without I/O."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coranto.labels import CONTENT_TYPE, JSON_LINES, RECOVERY_LOG, label_set
from coranto.messages import RendezvousMapping
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.specs import validate_shard_spec

TOTAL_EVERY = 10
"""The second consumer publishes a stream's sum each time after this many numbers, and after the last one."""

ALERT_EVERY = 500
"""The third consumer publishes an alert when a stream's sum reaches a new multiple of this, and for its last sum."""


def partitions(kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"chain/{kind}/part-{number:03}" for number in range(count))


RAW = partitions("raw", 2)
CLEAN = partitions("clean", 3)
TOTALS = partitions("totals", 2)
ALERTS = partitions("alerts", 2)

_MAPPINGS = {journals: RendezvousMapping(journals) for journals in (RAW, CLEAN, TOTALS, ALERTS)}


def journal_of(stream: str, journals: tuple[str, ...]) -> str:
    """Return the partition of a stream. All messages of a stream are in one partition, so they stay in order."""
    return _MAPPINGS[journals](stream.encode())


def digest_of(digest: int, chunk: int, n: int) -> int:
    """Return the digest of a stream after its next number. Unlike a sum, it depends on the order."""
    return zlib.crc32(f"{chunk}:{n}".encode(), digest)


@dataclass(frozen=True, slots=True)
class Stage:
    """One consumer: its application, and the source journals of each shard."""

    name: str
    application: str
    shards: tuple[tuple[str, ...], ...]
    logged: bool
    """True if its store is in a recovery log. Its shards then have a hot standby."""

    @property
    def etcd_prefix(self) -> str:
        return f"/gazette/consumers/{self.name}"

    @property
    def hint_prefix(self) -> str:
        return f"/gazette/hints/{self.name}"

    def shard_id(self, number: int) -> str:
        return f"{self.name}-{number:03}"

    @property
    def recovery_logs(self) -> list[str]:
        return [f"recovery/{self.shard_id(number)}" for number in range(len(self.shards))] if self.logged else []

    def specs(self) -> list[pc.ShardSpec]:
        return [self._spec(number) for number in range(len(self.shards))]

    def _spec(self, number: int) -> pc.ShardSpec:
        spec = pc.ShardSpec(id=self.shard_id(number))
        spec.max_txn_duration.FromMilliseconds(300)
        for journal in self.shards[number]:
            spec.sources.add(journal=journal)
        if self.logged:
            spec.recovery_log_prefix, spec.hint_prefix = "recovery", self.hint_prefix
            spec.hint_backups, spec.hot_standbys = 2, 1
        validate_shard_spec(spec)
        return spec


_MODULE = "tests.chain.applications"
STAGES = (
    Stage("clean", f"{_MODULE}:Clean", tuple((journal,) for journal in RAW), logged=True),
    Stage("aggregate", f"{_MODULE}:Aggregate", ((CLEAN[0], CLEAN[1]), (CLEAN[2],)), logged=False),
    Stage("alert", f"{_MODULE}:Alert", tuple((journal,) for journal in TOTALS), logged=True),
)


def journal_specs(replication: int) -> list[pb.JournalSpec]:
    """Return the specs of all journals of the chain, recovery logs included."""
    logs = [log for stage in STAGES for log in stage.recovery_logs]
    wanted = [(name, JSON_LINES) for name in (*RAW, *CLEAN, *TOTALS, *ALERTS)] + [(log, RECOVERY_LOG) for log in logs]
    return [_journal_spec(name, content_type, replication) for name, content_type in wanted]


def _journal_spec(name: str, content_type: str, replication: int) -> pb.JournalSpec:
    spec = pb.JournalSpec(name=name, replication=replication, labels=label_set({CONTENT_TYPE: content_type}))
    # Small fragments, so that repeated reads mostly come from the fragment store.
    spec.fragment.length = 256 << 10
    spec.fragment.compression_codec = pb.GZIP
    spec.fragment.refresh_interval.FromSeconds(5)
    spec.fragment.stores.append("file:///")
    return spec


@dataclass(slots=True)
class ExpectedStream:
    """The expected results of one stream: the contents of each consumer's store, and the published messages."""

    stream: str
    count: int = 0
    dropped: int = 0
    sum: int = 0
    digest: int = 0
    level: int = 0
    cleaned: list[dict[str, Any]] = field(default_factory=list)
    totals: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)

    def noise(self) -> None:
        """Record the publication of a message without a number."""
        self.dropped += 1

    def number(self, n: int, *, last: bool) -> None:
        """Record the publication of the next number."""
        chunk, self.count = self.count, self.count + 1
        self.sum += n
        self.digest = digest_of(self.digest, chunk, n)
        self.cleaned.append({"stream": self.stream, "chunk": chunk, "n": n, "last": last})
        if last or self.count % TOTAL_EVERY == 0:
            self._total(last)

    def _total(self, last: bool) -> None:
        facts = {"stream": self.stream, "count": self.count, "sum": self.sum, "digest": self.digest, "last": last}
        self.totals.append(facts)
        level = self.sum // ALERT_EVERY
        if last or level > self.level:
            self.alerts.append({**facts, "alert": len(self.alerts)})
        self.level = max(self.level, level)


def of_stream(messages: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return messages by stream, in order, without their UUIDs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        content = {key: value for key, value in message.items() if key != "_meta"}
        found.setdefault(content["stream"], []).append(content)
    return found
