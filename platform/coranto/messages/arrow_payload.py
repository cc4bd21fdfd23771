"""Arrow record batches as messages: each batch is one message, in a fixed frame.

The payload is an Arrow IPC stream of one batch, which any Arrow library reads. Its UUID is in the schema's metadata.
Needs pyarrow (the `consumers` extra).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import pyarrow as pa

from coranto.errors import InvalidInput
from coranto.messages.fixed_frame import FixedFrame
from coranto.messages.uuids import UuidParts, parse_uuid_text

UUID_KEY: Final = b"coranto.uuid"
"""The key of the UUID's text in a schema's metadata."""

CONTENT_TYPE: Final = "application/x-arrow-fixed"


class ArrowPayload:
    """The `PayloadCodec` of record batches. A decoded batch has its UUID in its schema's metadata."""

    def encode(self, message: pa.RecordBatch | None, uuid: UUID) -> bytes:
        batch = pa.RecordBatch.from_arrays([], schema=pa.schema([])) if message is None else message
        if not isinstance(batch, pa.RecordBatch):
            raise InvalidInput(f"a message must be a pyarrow.RecordBatch, not {type(message).__name__}")
        metadata = {**(batch.schema.metadata or {}), UUID_KEY: str(uuid)}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema.with_metadata(metadata)) as writer:
            writer.write_batch(batch.replace_schema_metadata(metadata))
        payload: bytes = sink.getvalue().to_pybytes()
        return payload

    def decode(self, payload: bytes) -> pa.RecordBatch:
        try:
            with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
                batches = list(reader)
        except (pa.ArrowInvalid, OSError) as error:
            raise InvalidInput(f"not a stream of Arrow batches: {error}") from error
        if len(batches) != 1:
            raise InvalidInput(f"a stream of one Arrow batch was expected, not of {len(batches)}")
        return batches[0]

    def uuid_parts(self, payload: bytes) -> UuidParts | None:
        try:
            with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
                text = (reader.schema.metadata or {}).get(UUID_KEY)
        except (pa.ArrowInvalid, OSError) as error:
            raise InvalidInput(f"not a stream of Arrow batches: {error}") from error
        return None if text is None else parse_uuid_text(text)


def arrow_frames() -> FixedFrame[pa.RecordBatch]:
    """Return the framing for journals of record batches."""
    return FixedFrame(ArrowPayload(), CONTENT_TYPE)


def uuid_of(batch: pa.RecordBatch) -> UUID | None:
    """Return the UUID that a batch was read with, or None."""
    text = (batch.schema.metadata or {}).get(UUID_KEY)
    return None if text is None else UUID(text.decode())
