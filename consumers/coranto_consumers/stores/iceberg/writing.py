"""Writing a table's Parquet files in any process: the driver or Spark's tasks."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.io.pyarrow import _dataframe_to_data_files, schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil

from coranto_consumers.stores.iceberg.files import file_location
from coranto_consumers.stores.iceberg.rows import fit
from coranto_consumers.stores.iceberg.state import PREFIX

_MAX_BYTES: Final = 128 << 20
"""The maximum bytes of rows, in memory, for one file."""
_DICTIONARY_BYTES: Final = 256 << 10
"""The maximum bytes of a column's dictionary, unless the table sets it. PyArrow writes dictionaries even if nearly all
values differ: with pyiceberg's default of 2 MiB, such files are twice as large, and take half as long again to
write."""
_CATALOG_PROPERTIES: Final = frozenset(
    (
        "uri",
        "warehouse",
        "token",
        "credential",
        "echo",
        "pool_pre_ping",
        "prefix",
        "scope",
        "audience",
        "resource",
        "ssl",
    )
)
_CATALOG_PREFIXES: Final = (PREFIX, "auth", "header.", "oauth2-", "rest.", "rest-", "snapshot-loading-mode", "ssl")
"""Prefixes of other catalog properties, which may be secrets."""


@dataclass(frozen=True, slots=True)
class FileWriter:
    """Writes files of a table into one folder. It can be pickled, and has no access to the catalog.

    The files are visible only after a commit adds them.
    """

    name: str
    metadata: str = field(repr=False)
    io: Mapping[str, str] = field(repr=False)  # May have credentials of an object store.
    spec_id: int
    """The id of the partition spec of the files."""

    @classmethod
    def of(cls, table: Table, folder: str) -> FileWriter:
        """Return a writer of files that a table's next commit may add."""
        location = file_location(table, folder).rstrip("/")
        own = {name: value for name, value in table.properties.items() if not name.startswith(PREFIX)}
        own.setdefault(TableProperties.PARQUET_DICT_SIZE_BYTES, str(_DICTIONARY_BYTES))
        target = int(own.get(TableProperties.WRITE_TARGET_FILE_SIZE_BYTES, _MAX_BYTES))
        metadata = table.metadata.model_copy(
            update={
                "properties": {
                    **own,
                    TableProperties.WRITE_DATA_PATH: location,
                    TableProperties.WRITE_TARGET_FILE_SIZE_BYTES: str(min(target, _MAX_BYTES)),
                },
                "snapshots": [],
                "snapshot_log": [],
                "metadata_log": [],
                "refs": {},
                "statistics": [],
                "partition_statistics": [],
                "current_snapshot_id": None,
            }
        )
        io = {
            name: str(value)
            for name, value in table.io.properties.items()
            if name not in _CATALOG_PROPERTIES and not name.startswith(_CATALOG_PREFIXES)
        }
        return cls(".".join(table.name()), metadata.model_dump_json(), io, table.metadata.default_spec_id)

    def write(self, batches: Iterable[pa.RecordBatch]) -> Iterator[DataFile]:
        """Write rows to files of the table's partitions. Raises InvalidInput for rows that do not fit the table."""
        metadata, io = self._opened()
        columns = schema_to_pyarrow(metadata.schema(), include_field_ids=False)
        counter, written = itertools.count(), uuid.uuid4()
        for rows in _tables_by_file(batches):
            fitting = fit(rows, columns, self.name)
            yield from _dataframe_to_data_files(metadata, fitting, io, written, counter)

    def stage(self, batches: Iterable[pa.RecordBatch]) -> Iterator[str]:
        """Write rows to files for the driver to read, and yield the files' locations."""
        metadata, io = self._opened()
        for rows in _tables_by_file(batches):
            location = f"{metadata.properties[TableProperties.WRITE_DATA_PATH]}/staged-{uuid.uuid4().hex}.parquet"
            with io.new_output(location).create() as stream:
                pq.write_table(rows, stream, compression="zstd")
            yield location

    def read(self, locations: Iterable[str]) -> Iterator[pa.Table]:
        """Yield the rows of staged files. Raises FileNotFoundError if one is gone."""
        _, io = self._opened()
        for location in locations:
            with io.new_input(location).open() as stream:
                yield pq.read_table(stream)

    def _opened(self) -> tuple[TableMetadata, FileIO]:
        metadata = TableMetadataUtil.parse_raw(self.metadata)
        return metadata, load_file_io(dict(self.io), metadata.location)


def _tables_by_file(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield rows in tables, each with the rows of one file."""
    held: list[Any] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            size += batch.nbytes
        if size >= _MAX_BYTES:
            yield pa.Table.from_batches(held)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held)
