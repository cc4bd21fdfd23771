"""Specs of a stream's journals, for changes of the stream. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coranto import labels
from coranto.client.values import JournalInfo
from coranto.specs import durability
from coranto.streams.model.stream import STREAM_LABEL, STREAM_PART_LABEL, Segment, spec_of
from coranto.wire import protocol_pb2 as pb

_OWN_LABELS: Final = "coranto.dev/"


def owner_of(info: JournalInfo) -> str:
    """Return the stream that a journal belongs to, as a segment or another part; empty if it belongs to none."""
    return labels.value_of(info.spec.labels, STREAM_LABEL) or labels.value_of(info.spec.labels, STREAM_PART_LABEL)


def part_spec(
    stream: str, journal: str, template: pb.JournalSpec, more: Mapping[str, str] | None = None
) -> pb.JournalSpec:
    """Return the spec of a stream's journal that is not a segment."""
    spec = pb.JournalSpec()
    spec.CopyFrom(template)
    spec.name = journal
    spec.flags = pb.JournalSpec.O_RDWR
    spec.ClearField("suspend")
    kept = [
        (each.name, each.value)
        for each in template.labels.labels
        # A decision must be as durable as the events of its transaction.
        if not each.name.startswith(_OWN_LABELS) or each.name in durability.LABELS
    ]
    spec.labels.CopyFrom(labels.label_set(kept))
    for name, value in {labels.CONTENT_TYPE: labels.JSON_LINES, STREAM_PART_LABEL: stream, **(more or {})}.items():
        spec.labels.CopyFrom(labels.with_value(spec.labels, name, value))
    return spec


def without_retention(spec: pb.JournalSpec) -> pb.JournalSpec:
    """Remove the retention from a spec, because content of any age may be needed. Returns the spec."""
    spec.fragment.ClearField("retention")
    return spec


def segment_change(info: JournalInfo, segment: Segment, stream: str) -> pb.ApplyRequest.Change:
    """Return the change that makes a segment's spec match `segment`."""
    return pb.ApplyRequest.Change(upsert=spec_of(stream, segment, info.spec), expect_mod_revision=info.mod_revision)


def touch_change(info: JournalInfo, new_labels: Mapping[str, str]) -> pb.ApplyRequest.Change:
    """Return a change that advances the decisions journal's revision, sets any labels, and removes retention."""
    spec = pb.JournalSpec()
    spec.CopyFrom(info.spec)
    without_retention(spec)
    for name, value in new_labels.items():
        spec.labels.CopyFrom(labels.with_value(spec.labels, name, value))
    return pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=info.mod_revision)
