"""Journals of JSON lines that store their fragments quickly, for benchmarks of their readers and writers."""

from __future__ import annotations

from collections.abc import Iterable

from coranto.client.sync import SyncJournalClient
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.wire import protocol_pb2 as pb


def create_journals(client: SyncJournalClient, names: Iterable[str], *, fragment_bytes: int) -> None:
    """Create journals of one replica, compressed with zstd."""
    changes = []
    for name in names:
        spec = pb.JournalSpec(name=name, replication=1, labels=label_set({CONTENT_TYPE: JSON_LINES}))
        spec.fragment.length = fragment_bytes
        spec.fragment.compression_codec = pb.ZSTANDARD
        spec.fragment.stores.append("file:///")
        spec.fragment.refresh_interval.FromSeconds(1)
        changes.append(pb.ApplyRequest.Change(upsert=spec))
    client.apply(changes)
