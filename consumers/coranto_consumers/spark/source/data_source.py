"""`spark.read.format("journal")`: journals as DataFrames. `format("coranto")` is the same source.

::

spark.read.format("journal").options(endpoint="127.0.0.1:8080", selector="name:prefix=flights/events/").load()

has a row for each message: `journal`, `offset` (of its first byte), `next_offset`, `producer` (six bytes), `clock`,
`flags` and `value`, the line without its newline. A schema chooses columns, and may declare `value` as BINARY.

With a schema of the messages' fields, such as `carrier STRING, arr_delay DOUBLE`, lines are parsed as by Spark's reader
of JSON files, and the source's own columns begin with an underscore: `_journal`. `source_options.py` has the options.

Spark plans a read in one process and runs it in others, and all of them need `coranto`. The packages `pyspark_coranto`
and `pyspark_coranto_name` register the names for Spark's discovery. Call `register` if Spark does not discover them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from coranto.extras import with_install_advice

try:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader
    from pyspark.sql.types import BinaryType, StructField, StructType
except ModuleNotFoundError as error:
    raise with_install_advice(error) from error

from coranto.client import SyncJournalClient
from coranto.errors import InvalidInput
from coranto_consumers.journals.framings import FixedRecords, as_tolerant
from coranto_consumers.spark.decoding.rows import (
    COMMIT_OFFSET,
    FIELDS,
    Misfits,
    RowLayout,
    is_raw,
    parsed_layout,
    raw_layout,
)
from coranto_consumers.spark.options.source_options import Isolation, SourceOptions
from coranto_consumers.spark.session.task_errors import errors_to_driver
from coranto_consumers.spark.session.versions import register_source, stream_reader
from coranto_consumers.spark.source.batch_reader import JournalReader
from coranto_consumers.spark.streaming.reader import JournalStreamReader
from coranto_consumers.spark.streaming.stream_options import StreamOptions, refuse_stream_options

if TYPE_CHECKING:
    from coranto_consumers.spark.options.message_types import ResolvedType
    from coranto_consumers.spark.sink.stream_writer import StreamBatchWriter, StreamQueryWriter
    from coranto_consumers.spark.sink.writer import JournalStreamWriter, JournalWriter


class JournalDataSource(DataSource):
    """The data source `journal`. `options.OPTIONS` describes its options."""

    @classmethod
    def name(cls) -> str:
        return "journal"

    _type: ResolvedType | None = None
    """The registered type, once resolved. It is pickled with the source, so that a read uses one version."""

    def schema(self) -> StructType:
        # Streaming queries have other starting offsets, and it is not known here if this is a query or a batch read.
        given = {key: value for key, value in self.options.items() if key.lower() != "startingoffsets"}
        with errors_to_driver():
            options = SourceOptions.parse(given)
            if options.registry:
                from coranto_consumers.spark.options.message_types import registered_schema  # Workers do not need it.

                return registered_schema(self._resolved(options), options)
        fields = [field for name, field in FIELDS.items() if name != COMMIT_OFFSET]  # It costs time.
        if isinstance(options.framing, FixedRecords):
            fields = [StructField("value", BinaryType()) if each.name == "value" else each for each in fields]
        return StructType(fields)

    def reader(self, schema: StructType) -> JournalReader:
        with errors_to_driver():
            refuse_stream_options(self.options)
            options = self._typed(SourceOptions.parse(self.options))
            return JournalReader(*_layout(schema, options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        with errors_to_driver():
            options = StreamOptions.parse(self.options)
            source, layout = _layout(schema, self._typed(options.source))
            reader = JournalStreamReader(replace(options, source=source), layout)
            return stream_reader(reader, limits=options.limits, processing_time=options.processing_time)

    def _typed(self, options: SourceOptions) -> SourceOptions:
        if not options.registry:
            return options
        from coranto_consumers.spark.options.message_types import with_type  # Workers do not need it.

        return with_type(options, self._resolved(options))

    def _resolved(self, options: SourceOptions) -> ResolvedType:
        if self._type is None:
            from coranto_consumers.spark.options.message_types import find_type  # Workers do not need it.

            with SyncJournalClient.of(options.client) as client:
                self._type = find_type(client, options)
        return self._type

    def writer(self, schema: StructType, overwrite: bool) -> JournalWriter | StreamBatchWriter:
        from coranto_consumers.spark.sink.sink_options import SinkOptions
        from coranto_consumers.spark.sink.stream_writer import StreamBatchWriter
        from coranto_consumers.spark.sink.writer import JournalWriter

        with errors_to_driver():
            options = SinkOptions.parse(self.options, streaming=False).typed()
            return (StreamBatchWriter if options.stream else JournalWriter)(options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> JournalStreamWriter | StreamQueryWriter:
        from coranto_consumers.spark.sink.sink_options import SinkOptions
        from coranto_consumers.spark.sink.stream_writer import StreamQueryWriter
        from coranto_consumers.spark.sink.writer import JournalStreamWriter

        with errors_to_driver():
            options = SinkOptions.parse(self.options, streaming=True).typed()
            return (StreamQueryWriter if options.stream else JournalStreamWriter)(options, schema, overwrite)


class CorantoDataSource(JournalDataSource):
    """The same data source with the name `coranto`."""

    @classmethod
    def name(cls) -> str:
        return "coranto"


def _layout(schema: StructType, options: SourceOptions) -> tuple[SourceOptions, RowLayout]:
    """Return the options and layout of a read. Raises InvalidInput for columns that the read does not have."""
    if not options.parses and is_raw(schema):
        layout = raw_layout(schema)
    else:
        if options.misfits is Misfits.PERMISSIVE:
            options = replace(options, framing=as_tolerant(options.framing))
        layout = parsed_layout(schema, options.text_column, options.misfits, options.framing, options.zone)
    if layout.has_commits and options.isolation is not Isolation.READ_COMMITTED:
        raise InvalidInput(
            f"only committed reads know the column {COMMIT_OFFSET}; set isolation to read_committed, or leave it out",
            field="schema",
        )
    return options, layout


def register(spark: SparkSession) -> None:
    """Register `format("journal")` and `format("coranto")` in a session that has not discovered them."""
    register_source(spark, JournalDataSource, CorantoDataSource)
