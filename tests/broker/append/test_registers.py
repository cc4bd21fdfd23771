"""Registers after an append."""

from __future__ import annotations

from coranto import labels
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.registers import after

JOURNAL = "a/journal"


def request(**fields: object) -> pb.AppendRequest:
    return pb.AppendRequest(journal=JOURNAL, **fields)  # type: ignore[arg-type]


def test_union_overrides_present_labels_and_subtraction() -> None:
    registers = labels.label_set(author="me", epoch="1")
    changed = after(
        request(
            subtract_registers=labels.label_set(epoch="1", author="you"),
            union_registers=labels.label_set(author="she"),
        ),
        registers,
    )
    assert changed == labels.label_set(author="she")
    assert after(request(), registers) == registers
