"""Decoding of bytes into operations, for any split of the bytes, with garbage skipped."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from coranto.messages.fixed_frame import MAGIC, encode_frame
from coranto_consumers.recoverylog.decoder import (
    MAX_PAYLOAD_BYTES,
    DecodedOperation,
    Event,
    LogDecoder,
    SkippedContent,
    WrittenData,
)
from coranto_consumers.recoverylog.operations import Author, Create, Fnode, RecordedOperation, Write

LOG = "a/log"


def frame(seq_no: int, change: Create | Write | None = None) -> bytes:
    return encode_frame(RecordedOperation(seq_no, 0, Author(7), change).to_payload())


def write(seq_no: int, content: bytes) -> bytes:
    return frame(seq_no, Write(Fnode(1), 0, len(content))) + content


def decode(pieces: list[bytes], accepted: set[int], offset: int = 0) -> tuple[list[Event], LogDecoder]:
    decoder = LogDecoder(LOG, offset)
    events: list[Event] = []
    for piece in pieces:
        for event in decoder.feed(piece):
            events.append(event)
            if isinstance(event, DecodedOperation) and event.op.seq_no in accepted:
                decoder.accept()
    return events, decoder


def summary(events: list[Event]) -> list[object]:
    """Return sequence numbers and joined data."""
    found: list[object] = []
    for event in events:
        if isinstance(event, DecodedOperation):
            found.append(event.op.seq_no)
        elif isinstance(event, WrittenData):
            if found and isinstance(found[-1], bytes):
                found[-1] += event.content
            else:
                found.append(event.content)
    return found


CONTENT = frame(1, Create("/a")) + write(2, b"hello " * 20) + write(3, b"not for us") + write(4, b"") + frame(5)


@given(st.lists(st.integers(0, len(CONTENT)), max_size=12))
def test_operations_do_not_depend_on_how_content_is_split(cuts: list[int]) -> None:
    ends = [*sorted(cuts), len(CONTENT)]
    pieces = [CONTENT[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    events, decoder = decode(pieces, accepted={1, 2, 4, 5}, offset=1000)
    assert summary(events) == [1, 2, b"hello " * 20, 3, 4, 5]
    assert decoder.is_between
    assert decoder.position == decoder.fed == 1000 + len(CONTENT)


def test_operations_have_their_offsets() -> None:
    events, _ = decode([CONTENT], accepted=set(), offset=1000)
    spans = [(event.op.begin, event.op.end) for event in events if isinstance(event, DecodedOperation)]
    assert spans[0][0] == 1000
    assert spans[-1][1] == 1000 + len(CONTENT)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_incomplete_content_is_awaited() -> None:
    content = write(1, b"0123456789")
    for cut in range(1, len(content)):
        events, decoder = decode([content[:cut]], accepted={1})
        assert not decoder.is_between
        assert decoder.fed == cut
        assert decoder.is_inside_wanted == (len(events) > 0)


def test_garbage_is_skipped() -> None:
    events, decoder = decode([b"garbage" + frame(1) + b"\x66\x33" + frame(2)], accepted={1, 2})
    assert summary(events) == [1, 2]
    garbage = [event for event in events if isinstance(event, SkippedContent)]
    assert garbage == [SkippedContent(0, 7), SkippedContent(7 + len(frame(1)), 9 + len(frame(1)))]
    assert decoder.is_between


def test_a_frame_with_an_excessive_length_is_garbage() -> None:
    huge = MAGIC + (MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little")
    assert summary(decode([huge + frame(1)], accepted={1})[0]) == [1]


def test_a_frame_without_an_operation_is_garbage() -> None:
    assert summary(decode([encode_frame(b"\xff\xff\xff") + frame(1)], accepted={1})[0]) == [1]


def test_an_out_of_sequence_operation_after_garbage_does_not_hide_later_ones() -> None:
    bogus = frame(9, Write(Fnode(1), 0, 1 << 40))
    assert summary(decode([b"x" + bogus + frame(1) + write(2, b"data")], accepted={1, 2})[0]) == [9, 1, 2, b"data"]
    # Without garbage before it, the operation is trusted: another author wrote it, and its data may be any bytes.
    assert summary(decode([frame(9, Write(Fnode(1), 0, len(frame(1)))) + frame(1) + frame(2)], {1, 2})[0]) == [9, 2]


def test_a_restart_drops_incomplete_content() -> None:
    _, decoder = decode([frame(1)[:9]], accepted=set())
    decoder.restart(500)
    assert decoder.is_between
    assert [type(event) for event in decoder.feed(frame(2))] == [DecodedOperation]
    assert decoder.position == 500 + len(frame(2))


@given(st.binary(max_size=200), st.data())
def test_any_bytes_are_decoded_without_an_error(noise: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(noise)))
    events, decoder = decode([noise[:cut], noise[cut:]], accepted={1})
    assert decoder.fed == len(noise)
    assert all(isinstance(event, (DecodedOperation, WrittenData, SkippedContent)) for event in events)
