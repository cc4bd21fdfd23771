"""Scans of manifests: committed messages, each once, as typed columns for Arrow, Polars and DuckDB.

A scan may be used any number of times; each use reads the content again. Scans need pyarrow and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coranto.client.moments import first_clock_after
from coranto.errors import InvalidInput
from coranto.lake.content import ManifestContent, require_lines
from coranto.lake.manifest import JournalPart, Manifest
from coranto.lake.signing import load_manifest
from coranto.lake.values import FieldParser, ScanMisfits
from coranto.messages.checkpoints import Source
from coranto.messages.columnar_sequencer import ColumnarSequencer
from coranto.messages.framing import DEFAULT_UUID_POINTER, JsonLines
from coranto.messages.sequencer import ReplayRange
from coranto.messages.uuids import clock_to_ns
from coranto.security.tokens import Keys

if TYPE_CHECKING:
    import duckdb
    import polars

__all__ = ["Scan", "ScanMisfits", "scan"]

OWN: Final = pa.schema(
    [
        pa.field("_journal", pa.string(), nullable=False),
        pa.field("_offset", pa.int64(), nullable=False),  # The message's begin offset in the journal.
        pa.field("_next_offset", pa.int64(), nullable=False),  # The message's end offset in the journal, exclusive.
        pa.field("_time", pa.timestamp("us", tz="UTC")),  # The time in its UUID; null without one.
    ]
)
"""The columns of every scan."""
VALUE: Final = pa.field("_value", pa.string(), nullable=False)
"""The line, for scans without a schema."""

Types = Mapping[str, "pa.DataType | str"]


def scan(
    manifest: Manifest | Path | str,
    schema: pa.Schema | Types | None = None,
    *,
    keys: Keys | None = None,
    file_root: Path | None = None,
    misfits: ScanMisfits | str = ScanMisfits.ERROR,
    uuid_pointer: str | None = DEFAULT_UUID_POINTER,
) -> Scan:
    """Return a scan of a manifest, or of the manifest in a file (for `keys` see `load_manifest`).

    `schema` has the fields of messages to read: an Arrow schema, or types by name, such as `{"cents": "int64"}`.
    Without a schema, `_value` has each line. `misfits` sets the handling of messages that do not fit the schema.
    `file_root` is the root folder of `file:///` stores, for manifests that were made without it. Raises InvalidInput
    and Unauthenticated.
    """
    if not isinstance(manifest, Manifest):
        manifest = load_manifest(manifest, keys)
    elif keys is not None:
        raise InvalidInput("verify a signed file; leave them out for a Manifest object", field="keys")
    require_lines(manifest)
    policy = ScanMisfits(misfits)
    framing = JsonLines(uuid_pointer, tolerant=policy is ScanMisfits.NULLS)
    return Scan(manifest, to_schema(schema), policy, file_root, framing)


class Scan:
    """The committed messages of a manifest, each once, with the columns of `OWN` and the fields of a schema.

    Messages of a journal are in order of commit. Messages that are not committed within the manifest are left out.
    Messages are deduplicated within the manifest only: a duplicate of a message before its begin is not detected.

    Any consumer of Arrow streams can read a scan (`pyarrow.table(scan)`, `polars.DataFrame(scan)`, DuckDB's
    `FROM scan`). Content that is missing or was changed ends the read with an error.
    """

    def __init__(
        self,
        manifest: Manifest,
        fields: pa.Schema | None,
        misfits: ScanMisfits,
        file_root: Path | None,
        framing: JsonLines,
    ) -> None:
        self.manifest = manifest
        self.schema: pa.Schema = pa.schema([*OWN, *([VALUE] if fields is None else fields)])
        self._fields = fields
        self._misfits = misfits
        self._file_root = file_root
        self._framing = framing

    def __repr__(self) -> str:
        return f"Scan(journals={len(self.manifest.journals)}, columns={self.schema.names})"

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.reader().__arrow_c_stream__(requested_schema)

    def reader(self) -> pa.RecordBatchReader:
        """Return a new reader of the batches."""
        return pa.RecordBatchReader.from_batches(self.schema, self.batches())

    def arrow(self) -> pa.Table:
        """Read all messages into memory."""
        return self.reader().read_all()

    def polars(self) -> polars.LazyFrame:
        """Return a LazyFrame that reads when it is collected, and parses only the columns that are needed."""
        import polars
        from polars.io.plugins import register_io_source

        def read(
            columns: list[str] | None, predicate: polars.Expr | None, rows: int | None, batch_size: int | None
        ) -> Iterator[polars.DataFrame]:
            left = rows
            for batch in self.batches(columns):
                frame = polars.DataFrame(batch)
                if predicate is not None:
                    frame = frame.filter(predicate)
                if left is not None:
                    frame = frame.head(left)
                    left -= len(frame)
                yield frame
                if left == 0:
                    return

        return register_io_source(read, schema=polars.DataFrame(self.schema.empty_table()).schema)

    def duckdb(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """Return a relation that reads whenever it is executed; by default on DuckDB's default connection."""
        import duckdb

        return (connection or duckdb.default_connection()).from_arrow(self)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the committed messages, by default with all columns, in the order of `schema`.

        Raises CorruptMessage, CorruptFragment, StoreError and InvalidInput.
        """
        wanted = [field for field in self.schema if columns is None or field.name in columns]
        fields = pa.schema([field for field in wanted if self._fields is not None and field.name in self._fields.names])
        # With nulls for misfits, only the wanted fields are parsed; otherwise all, to check every message.
        checked = fields if self._misfits is ScanMisfits.NULLS else self._fields
        typed = FieldParser(checked, self._misfits) if checked is not None and len(checked) else None
        content = ManifestContent(self.manifest, self._file_root)
        for part in self.manifest.journals:
            for committed in self._committed(content, part):
                parsed = {} if typed is None else typed.parse(committed)
                arrays = [
                    parsed[field.name] if field.name in fields.names else own_column(committed, field.name)
                    for field in wanted
                ]
                yield from pa.Table.from_arrays(arrays, schema=pa.schema(wanted)).to_batches()

    def _committed(self, content: ManifestContent, part: JournalPart) -> Iterator[pa.RecordBatch]:
        """Yield the committed lines of a journal, in order of commit."""

        def again(wanted: ReplayRange) -> Iterator[pa.RecordBatch]:
            return map(self._in_time, content.lines(part, self._framing, wanted.begin, wanted.end))

        sequencer = ColumnarSequencer(again, {part.journal: Source(part.begin)})
        for lines in content.lines(part, self._framing, part.begin, part.end):
            committed = sequencer.feed(self._in_time(lines))
            if committed.num_rows:
                yield committed

    def _in_time(self, lines: pa.RecordBatch) -> pa.RecordBatch:
        """Return the lines that existed at the manifest's time. Later lines are ignored, as if never written."""
        if self.manifest.as_of is None:
            return lines
        first_later = first_clock_after(self.manifest.as_of)
        return lines.filter(pc.less(lines.column("clock"), pa.scalar(first_later, pa.uint64())))


