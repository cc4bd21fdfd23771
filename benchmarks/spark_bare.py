"""A bare Spark source in Python that returns prepared Arrow batches: the floor of all sources in Python.

It measures Spark's share alone: starting tasks, passing batches to Java, and converting them to rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.json
from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from coranto_consumers.spark.decoding.rows import ROWS_PER_BATCH

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NAME: Final = "bare"


class BareSource(DataSource):
    """Returns the batches of Arrow files, one partition for each file."""

    @classmethod
    def name(cls) -> str:
        return _NAME

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(sorted(Path(self.options["path"]).iterdir()))


class _Reader(DataSourceReader):
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(str(each)) for each in self._files]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        with pa.memory_map(partition.value) as file, pa.ipc.open_file(file) as batches:
            for number in range(batches.num_record_batches):
                yield batches.get_batch(number)


def register(spark: SparkSession) -> None:
    """Register the source. Workers get it by value, because they cannot import benchmarks."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    spark.dataSource.register(BareSource)


def bare_rows(spark: SparkSession, schema: str, folder: Path) -> DataFrame:
    """Return the rows of a folder written by `prepare`."""
    return spark.read.format(_NAME).schema(schema).load(str(folder))


def prepare(files: Sequence[Path], schema: str, folder: Path) -> None:
    """Convert each file of lines to Arrow batches: of their fields, or of the texts if the only column is `value`."""
    folder.mkdir()
    columns = StructType.fromDDL(schema)
    assert isinstance(columns, StructType), columns
    kinds = to_arrow_schema(columns)
    for file in files:
        content = file.read_bytes()
        if kinds.names == ["value"]:
            table = pa.table({"value": pa.array(content.decode().splitlines(), pa.string())})
        else:
            options = pyarrow.json.ParseOptions(explicit_schema=kinds, unexpected_field_behavior="ignore")
            table = pyarrow.json.read_json(pa.BufferReader(content), parse_options=options)
        with pa.ipc.new_file(folder / f"{file.name}.arrow", table.schema) as out:
            out.write_table(table.combine_chunks(), ROWS_PER_BATCH)
