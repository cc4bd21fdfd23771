"""Event formats: blank and stamped events, transaction ends, and their sizes."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.messages.fixed_frame import MAGIC
from coranto.messages.framing import Envelope, iter_messages
from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerId, build_uuid
from coranto.streams.model.events import (
    BytesEvents,
    JsonEvents,
    TransactionEnd,
    format_of,
    stamped,
    validate_writer_id,
)
from coranto.streams.writer.stamping import stamper_of

PRODUCER = ProducerId(b"\x01abcde")
JSON_EVENTS = st.dictionaries(
    st.text(max_size=5) | st.just("_meta"),
    st.none() | st.integers() | st.text(max_size=5) | st.dictionaries(st.just("uuid") | st.text(max_size=3), st.text()),
    max_size=4,
).filter(lambda event: event.get("_meta") is None or isinstance(event["_meta"], dict))
WRITERS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
SEQUENCES = st.integers(0, (1 << 63) - 1)


def uuid_of(clock: int, flags: Flags) -> UUID:
    return build_uuid(PRODUCER, clock, flags)


def decoded(events: JsonEvents | BytesEvents, content: bytes) -> list[Envelope]:
    return list(iter_messages(events, "stream/segment/00000000", [content], 0))


@given(JSON_EVENTS, st.integers(1, (1 << 64) - 1))
def test_a_stamped_json_event_equals_one_marshalled_with_its_uuid(event: dict[str, object], clock: int) -> None:
    events, uuid = JsonEvents(), uuid_of(clock, Flags.CONTINUE_TXN)
    blank = events.encode(event)
    stamped = events.stamp(blank, uuid)
    assert stamped == events.marshal(event, uuid)
    assert len(stamped) == len(blank)
    (envelope,) = decoded(events, stamped)
    assert (envelope.producer, envelope.clock, envelope.flags) == (PRODUCER, clock, Flags.CONTINUE_TXN)


@given(st.binary(max_size=100), st.integers(1, (1 << 64) - 1))
@example(MAGIC, 1)
def test_a_stamped_bytes_event_reads_as_written(event: bytes, clock: int) -> None:
    events = BytesEvents()
    blank = events.encode(event)
    stamped = events.stamp(blank, uuid_of(clock, Flags.OUTSIDE_TXN))
    assert len(stamped) == len(blank) == len(event) + 24
    # An event that ends like a torn frame is read once the next frame has arrived.
    envelope, _ = decoded(events, stamped + events.marshal(b"next", uuid_of(clock, Flags.OUTSIDE_TXN)))
    assert (envelope.message, envelope.clock, events.end_of(envelope)) == (event, clock, None)


@given(
    JSON_EVENTS,
    st.integers(0, (1 << 64) - 1) | st.integers(-200, 0).map(lambda back: (7 << 36) + 16 * back),
    st.sampled_from(Flags),
    WRITERS,
    SEQUENCES,
)
def test_a_stamper_makes_the_same_bytes_as_the_format(
    event: dict[str, object], clock: int, flags: Flags, writer: str, sequence: int
) -> None:
    for events, blank in ((JsonEvents(), JsonEvents().encode(event)), (BytesEvents(), BytesEvents().encode(b"event"))):
        stamper = stamper_of(events, PRODUCER, writer)
        assert stamper.event(blank, clock, flags) == events.stamp(blank, uuid_of(clock, flags))
        begin = min(clock, (1 << 64) - 1 - 9 * CLOCK_TICK)
        clocks = [begin + index * CLOCK_TICK for index in range(10)]
        assert stamper.events([blank] * 10, begin, flags) == [events.stamp(blank, uuid_of(at, flags)) for at in clocks]
        end = events.transaction_end(uuid_of(clock, Flags.ACK_TXN), writer, sequence)
        assert stamper.transaction_end(clock, sequence) == end
        begin = min(clock, (1 << 64) - 1 - 10 * CLOCK_TICK)
        clocks = [begin + index * CLOCK_TICK for index in range(11)]
        whole = [events.stamp(blank, uuid_of(at, Flags.CONTINUE_TXN)) for at in clocks[:10]]
        whole.append(events.transaction_end(uuid_of(clocks[10], Flags.ACK_TXN), writer, sequence))
        assert stamper.transaction([blank] * 10, begin, sequence) == b"".join(whole)


@pytest.mark.parametrize("events", [JsonEvents(), BytesEvents()])
@given(writer=WRITERS, sequence=SEQUENCES, other=SEQUENCES)
def test_a_transaction_end_has_writer_and_sequence_in_a_fixed_length(
    events: JsonEvents | BytesEvents, writer: str, sequence: int, other: int
) -> None:
    end = events.transaction_end(uuid_of(5, Flags.ACK_TXN), writer, sequence)
    (envelope,) = decoded(events, end)
    assert events.end_of(envelope) == TransactionEnd(writer, sequence)
    assert len(end) == len(events.transaction_end(uuid_of(160, Flags.ACK_TXN), writer, other))


@pytest.mark.parametrize("events", [JsonEvents(), BytesEvents()])
def test_other_messages_are_not_transaction_ends(events: JsonEvents | BytesEvents) -> None:
    plain = events.transaction_end(uuid_of(5, Flags.OUTSIDE_TXN), "writer", 7)
    acknowledgement = events.acknowledgement(uuid_of(6, Flags.ACK_TXN))
    for envelope in decoded(events, plain + acknowledgement):
        assert events.end_of(envelope) is None


def test_invalid_events_are_refused() -> None:
    with pytest.raises(InvalidInput, match="JSON object"):
        JsonEvents().encode([1])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="must be bytes, not str"):
        BytesEvents().encode("text")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="longer than the 100 allowed"):
        BytesEvents(max_payload_bytes=100).encode(bytes(100))


def test_writer_ids_have_1_to_256_bytes() -> None:
    assert validate_writer_id("ž" * 128) == "ž" * 128
    for wrong in ("", "x" * 257, "\ud800"):
        with pytest.raises(InvalidInput, match="writer_id"):
            validate_writer_id(wrong)


def test_a_content_type_determines_the_format() -> None:
    assert isinstance(format_of("application/x-ndjson"), JsonEvents)
    assert isinstance(format_of("application/x-protobuf-fixed"), BytesEvents)
    with pytest.raises(InvalidInput, match="text/csv is not the content type"):
        format_of("text/csv")


@pytest.mark.parametrize("events", [JsonEvents(), BytesEvents()])
def test_stamping_many_events_equals_stamping_each(events: JsonEvents | BytesEvents) -> None:
    given_events = [{"n": n} if isinstance(events, JsonEvents) else b"%d" % n for n in range(5)]
    encoded = [events.encode(each) for each in given_events]  # type: ignore[arg-type]
    first = (7 << 32 | 0xFFFFFFF0) << 4
    expected = [
        events.stamp(each, uuid_of(first + n * CLOCK_TICK, Flags.CONTINUE_TXN)) for n, each in enumerate(encoded)
    ]
    assert stamped(events, encoded, PRODUCER, first, Flags.CONTINUE_TXN) == b"".join(expected)
    assert stamped(events, [], PRODUCER, first, Flags.CONTINUE_TXN) == b""
