"""Journals of records: journals of which programs need every record, and that they append to one after the other.

A record is appended on the condition that its journal still ends where the program has read it to. So of two programs
that decide at the same time, one is told to read on first. An append whose answer was lost may be repeated: if it was
applied, the journal ends elsewhere.

Such a journal has no retention. Its registers have `coranto.dev/held` from the first record on: if all brokers lose
the registers, they may have lost records, too.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from coranto.labels import CONTENT_TYPE, JSON_LINES, MANAGED_BY, label_selector, label_set
from coranto.labels import HELD as HELD_LABEL
from coranto.wire import protocol_pb2 as pb

HELD: Final = label_set({HELD_LABEL: "true"})
"""The registers of a journal of records that has one."""


class RecordConditions(NamedTuple):
    """The conditions of an append of the next record, as arguments of `JournalClient.append`."""

    offset: int
    check_registers: pb.LabelSelector
    union_registers: pb.LabelSet | None


class RecordLines:
    """Cuts content that begins with a record into lines, as it comes. Pure.

    However small its pieces are, each byte is copied once: records may have many megabytes.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.partial_bytes = 0
        """The length of what has come of a line that has not ended."""

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
    """Return the conditions under which a record is appended to a journal that ends at an offset."""
    if offset:
        return RecordConditions(offset, label_selector(include=[(HELD_LABEL, "")]), None)
    # No offset can be demanded of an empty journal; its registers tell that it is one.
    return RecordConditions(0, label_selector(exclude=[(HELD_LABEL, "")]), HELD)


def records_spec(journal: str, like: pb.JournalSpec, managed_by: str) -> pb.JournalSpec:
    """Return the spec of a journal of records that is to be created, with the replication and stores of another one.

    It can be read and written, whether or not the other one can.
    """
    spec = pb.JournalSpec(name=journal, replication=like.replication, flags=pb.JournalSpec.O_RDWR)
    spec.labels.CopyFrom(label_set({CONTENT_TYPE: JSON_LINES, MANAGED_BY: managed_by}))
    spec.fragment.CopyFrom(like.fragment)
    spec.fragment.ClearField("retention")
    return spec
