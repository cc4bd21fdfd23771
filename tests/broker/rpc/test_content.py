"""Messages of content are parsed as protobuf parses them, whatever their bytes."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coranto.wire import protocol_pb2 as pb
from coranto_broker.rpc.content import COPIED_BYTES, ContentMessage, append_reader, replicate_reader

READ_APPEND = append_reader(pb.AppendRequest.FromString)
READ_REPLICATE = replicate_reader(pb.ReplicateRequest.FromString)
CONTENT = b"\x22"
DELTA = b"\x28"


def varint(value: int, padding: int = 0) -> bytes:
    """Encode `value` in `padding` more bytes than it needs."""
    groups = [value & 0x7F]
    while value := value >> 7:
        groups.append(value & 0x7F)
    groups += [0] * padding
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


lengths = st.builds(varint, st.integers(0, 300), st.integers(0, 4))
fields = st.one_of(
    st.builds(
        lambda content, padding: CONTENT + varint(len(content), padding) + content,
        st.binary(max_size=200),
        st.integers(0, 4),
    ),
    st.builds(lambda value, padding: DELTA + varint(value, padding), st.integers(0, 2**64 - 1), st.integers(0, 2)),
    st.just(b"\x12\x03abc"),  # The journal of an append.
    st.just(b"\x30\x01"),  # A replica is to acknowledge.
    st.just(b"\xa2\x06\x02xy"),  # An unknown field.
    st.builds(lambda length, rest: CONTENT + length + rest, lengths, st.binary(max_size=8)),  # Perhaps cut off.
)
messages = st.one_of(st.lists(fields, max_size=4).map(b"".join), st.binary(max_size=12))


@given(messages)
@example(CONTENT + b"\x00")
@example(CONTENT + b"\x03abc" + CONTENT + b"\x01z")
@example(CONTENT + b"\x83\x80\x00abc")
@example(CONTENT + b"\x03abc" + DELTA + b"\xff" * 9 + b"\x01")
@example(CONTENT + b"\x03abc" + DELTA + b"\x80" * 9)
@example(CONTENT + b"\x03abc" + DELTA + b"\x05" + DELTA + b"\x06")
@settings(max_examples=500, deadline=None)
def test_every_message_decodes_as_protobuf_decodes_it(data: bytes) -> None:
    for kind, read in ((pb.AppendRequest, READ_APPEND), (pb.ReplicateRequest, READ_REPLICATE)):
        try:
            expected = kind.FromString(data)
        except DecodeError:
            with pytest.raises(DecodeError):
                read(data)
            continue
        found = read(data)
        if isinstance(found, ContentMessage):
            found = kind(
                content=bytes(found.content), **({"content_delta": found.content_delta} if found.content_delta else {})
            )
        assert found == expected


@pytest.mark.parametrize("size", [1, 127, 128, COPIED_BYTES - 1, COPIED_BYTES, 3 << 20])
def test_content_encoded_by_protobuf_is_parsed_without_it(size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    content = content[:size]
    data = pb.AppendRequest(content=content).SerializeToString()
    found = READ_APPEND(data)
    assert isinstance(found, ContentMessage)
    assert (found.content, found.content_delta) == (content, 0)
    assert isinstance(found.content, memoryview) == (size >= COPIED_BYTES)
    if isinstance(found.content, memoryview):
        assert found.content.obj is data  # No copy.
    for delta in (0, 1, 1 << 40, 2**63 - 1):
        data = pb.ReplicateRequest(content=content, content_delta=delta).SerializeToString()
        replicated = READ_REPLICATE(data)
        assert isinstance(replicated, ContentMessage)
        assert (replicated.content, replicated.content_delta) == (content, delta)


def test_the_commit_is_empty_content_and_other_messages_are_left_to_protobuf() -> None:
    commit = READ_APPEND(pb.AppendRequest().SerializeToString())
    assert isinstance(commit, ContentMessage)
    assert not commit.content
    for request in (
        pb.AppendRequest(journal="a/journal"),
        pb.AppendRequest(journal="a/journal", content=b"x"),
        pb.AppendRequest(content=b"x", offset=1),
    ):
        assert READ_APPEND(request.SerializeToString()) == request
    for replicate in (
        pb.ReplicateRequest(),
        pb.ReplicateRequest(acknowledge=True),
        pb.ReplicateRequest(content_delta=-1),
    ):
        assert READ_REPLICATE(replicate.SerializeToString()) == replicate