def own_column(lines: pa.RecordBatch, name: str) -> Any:
    """Return a column of `OWN`, or `VALUE`, of a batch of `coranto.messages.batches.LINES`."""
    match name:
        case "_journal":
            return lines.column("journal")
        case "_offset":
            return lines.column("offset")
        case "_next_offset":
            return lines.column("end")
        case "_time":
            clocks = lines.column("clock").to_numpy(zero_copy_only=False)
            ticks = (clocks >> np.uint64(4)).astype(np.int64) + clock_to_ns(0) // 100
            return pa.array(ticks // 10, pa.timestamp("us", tz="UTC"), mask=clocks == 0)
        case _:
            return pc.binary_slice(lines.column("content"), 0, -1).cast(pa.string())


def to_schema(given: pa.Schema | Types | None) -> pa.Schema | None:
    """Return the fields as an Arrow schema. Raises InvalidInput for unknown types, and for reserved names."""
    if given is None:
        return None
    try:
        schema = given if isinstance(given, pa.Schema) else pa.schema(list(given.items()))
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{error}; give an Arrow schema, or types by name", field="schema") from None
    if taken := [name for name in schema.names if name in OWN.names]:
        raise InvalidInput(f"{', '.join(taken)}: every scan has this column; leave it out", field="schema")
    if len(set(schema.names)) < len(schema.names):
        raise InvalidInput("has a name twice", field="schema")
    if not len(schema):
        raise InvalidInput("has no fields; leave it out to read each line as a text", field="schema")
    return schema
