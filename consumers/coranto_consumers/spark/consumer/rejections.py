"""Search for messages, and rows of batches, that the store rejects, and their treatment by the policy `misfits`.

A database reports that it rejects a row of a transaction, but not the message that the row comes from. So the search
writes parts of the transaction, in transactions of the store that are rolled back (`outputs.rejections`).

Two columns, with journal and offset, identify messages. Rows with the same location are treated together. If a batch
has no such columns, its rows are numbered from 0, in the order of `batch.collect()`. Each evaluation of such a batch
may return a different order. So the executors cache the numbered rows. If an executor is lost, the batch fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, NamedTuple

import pyarrow as pa
import structlog
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, LongType, StringType

from coranto.errors import RejectedRow
from coranto_consumers.outputs.dead_letters import COLUMNS, DeadLetters, MisfitPolicy
from coranto_consumers.outputs.rejections import MAX_REJECTED, TooManyRejected, find_nulls, find_rejected
from coranto_consumers.spark.application.outputs import Outputs, column_named
from coranto_consumers.spark.inputs.frames import METADATA
from coranto_consumers.spark.inputs.input_reader import Input

_MAX_LOGGED: Final = 10
_FOUND_BEFORE_FAILING: Final = 8
"""The number of rejected messages to find before the first one is reported: the search may not find them in order."""
_JOURNAL, _OFFSET, _NULLS, _MARK = (f"_coranto_{name}" for name in ("journal", "offset", "nulls", "mark"))

_log = structlog.get_logger(__name__)


class MessageLocation(NamedTuple):
    """The location of a message. For a row of a batch, `journal` is the batch's name, and `offset` the row's number."""

    journal: str
    offset: int


@dataclass(frozen=True, slots=True)
class MessageLocator:
    """The columns with the locations of messages, and texts for errors about them."""

    journal: str = "_journal"
    offset: str = "_offset"
    are_rows: bool = False
    """True for rows of batches without journals."""
    fewer: str = "set a smaller max_transaction_bytes"
    """The advice for a transaction with too many rejected messages."""

    def error(self, problem: RejectedRow, location: MessageLocation) -> RejectedRow:
        return problem.at(*location, is_row=self.are_rows)


Treatment = frozenset[str] | None
"""The columns of a message that are set to null. None: the message is left out."""
Treatments = dict[MessageLocation, Treatment]


@dataclass(frozen=True, slots=True)
class Rejections:
    """Treats the messages that a store rejects in transactions of one consumer."""

    consumer: str
    outputs: Callable[[DataFrame], Outputs]
    misfits: MisfitPolicy | DeadLetters
    reject: Callable[[Outputs], RejectedRow | None]
    """Writes outputs in a transaction that is rolled back, and returns the store's rejection, if any."""
    locator: MessageLocator = MessageLocator()

    def treatments(self, committed: DataFrame, kept: Collection[str], problem: RejectedRow) -> Treatments:
        """Return the messages that the store rejects, with the treatment of each by the policy.

        `problem` is the rejection of all messages together. Columns in `kept` are never set to null. Raises
        RejectedRow, with the location, for a message that the policy forbids, and `problem` if no single message causes
        it.
        """
        locations = self._locations_in(committed)

        def attempt(left_out: Collection[int], until: int) -> RejectedRow | None:
            frame = committed if until == len(locations) else self._before(committed, locations[until])
            return self._rejection(treated(frame, {locations[number]: None for number in left_out}, self.locator))

        fails = self.misfits is MisfitPolicy.FAIL
        try:
            found = find_rejected(len(locations), attempt, problem, _FOUND_BEFORE_FAILING if fails else MAX_REJECTED)
        except TooManyRejected as many:
            found = many.found
            if not fails:
                first, kind = min(found), "rows" if self.locator.are_rows else "messages"
                raise self.locator.error(
                    RejectedRow(
                        f"{found[first].problem}. More than {len(found)} {kind} of one transaction are rejected. "
                        f"Correct the table or the application, or {self.locator.fewer} to have all of them treated"
                    ),
                    locations[first],
                ) from None
        if fails:
            raise self.locator.error(found[min(found)], locations[min(found)])
        rejected = {locations[number]: problem for number, problem in sorted(found.items())}
        nulls = self.misfits is MisfitPolicy.NULLS
        treatments = self._nulls(committed, kept, rejected) if nulls else dict.fromkeys(rejected)
        for location, each in list(rejected.items())[:_MAX_LOGGED]:
            _log.warning(
                "consumer.row_rejected",
                consumer=self.consumer,
                journal=location.journal,
                offset=location.offset,
                problem=each.problem,
                nulls=sorted(treatments[location] or ()),
                rejected=len(rejected),
            )
        return treatments

    def _nulls(
        self, committed: DataFrame, kept: Collection[str], rejected: Mapping[MessageLocation, RejectedRow]
    ) -> Treatments:
        """Return the columns to set to null in each rejected message. Raises RejectedRow if nulls are rejected, too."""
        columns = [name for name in committed.columns if name not in kept]
        treatments: Treatments = dict.fromkeys(rejected)
        for location, problem in rejected.items():

            def attempt(nulls: Collection[str], location: MessageLocation = location) -> RejectedRow | None:
                return self._rejection(treated(committed, {**treatments, location: frozenset(nulls)}, self.locator))

            nulls = find_nulls(columns, attempt)
            if nulls is None:
                raise self.locator.error(problem, location)
            treatments[location] = nulls
        return treatments

    def _rejection(self, committed: DataFrame) -> RejectedRow | None:
        outputs = self.outputs(committed)
        return self.reject(Outputs(outputs.tables, (), outputs.sql))

    def _locations_in(self, committed: DataFrame) -> list[MessageLocation]:
        """Return the distinct locations of messages, in order."""
        journal, offset = self.locator.journal, self.locator.offset
        table = committed.select(column_named(journal).alias(_JOURNAL), column_named(offset).alias(_OFFSET)).toArrow()
        table = table.group_by([_JOURNAL, _OFFSET]).aggregate([])
        table = table.sort_by([(_JOURNAL, "ascending"), (_OFFSET, "ascending")]).select([_JOURNAL, _OFFSET])
        journals, offsets = (column.to_pylist() for column in table.columns)
        return [MessageLocation(*each) for each in zip(journals, offsets, strict=True)]

    def _before(self, committed: DataFrame, location: MessageLocation) -> DataFrame:
        journal, offset = column_named(self.locator.journal), column_named(self.locator.offset)
        return committed.where(
            (journal < location.journal) | ((journal == location.journal) & (offset < location.offset))
        )


