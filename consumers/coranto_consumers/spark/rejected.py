"""Messages of a transaction whose rows the store rejects: they are found, and treated as the consumer's `misfits` say.

A database reports that it rejects a row of a transaction, but not the message that the row comes from. So parts
of the transaction are tried, in transactions of the store that are rolled back (`outputs.rejections`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import pyarrow as pa
import structlog
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from coranto.errors import RejectedRow
from coranto_consumers.outputs.dead_letters import COLUMNS, DeadLetters, MisfitPolicy
from coranto_consumers.outputs.rejections import MOST_REJECTED, TooManyRejected, find_nulls, find_rejected
from coranto_consumers.spark.application import Application, Outputs
from coranto_consumers.spark.frames import METADATA
from coranto_consumers.spark.inputs import Input

_MOST_TOLD: Final = 10
_LOOKED_FOR_TO_FAIL: Final = 8
"""The rejected messages that are looked for to name one: the first may be taken with those after it."""
_JOURNAL, _OFFSET, _NULLS, _MARK = (f"_coranto_{name}" for name in ("journal", "offset", "nulls", "mark"))

_log = structlog.get_logger(__name__)


class MessagePlace(NamedTuple):
    """The place of a message."""

    journal: str
    offset: int


Treatment = frozenset[str] | None
"""The columns of a message that are null instead. None: the message is left out."""


@dataclass(frozen=True, slots=True)
class Rejections:
    """Treats what a store rejects of one consumer's transactions."""

    application: Application
    misfits: MisfitPolicy | DeadLetters
    reject: Callable[[Outputs], RejectedRow | None]
    """Writes outputs in a transaction that is rolled back, and returns what the store rejects of them."""

    def settled(self, read: Input, problem: RejectedRow) -> Input:
        """Return an input without the rows that the store rejects: as misfits of the policy, or with nulls.

        `problem` is what the store rejected of the input. Raises RejectedRow, with journal and offset, for a message
        that the policy does not let pass, and `problem` if no message is to blame.
        """
        places = _places(read.committed)

        def attempt(left_out: Collection[int], until: int) -> RejectedRow | None:
            frame = read.committed if until == len(places) else _before(read.committed, places[until])
            return self._rejection(treated(frame, {places[number]: None for number in left_out}))

        fails = self.misfits is MisfitPolicy.FAIL
        try:
            found = find_rejected(len(places), attempt, problem, _LOOKED_FOR_TO_FAIL if fails else MOST_REJECTED)
        except TooManyRejected as many:
            found = many.found
            if not fails:
                first = _first(places, found)
                raise RejectedRow(
                    f"{first.problem}. More than {len(found)} messages of one transaction are rejected. Correct the "
                    "table or the application, or set a smaller max_transaction_bytes to have all of them treated",
                    journal=first.journal,
                    offset=first.offset,
                ) from None
        if fails:
            raise _first(places, found)
        rejected = {places[number]: problem for number, problem in sorted(found.items())}
        nulls = self.misfits is MisfitPolicy.NULLS
        treatments = self._nulls(read, rejected) if nulls else dict.fromkeys(rejected)
        for place, each in list(rejected.items())[:_MOST_TOLD]:
            _log.warning(
                "consumer.row_rejected",
                consumer=self.application.name,
                journal=place.journal,
                offset=place.offset,
                problem=each.problem,
                nulls=sorted(treatments[place] or ()),
                rejected=len(rejected),
            )
        return _with(read, treatments)

    def _nulls(self, read: Input, rejected: Mapping[MessagePlace, RejectedRow]) -> dict[MessagePlace, Treatment]:
        """Return the columns of rejected messages that have to be null. Raises RejectedRow if that does not do."""
        columns = [name for name in read.committed.columns if name not in METADATA and name not in read.required]
        treatments: dict[MessagePlace, Treatment] = dict.fromkeys(rejected)
        for place, problem in rejected.items():

            def attempt(nulls: Collection[str], place: MessagePlace = place) -> RejectedRow | None:
                return self._rejection(treated(read.committed, {**treatments, place: frozenset(nulls)}))

            nulls = find_nulls(columns, attempt)
            if nulls is None:
                raise problem.at(*place)
            treatments[place] = nulls
        return treatments

    def _rejection(self, committed: DataFrame) -> RejectedRow | None:
        outputs = self.application.outputs(committed)
        return self.reject(Outputs(outputs.tables, (), outputs.sql))


def treated(frame: DataFrame, treatments: Mapping[MessagePlace, Treatment]) -> DataFrame:
    """Return messages without the left-out ones, and with nulls in others."""
    if not treatments:
        return frame
    marks = frame.sparkSession.createDataFrame(
        pa.table(
            {
                _JOURNAL: pa.array([place.journal for place in treatments], pa.string()),
                _OFFSET: pa.array([place.offset for place in treatments], pa.int64()),
                _NULLS: pa.array(
                    [None if each is None else sorted(each) for each in treatments.values()], pa.list_(pa.string())
                ),
                _MARK: pa.array([True] * len(treatments)),
            }
        )
    )
    same = (F.col("_journal") == F.col(_JOURNAL)) & (F.col("_offset") == F.col(_OFFSET))
    joined = frame.join(F.broadcast(marks), same, "left").where(F.col(_MARK).isNull() | F.col(_NULLS).isNotNull())
    nulled = {name for each in treatments.values() for name in each or ()}
    return joined.select(
        *(
            F.when(F.array_contains(_NULLS, name), F.lit(None)).otherwise(_column(name)).alias(name)
            if name in nulled
            else _column(name)
            for name in frame.columns
        )
    )


def _with(read: Input, treatments: Mapping[MessagePlace, Treatment]) -> Input:
    left_out = sorted(place for place, nulls in treatments.items() if nulls is None)
    dead = read.dead
    if left_out:
        journals, offsets = zip(*left_out, strict=True)
        assert read.lines_at is not None  # Every read can read again.
        lines = pa.array(read.lines_at(left_out), pa.binary())
        rows = pa.table({"journal": pa.array(journals), "offset": pa.array(offsets, pa.int64()), "line": lines})
        found = read.committed.sparkSession.createDataFrame(rows).select(*COLUMNS)
        dead = found if dead is None else dead.select(*COLUMNS).unionAll(found)
    return replace(
        read,
        committed=treated(read.committed, treatments),
        messages=read.messages - len(left_out),
        misfits=read.misfits + len(treatments),
        dead=dead,
        packed=None,
    )


def _first(places: list[MessagePlace], found: Mapping[int, RejectedRow]) -> RejectedRow:
    number = min(found)
    return found[number].at(*places[number])


def _places(committed: DataFrame) -> list[MessagePlace]:
    """Return the places of messages, in order."""
    table = (
        committed.select("_journal", "_offset").toArrow().sort_by([("_journal", "ascending"), ("_offset", "ascending")])
    )
    return [MessagePlace(*each) for each in zip(table.column(0).to_pylist(), table.column(1).to_pylist(), strict=True)]


def _before(committed: DataFrame, place: MessagePlace) -> DataFrame:
    """Return the messages that are before one, by journal and offset."""
    journal, offset = F.col("_journal"), F.col("_offset")
    return committed.where((journal < place.journal) | ((journal == place.journal) & (offset < place.offset)))


def _column(name: str) -> Any:
    return F.col(f"`{name.replace('`', '``')}`")
