"""Payloads that are Arrow batches."""

from __future__ import annotations

import pyarrow as pa
import pytest

from coranto.errors import InvalidInput
from coranto.messages.arrow_payload import UUID_KEY, ArrowPayload, uuid_of
from tests.platform.messages.typed import BATCHES, UUID_1, UUID_2


def test_batches_are_readable_arrow_streams() -> None:
    batch = BATCHES[0].replace_schema_metadata({"origin": "here"})
    payload = ArrowPayload().encode(batch, UUID_1)
    assert pa.ipc.open_stream(payload).read_all().to_pydict() == batch.to_pydict()
    read = ArrowPayload().decode(payload)
    assert uuid_of(read) == UUID_1
    assert read.schema.metadata == {b"origin": b"here", UUID_KEY: str(UUID_1).encode()}
    assert uuid_of(batch) is None
    again = ArrowPayload().decode(ArrowPayload().encode(read, UUID_2))
    assert uuid_of(again) == UUID_2


def test_payloads_without_exactly_one_batch_are_refused() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, BATCHES[0].schema) as writer:
        writer.write_batch(BATCHES[0])
        writer.write_batch(BATCHES[1])
    payload = sink.getvalue().to_pybytes()
    assert ArrowPayload().uuid_parts(payload) is None
    with pytest.raises(InvalidInput, match="of one Arrow batch was expected, not of 2"):
        ArrowPayload().decode(payload)
    for call in (ArrowPayload().decode, ArrowPayload().uuid_parts):
        with pytest.raises(InvalidInput, match="not a stream of Arrow batches"):
            call(b"oops")
