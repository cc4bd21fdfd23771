"""JSON lines as Arrow batches, without copying, and the parsing of these batches to tables.

Needs pyarrow (the `consumers` extra).
"""

from __future__ import annotations

from typing import Final

from coranto.extras import with_install_advice

try:
    import numpy as np
    import pyarrow as pa
    import pyarrow.json
except ModuleNotFoundError as error:
    raise with_install_advice(error) from error

from coranto.errors import InvalidInput
from coranto.messages.arrow_values import joined, value_offsets
from coranto.messages.framing import JsonLines
from coranto.messages.special_lines import read_block

POSITION: Final = pa.schema(
    [
        pa.field("journal", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),  # The message's begin offset in the journal.
        pa.field("end", pa.int64(), nullable=False),  # The message's end offset in the journal, exclusive.
        pa.field("producer", pa.uint64(), nullable=False),  # See `columnar.producer_number`.
        pa.field("clock", pa.uint64(), nullable=False),
        pa.field("flags", pa.uint16(), nullable=False),
    ]
)
"""The columns that sequencing needs. `journal` may be dictionary-encoded."""

LINES: Final = pa.schema([*POSITION, pa.field("content", pa.binary(), nullable=False)])
"""The columns of the batches that `line_batch` returns."""

UNREADABLE: Final = "unreadable"
"""The additional column of batches of a tolerant framing."""


def line_batch(framing: JsonLines, journal: str, content: bytes, begin_offset: int) -> tuple[pa.RecordBatch, int]:
    """Return the whole lines of `content` as a batch of `LINES`, and their length in bytes, blank ones included.

    `content` must begin with the beginning of a line. The batch's column `content` holds the lines with their newlines,
    and refers to the given bytes without copying them. A tolerant framing adds the column `UNREADABLE`: true for lines
    whose UUID cannot be read, which count as messages without a UUID. Raises CorruptMessage.
    """
    found = read_block(framing, journal, content, begin_offset)
    lines, count = found.lines, len(found.lines.starts)
    arrays = [
        pa.repeat(pa.scalar(journal), count),
        pa.array(lines.offsets(begin_offset)),
        pa.array(lines.end_offsets(begin_offset)),
        pa.array(lines.uuids.producers),
        pa.array(lines.uuids.clocks),
        pa.array(lines.uuids.flags),
        found.content,
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=LINES)
    if framing.tolerant:
        unreadable = np.zeros(count, dtype=np.bool_) if found.unreadable is None else found.unreadable
        batch = batch.append_column(UNREADABLE, pa.array(unreadable))
    if found.blank is not None:
        batch = batch.filter(pa.array(~found.blank))
    return batch, lines.consumed


def parse_lines(batch: pa.RecordBatch, schema: pa.Schema | None = None) -> pa.Table:
    """Parse the JSON objects of a batch of lines to a table with the same rows in the same order.

    With a schema the table has exactly its columns and types. Otherwise pyarrow infers them from this batch. Raises
    InvalidInput.
    """
    content = batch.column("content")
    options = None
    if schema is not None:
        options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    if not len(content):
        return (schema or pa.schema([])).empty_table()
    # A block must hold the longest line.
    blocks = pyarrow.json.ReadOptions(block_size=max(1 << 20, int(np.diff(value_offsets(content)).max()) + 1))
    try:
        return pyarrow.json.read_json(pa.BufferReader(joined(content)), blocks, options)
    except pa.ArrowInvalid as error:
        raise InvalidInput(
            f"not lines of JSON that fit together: {error}; write one object a line, each field of one type"
        ) from error
