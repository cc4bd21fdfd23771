"""Journals of records with optimistic concurrency: an append succeeds only at the end that its program has read.

Of two concurrent appends, one is rejected, and its program has to read the other's record first. An append whose answer
was lost is safe to retry: if it was applied, the journal's end has moved, and the retry is rejected.

Such a journal has no retention. Its registers have `coranto.dev/held` from the first record on. If all brokers lose the
registers, they may have lost records, too, and appends are rejected.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from coranto.labels import CONTENT_TYPE, JSON_LINES, MANAGED_BY, label_selector, label_set
from coranto.labels import HELD as HELD_LABEL
from coranto.wire import protocol_pb2 as pb

HELD: Final = label_set({HELD_LABEL: "true"})
"""The registers of a journal that has records."""


class RecordConditions(NamedTuple):
    """The conditions for appending the next record: arguments of `JournalClient.append`."""

    offset: int
    check_registers: pb.LabelSelector
    union_registers: pb.LabelSet | None


class RecordLines:
    """Splits pieces of content into lines. Pure. Copies each byte once, because records may have many megabytes."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.partial_bytes = 0
        """The length of the incomplete last line."""

    def feed(self, content: bytes) -> list[bytes]:
        """Return the lines that end in this content, without their newlines."""
        piece, *rest = content.split(b"\n")
        self._pieces.append(piece)
        self.partial_bytes += len(piece)
        if not rest:
            return []
        lines = [b"".join(self._pieces), *rest]
        last = lines.pop()
        self._pieces, self.partial_bytes = [last], len(last)
        return lines


def next_record(offset: int) -> RecordConditions:
    """Return the conditions for appending a record to a journal that ends at an offset."""
    if offset:
        return RecordConditions(offset, label_selector(include=[(HELD_LABEL, "")]), None)
    # An append at offset 0 has no condition on the head. Instead, the registers show that the journal has no records.
    return RecordConditions(0, label_selector(exclude=[(HELD_LABEL, "")]), HELD)


def records_spec(journal: str, like: pb.JournalSpec, managed_by: str) -> pb.JournalSpec:
    """Return the spec of a new journal of records, readable and writable, with the replication and stores of `like`."""
    spec = pb.JournalSpec(name=journal, replication=like.replication, flags=pb.JournalSpec.O_RDWR)
    spec.labels.CopyFrom(label_set({CONTENT_TYPE: JSON_LINES, MANAGED_BY: managed_by}))
    spec.fragment.CopyFrom(like.fragment)
    spec.fragment.ClearField("retention")
    return spec
