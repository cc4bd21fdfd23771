"""Messages of appends: those with too many are refused before they are parsed, however they are encoded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendBatch, StreamedAppend
from coranto_broker.rpc.batches import MAX_BATCH_APPENDS, batch_reader
from coranto_broker.rpc.source import Unreadable


def read(data: bytes) -> AppendBatch | Unreadable:
    return batch_reader(AppendBatch.FromString)(data)


def batch(appends: int, content: bytes = b"x") -> bytes:
    request = pb.AppendRequest(journal="a/b")
    return AppendBatch(
        appends=[StreamedAppend(id=number, request=request, content=content) for number in range(1, appends + 1)]
    ).SerializeToString()


@pytest.mark.parametrize("content", [b"", b"x" * 200, b"x" * 20_000])
@pytest.mark.parametrize("appends", [0, 1, 200])
def test_messages_of_clients_are_read(appends: int, content: bytes) -> None:
    found = read(batch(appends, content))
    assert isinstance(found, AppendBatch)
    assert len(found.appends) == appends


def test_more_than_the_maximum_of_appends_is_refused_before_parsing() -> None:
    found = read(batch(MAX_BATCH_APPENDS))
    assert isinstance(found, AppendBatch)
    assert len(found.appends) == MAX_BATCH_APPENDS

    def parse(data: bytes) -> AppendBatch:
        raise AssertionError("it was parsed")

    for data in (batch(MAX_BATCH_APPENDS + 1), b"\x0a\x00" * (MAX_BATCH_APPENDS + 1)):
        refused = batch_reader(parse)(data)
        assert isinstance(refused, Unreadable)
        assert "at most 4096 appends" in refused.reason


def test_other_fields_or_long_lengths_do_not_hide_appends() -> None:
    many = b"\x0a\x00" * (MAX_BATCH_APPENDS + 1)
    unknown = b"\x7a\x01x"
    padded = b"\x0a\x80\x80\x00" * (MAX_BATCH_APPENDS + 1)
    for data in (unknown + many, padded, b"\x0a\x00" + unknown + many):
        found = read(data)
        assert isinstance(found, Unreadable) or len(found.appends) <= MAX_BATCH_APPENDS


@given(st.binary(max_size=40))
def test_no_bytes_make_the_count_fail(data: bytes) -> None:
    for long in (
        data + b"\x0a\x00" * MAX_BATCH_APPENDS,
        (b"\x0a" + data) * MAX_BATCH_APPENDS,
        b"\x0a\x00" * 4095 + data,
    ):
        batch_reader(lambda data: Unreadable())(long + b"\x0a\xff")