def treated(frame: DataFrame, treatments: Treatments, locator: MessageLocator) -> DataFrame:
    """Return messages with treatments applied: some are left out, and columns of others are set to null."""
    if not treatments:
        return frame
    joined = _marked(frame, treatments, locator).where(F.col(_MARK).isNull() | F.col(_NULLS).isNotNull())
    nulled = {name for each in treatments.values() for name in each or ()}
    return joined.select(
        *(
            F.when(F.array_contains(_NULLS, name), F.lit(None)).otherwise(column_named(name)).alias(name)
            if name in nulled
            else column_named(name)
            for name in frame.columns
        )
    )


def left_out(frame: DataFrame, treatments: Treatments, locator: MessageLocator, columns: Collection[str]) -> DataFrame:
    """Return the left-out messages as dead letters, with the given columns of their rows as JSON."""
    row = F.to_json(F.struct(*(column_named(name) for name in columns)), {"ignoreNullFields": "false"})
    lines = F.array_join(F.sort_array(F.collect_list(row)), "\n")
    letters = _marked(frame, treatments, locator).where(F.col(_MARK) & F.col(_NULLS).isNull())
    found = letters.groupBy(F.col(_JOURNAL).alias("journal"), F.col(_OFFSET).alias("offset"))
    return found.agg(F.encode(lines, "UTF-8").alias("line"))


def without_rejected(read: Input, rejections: Rejections, problem: RejectedRow) -> Input:
    """Return an input without the messages that the store rejects, or with nulls in them, as the policy decides.

    Raises RejectedRow for a message that the policy forbids.
    """
    if read.batch:
        return _batch_without_rejected(read, rejections, problem)
    treatments = rejections.treatments(read.committed, read.required.union(METADATA), problem)
    gone = sorted(location for location, nulls in treatments.items() if nulls is None)
    dead = read.dead
    if gone:
        journals, offsets = zip(*gone, strict=True)
        assert read.lines_at is not None  # An input with rejected rows can always be read again.
        lines = pa.array(read.lines_at(gone), pa.binary())
        rows = pa.table({"journal": pa.array(journals), "offset": pa.array(offsets, pa.int64()), "line": lines})
        found = read.committed.sparkSession.createDataFrame(rows).select(*COLUMNS)
        dead = found if dead is None else dead.select(*COLUMNS).unionAll(found)
    return replace(
        read,
        committed=treated(read.committed, treatments, rejections.locator),
        messages=read.messages - len(gone),
        is_empty=read.messages == len(gone),
        misfits=read.misfits + len(treatments),
        dead=dead,
    )


