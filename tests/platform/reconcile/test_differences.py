"""Differences between specs."""

from __future__ import annotations

from typing import Any

from coranto.labels import label_set
from coranto.reconcile.differences import differences
from coranto.wire import protocol_pb2 as pb


def spec(name: str, **fields: Any) -> pb.JournalSpec:
    return pb.JournalSpec(name=name, replication=fields.pop("replication", 1), **fields)


def test_differences_name_the_changed_fields() -> None:
    old = spec("a/one", fragment=pb.JournalSpec.Fragment(length=1024, compression_codec=pb.GZIP, stores=["file:///"]))
    new = spec("a/one", fragment=pb.JournalSpec.Fragment(length=2048, compression_codec=pb.ZSTANDARD), replication=3)
    new.fragment.flush_interval.FromSeconds(60)
    new.labels.CopyFrom(label_set({"app": "shop"}))
    assert list(differences(old, new)) == [
        "replication: 1 → 3",
        "labels: none → app=shop",
        "fragment.length: 1024 → 2048",
        "fragment.compression_codec: GZIP → ZSTANDARD",
        "fragment.stores: file:/// → none",
        "fragment.flush_interval: 0s → 1m0s",
    ]
