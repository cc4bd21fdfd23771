"""The conditions and the spec of journals of records. Tests of ledgers and registries use them on brokers."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from coranto import labels
from coranto.client.record_journals import HELD, RecordLines, next_record, records_spec
from coranto.wire import protocol_pb2 as pb


def test_the_first_record_needs_an_empty_journal_and_later_ones_their_offset() -> None:
    empty, used = pb.LabelSet(), HELD
    first, later = next_record(0), next_record(7)
    assert (first.offset, first.union_registers) == (0, HELD)
    assert labels.matches(first.check_registers, empty)
    assert not labels.matches(first.check_registers, used)
    assert (later.offset, later.union_registers) == (7, None)
    assert labels.matches(later.check_registers, used)
    assert not labels.matches(later.check_registers, empty)


def test_a_journal_of_records_has_settings_of_another_one_but_no_retention() -> None:
    like = pb.JournalSpec(name="a/journal", replication=3, flags=pb.JournalSpec.O_RDONLY)
    like.fragment.retention.CopyFrom(Duration(seconds=60))
    like.fragment.stores.append("s3://bucket/")
    spec = records_spec("a/ledger", like, "me")
    assert (spec.name, spec.replication, spec.flags) == ("a/ledger", 3, pb.JournalSpec.O_RDWR)
    assert list(spec.fragment.stores) == ["s3://bucket/"]
    assert not spec.fragment.HasField("retention")
    assert labels.value_of(spec.labels, labels.MANAGED_BY) == "me"


@given(st.lists(st.text("a\n", max_size=4)))
def test_content_in_pieces_has_the_same_lines(pieces: list[str]) -> None:
    lines, found = RecordLines(), []
    for piece in pieces:
        found += lines.feed(piece.encode())
    *whole, partial = "".join(pieces).encode().split(b"\n")
    assert found == whole
    assert lines.partial_bytes == len(partial)