def _marked(frame: DataFrame, treatments: Treatments, locator: MessageLocator) -> DataFrame:
    """Join messages with their treatments, in the columns `_MARK` and `_NULLS`."""
    marks = frame.sparkSession.createDataFrame(
        pa.table(
            {
                _JOURNAL: pa.array([location.journal for location in treatments], pa.string()),
                _OFFSET: pa.array([location.offset for location in treatments], pa.int64()),
                _NULLS: pa.array(
                    [None if each is None else sorted(each) for each in treatments.values()], pa.list_(pa.string())
                ),
                _MARK: pa.array([True] * len(treatments)),
            }
        )
    )
    same = (column_named(locator.journal) == F.col(_JOURNAL)) & (column_named(locator.offset) == F.col(_OFFSET))
    return frame.join(F.broadcast(marks), same, "left")


_FEWER: Final = "have the source plan smaller batches"
_PARSED: Final = MessageLocator(fewer=_FEWER)
_UNPARSED: Final = MessageLocator("journal", "offset", fewer=_FEWER)
_UNPARSED_ONLY: Final = "next_offset"
"""A column that only unparsed reads of journals have. Other sources may have columns `journal` and `offset`, too."""
_NUMBERED: Final = MessageLocator("_coranto_batch", "_coranto_row", are_rows=True, fewer=_FEWER)
_PART, _SHIFT = "_coranto_part", "_coranto_shift"
_ROW_BITS: Final = 33
"""The bits of `monotonically_increasing_id` below the partition number."""


def _batch_without_rejected(read: Input, rejections: Rejections, problem: RejectedRow) -> Input:
    batch = read.committed
    columns = batch.columns
    if len({each.lower() for each in columns}) < len(columns):
        raise problem  # Column names are ambiguous.
    locator = _locator_of(batch)
    if locator is _NUMBERED:
        batch = _numbered(batch).withColumn(locator.journal, F.lit(read.batch))
    kept = {
        locator.journal,
        locator.offset,
        *METADATA,
        *(each.name for each in batch.schema if not each.nullable),
    }

    def made(rows: DataFrame) -> Outputs:
        return rejections.outputs(rows.select(*map(column_named, columns)))

    found = replace(rejections, outputs=made, locator=locator).treatments(batch, kept, problem)
    dead = left_out(batch, found, locator, columns) if None in found.values() else None
    committed = treated(batch, found, locator).select(*map(column_named, columns))
    return replace(read, committed=committed, dead=dead, misfits=len(found))


def _locator_of(batch: DataFrame) -> MessageLocator:
    """Return the columns with the locations of the batch's messages, or `_NUMBERED` if rows have to be numbered."""
    types: dict[str, DataType] = {each.name: each.dataType for each in batch.schema}
    for locator in (_PARSED, _UNPARSED):
        if locator is _UNPARSED and not isinstance(types.get(_UNPARSED_ONLY), LongType):
            continue
        if isinstance(types.get(locator.journal), StringType) and isinstance(types.get(locator.offset), LongType):
            unknown = F.col(locator.journal).isNull() | F.col(locator.offset).isNull()
            return locator if batch.where(unknown).isEmpty() else _NUMBERED
    return _NUMBERED


def _numbered(batch: DataFrame) -> DataFrame:
    """Number the rows of a batch from 0. The executors keep the result, so that it is not evaluated again."""
    number, part = F.col(_NUMBERED.offset), F.shiftright(_NUMBERED.offset, _ROW_BITS)
    kept = batch.withColumn(_NUMBERED.offset, F.monotonically_increasing_id()).localCheckpoint()
    counts = sorted((row[0], row[1]) for row in kept.groupBy(part).count().collect())
    before = accumulate((count for _, count in counts), initial=0)
    begins = [(each, begin - (each << _ROW_BITS)) for (each, _), begin in zip(counts, before, strict=False)]
    shifts = F.broadcast(batch.sparkSession.createDataFrame(begins, f"{_PART} BIGINT, {_SHIFT} BIGINT"))
    shifted = kept.join(shifts, part == F.col(_PART)).withColumn(_NUMBERED.offset, number + F.col(_SHIFT))
    return shifted.drop(_PART, _SHIFT)
