"""The differences between the versions of PySpark that Coranto supports, 4.0 to 4.3.

Other modules import names that some version lacks, or spells differently, from here. Features that a version lacks
raise VersionTooOld (`require_spark`).

=======  ===============================================================================================================
before   missing
=======  ===============================================================================================================
4.1      filters of batch reads; `DataSourceStreamArrowWriter`, which is replaced by a writer of batches
4.2      `latestOffset` with a start and a limit, so `PositionedReader` remembers the start, and limits need an option;
         several batches with `Trigger.AvailableNow`; heads in the progress of queries
=======  ===============================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import pyspark
from pyspark.errors import AnalysisException
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from coranto.errors import VersionTooOld
from coranto_consumers.spark.session.task_errors import errors_to_driver

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource
    from pyspark.sql.types import StructType

SPARK: Final = (int(pyspark.__version__.split(".")[0]), int(pyspark.__version__.split(".")[1]))

if TYPE_CHECKING or SPARK >= (4, 1):
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter

    class DataSourceStreamArrowWriter(DataSourceStreamWriter, DataSourceArrowWriter):
        """A writer of a query's batches. Spark 4.0 passes Arrow batches to any instance of DataSourceArrowWriter."""


if TYPE_CHECKING or SPARK >= (4, 2):
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
else:

    class ReadLimit:
        """The limit of a batch, which `PositionedReader` passes to the reader."""

    class ReadAllAvailable(ReadLimit):
        """No limit."""

    class ReadMaxBytes(ReadLimit):
        """A limit of bytes."""

        def __init__(self, max_bytes: int) -> None:
            self.max_bytes = max_bytes

    class SupportsTriggerAvailableNow:
        """A marker class without effect before 4.2."""


__all__ = [
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "SupportsTriggerAvailableNow",
]


def require_spark(feature: str, needed: tuple[int, int], instead: str | None = None) -> None:
    """Raise VersionTooOld if this version of PySpark lacks a feature that came with version `needed`."""
    if needed > SPARK:
        raise VersionTooOld(feature, "PySpark", pyspark.__version__, f"{needed[0]}.{needed[1]}", instead or "")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of rows that tasks pass to Spark, with timestamps in UTC."""
    if SPARK >= (4, 2):
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def push_filters() -> Any:
    """Return the method of batch readers that takes filters. None in versions without it."""
    return getattr(DataSourceReader, "pushFilters", None)


def register_source(spark: SparkSession, *sources: type[DataSource]) -> None:
    """Register data sources in a session. Sources that are already registered are left unchanged."""
    for source in sources:
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise


class PositionedReader(DataSourceStreamReader):
    """A stream reader for Spark before 4.2, which passes a reader neither the begin of a batch nor its limit.

    The first batch begins at the initial offset, and each other batch where the previous one ended. For a query with a
    checkpoint, Spark first asks for the partitions of the empty batch at the query's offset, or of the batch that it
    repeats. But with `spark.sql.streaming.triggerAvailableNowWrapper.enabled`, `Trigger.AvailableNow` asks for the end
    offset first. For a query with a checkpoint, the reader then assumes a wrong begin, which is an error.
    """

    def __init__(self, reader: DataSourceStreamReader, *, limited: bool) -> None:
        self._reader: Any = reader
        self._limit = self._reader.getDefaultReadLimit() if limited else ReadAllAvailable()
        self._position: dict[str, Any] | None = None
        self._assumed: dict[str, Any] | None = None
        """The assumed begin of the first batch, until Spark asks for its partitions."""

    def initialOffset(self) -> dict[str, Any]:
        return cast(dict[str, Any], self._reader.initialOffset())

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        if self._position is None:
            self._position = self._assumed = self.initialOffset()
        self._position = self._reader.latestOffset(self._position, self._limit)
        return cast(dict[str, Any], self._position)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the partitions of a batch. Raises VersionTooOld if it was planned from another begin."""
        if self._assumed not in (None, start):
            with errors_to_driver():
                require_spark(
                    "Trigger.AvailableNow with spark.sql.streaming.triggerAvailableNowWrapper.enabled",
                    (4, 2),
                    "set that to false",
                )
        self._assumed, self._position = None, end
        return cast(Sequence[InputPartition], () if start == end else self._reader.partitions(start, end))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return cast(Iterator[Any], self._reader.read(partition))

    def commit(self, end: dict[str, Any]) -> None:
        self._reader.commit(end)

    def stop(self) -> None:
        self._reader.stop()


def stream_reader(
    reader: DataSourceStreamReader, *, limits: Sequence[str], processing_time: bool
) -> DataSourceStreamReader:
    """Return a reader of streaming queries with the interface that this version of Spark calls.

    Before 4.2, `Trigger.AvailableNow` and `Trigger.Once` run a single batch, and readers cannot see the trigger. With
    `limits`, this batch would leave out content. So these raise VersionTooOld unless the user declares that the query
    has a `processing_time` trigger.
    """
    if SPARK >= (4, 2):
        return reader
    if limits and not processing_time:
        instead = "set the option trigger=processingTime if the query has that trigger"
        require_spark(f"{limits[0]} with an unknown trigger", (4, 2), instead)
    return PositionedReader(reader, limited=bool(limits))
