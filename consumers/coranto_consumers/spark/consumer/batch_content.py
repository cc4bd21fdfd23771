"""The content of a batch of a streaming query: the offsets of its sources, and the names of files.

A number alone does not identify a batch: a query whose checkpoint was restored, or lost its last files in a crash,
plans its last batches again, possibly with other content. If Spark only repeats a batch, it uses the recorded offsets,
so equal records mean equal content. Spark's file source needs the names of files, because its offsets are positions in
its own list of files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from coranto.errors import CorruptData, InvalidInput

_MAX_TEXT: Final = 32 << 10
"""The maximum length of a batch's record in characters. A longer record omits the files, or files and offsets."""
_FILE_OFFSET: Final = "logOffset"
_QUERY: Final = "sql.streaming.queryId"
_ENDING_TRIGGERS: Final = frozenset({"AvailableNowTrigger", "OneTimeTrigger"})
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class BatchContent:
    """The content of a batch: the begin and end offsets of each source, and the names of files."""

    begin: tuple[Any, ...]
    end: tuple[Any, ...]
    files: tuple[str, ...] = ()
    digest: str | None = None
    """The digest of the offsets and files in a record, which may omit these. None for content without a record."""

    def to_text(self) -> str:
        digest = self.digest or self._digest()
        for kept in (
            {"begin": self.begin, "end": self.end, "files": self.files},
            {"begin": self.begin, "end": self.end},
            {},
        ):
            text = json.dumps({**kept, "digest": digest}, separators=(",", ":"))
            if len(text) <= _MAX_TEXT:
                break
        return text

    @classmethod
    def from_text(cls, text: str) -> BatchContent:
        """Parse a record. Raises CorruptData."""
        try:
            found = json.loads(text)
            begin, end, files = (tuple(found.get(name, ())) for name in ("begin", "end", "files"))
            return cls(begin, end, files, str(found["digest"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptData(f"{text[:100]!r} is not the record of a batch: {error}") from error

    def is_same(self, other: BatchContent) -> bool:
        return (self.digest or self._digest()) == (other.digest or other._digest())

    def _digest(self) -> str:
        text = json.dumps([self.begin, self.end, self.files], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class BatchDifference:
    lost: tuple[str, ...] = field(default=())
    """Content of the batch that is not committed. It is lost if the batch is skipped."""
    twice: tuple[str, ...] = field(default=())
    """Committed content that is not in the batch. The following batches contain it again."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.twice)

    def __str__(self) -> str:
        parts = [f"skipping it loses {_some(self.lost)}"] if self.lost else []
        parts += [f"the batches after it repeat {_some(self.twice)}"] if self.twice else []
        return "; ".join(parts) or "its offsets do not show what skipping it loses"


def difference(now: BatchContent, committed: BatchContent, batches: int = 1) -> BatchDifference:
    """Compare a batch with the last committed batch. `batches` is the number of committed batches from this one on.

    If it is more than 1, the following batches, which are skipped as well, may have the content that this batch lacks.
    This batch may also have files of earlier committed batches, which are not recorded.
    """
    lost, twice = [], []
    for source, (begin, end) in enumerate(zip(now.begin, now.end, strict=True)):
        known = committed.end[source] if source < len(committed.end) else None
        if _is_of_files(end):
            continue
        begins, ends, before = (dict(_numbers(each)) for each in (begin, end, known))
        for name, to in ends.items():
            done = before.get(name, 0)
            place = name or f"source {source}"
            if (at := max(begins.get(name, 0), done)) < to:
                lost.append(f"{place} [{at}, {to})")
            if to < done and batches == 1:
                twice.append(f"{place} [{to}, {done})")
    unsure = " (unless a batch before the last committed one had it)" if batches > 1 else ""
    lost += [f"{each}{unsure}" for each in now.files if each not in set(committed.files)]
    twice += [each for each in committed.files if each not in set(now.files)] if now.begin == committed.begin else []
    return BatchDifference(tuple(lost), tuple(twice))


def ends_of(content: BatchContent) -> str:
    """Format the end offsets of a batch. Returns an empty text if the batch has only files or a digest."""
    return _some(
        tuple(
            f"{name or f'source {source}'} {to}"
            for source, end in enumerate(content.end)
            if not _is_of_files(end)
            for name, to in _numbers(end)
        )
    )


def older_checkpoint(number: int, batches: int, known: str, found: BatchDifference, last: BatchContent | None) -> str:
    """Return the error message for a query whose checkpoint is `batches` batches older than the store."""
    end = number + batches - 1
    what = f"with other content, and is the last one there: the query's checkpoint is {batches} batch"
    then = f"{found}"
    if batches > 1:
        what = f"and so are those up to {end}: the query's checkpoint is {batches} batches"
        then = (
            f"the batches {number} to {end}, as it plans them now, are all skipped; of batch {number}, "
            f"{found if found else 'no offset shows a loss'}; committed content that comes in batch {end + 1} or "
            "later counts twice"
        )
    at = ends_of(last) if last is not None else ""
    return (
        f"batch {number} of {known} {what} older than the store, as after a restoration or a crash of the machine. "
        f"If the query continues: {then}. Restore the newer checkpoint, or the store of the same time; or start a "
        f"query with a new name and a new checkpoint that begins where the committed batches end"
        f"{f' ({at})' if at else ''}. With fail_on_data_loss=False the query continues, and logs the loss"
    )


@dataclass(frozen=True, slots=True)
class RunningQuery:
    """The query that calls the function of `foreachBatch`. Use it in the driver, while a batch runs."""

    id: str
    ends_by_itself: bool
    """True for a query that ends after it has processed the data that was present at its start."""
    _session: SparkSession
    _execution: Any

    @classmethod
    def of(cls, batch: DataFrame) -> RunningQuery:
        """Return the query that runs a batch. Raises InvalidInput."""
        session = batch.sparkSession
        try:
            found = session.sparkContext.getLocalProperty(_QUERY)
        except PySparkException as error:
            raise InvalidInput("exactly_once needs a session that is not of Spark Connect") from error
        if not found:
            raise InvalidInput("there is no query: call this from foreachBatch only")
        jvm: Any = session._jvm
        try:
            running = session._jsparkSession.sharedState().activeStreamingQueries()
            execution = running.get(jvm.java.util.UUID.fromString(found))
            ends_by_itself = str(execution.trigger().toString()) in _ENDING_TRIGGERS
        except (Py4JError, AttributeError) as error:
            raise _unreadable(f"query {found}", error) from error
        return cls(found, ends_by_itself, session, execution)

    def is_stopped(self) -> bool:
        return not self._execution.isActive()

    def content_of_batch(self, number: int) -> BatchContent:
        """Return the content of the running batch. Raises InvalidInput."""
        try:
            log = self._execution.offsetLog()
            end = _offsets(log.get(number))
            begin = _offsets(log.get(number - 1)) if number else ()
            begin += (None,) * (len(end) - len(begin))
            files = tuple(
                name
                for source, offset in enumerate(end)
                if _is_of_files(offset)
                for name in _files(self._session, self._execution, source, begin[source], offset)
            )
        except (Py4JError, AttributeError, ValueError) as error:
            raise _unreadable(f"the offsets of batch {number}", error) from error
        return BatchContent(begin, end, files)


def _unreadable(what: str, error: Exception) -> InvalidInput:
    return InvalidInput(
        f"{what} could not be read: {error}. exactly_once needs a version of Spark that it is tested with "
        "(docs/spark.md)"
    )


def _offsets(logged: Any) -> tuple[Any, ...]:
    """Return the offsets of the sources in a record of Spark's offset log; None for a source without data yet."""
    if not logged.isDefined():
        return ()
    offsets = logged.get().offsets()
    found = (offsets.apply(at) for at in range(offsets.size()))
    return tuple(json.loads(each.get().json()) if each.isDefined() else None for each in found)


def _files(session: SparkSession, execution: Any, source: int, begin: Any, end: Any) -> Iterator[str]:
    """Yield the names and modification times of a batch's files, from the log of Spark's file source."""
    after = begin[_FILE_OFFSET] if _is_of_files(begin) else -1
    jvm: Any = session._jvm
    for number in range(after + 1, end[_FILE_OFFSET] + 1):
        for name in (f"{number}", f"{number}.compact"):
            path = jvm.org.apache.hadoop.fs.Path(execution.resolvedCheckpointRoot(), f"sources/{source}/{name}")
            system = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
            if system.exists(path):
                opened = system.open(path)
                try:
                    text = jvm.org.apache.commons.io.IOUtils.toString(opened, "UTF-8")
                finally:
                    opened.close()
                entries = [each for each in map(json.loads, text.splitlines()[1:]) if each["batchId"] == number]
                yield from sorted(f"{each['path']} of {each['timestamp']}" for each in entries)
                break


def _is_of_files(offset: Any) -> bool:
    return isinstance(offset, Mapping) and offset.keys() == {_FILE_OFFSET}


def _numbers(value: Any, name: str | None = None) -> Iterator[tuple[str | None, int]]:
    """Yield the integers in a source's offset, with their JSON paths, if any. A journal position yields one offset."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, Mapping):
        if "offset" in value:
            yield from _numbers(value["offset"], name)
            return
        for key, each in value.items():
            yield from _numbers(each, f"{name}/{key}" if name else str(key))


def _some(texts: tuple[str, ...]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
