"""Planning of a read: the ranges of its journals, and the tasks that read them.

Spark pushes a query's filters to a source only if `spark.sql.python.filterPushdown.enabled` is set. Filters limit the
necessary journals, offsets and times. Spark applies filters to the rows again, so an unsupported filter only costs
time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from coranto.client import JournalInfo, Moment, SyncJournalClient
from coranto.client.moments import LARGEST_SKEW_SECONDS
from coranto.errors import InvalidInput, JournalRecreated
from coranto.journal_ids import is_same
from coranto.labels import label_selector
from coranto.messages.columnar import Int64s, Mask, UInt64s
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import clock_to_ns
from coranto.offsets import id_of
from coranto_consumers.journals.discovery import ContentExtent, Extents, contents, cuts_of, wait_until_sealed
from coranto_consumers.journals.losses import LostContent, log_loss, loss_by_offsets
from coranto_consumers.journals.ranges import WORTHWHILE_BYTES, NumberedRange, Range, share, split
from coranto_consumers.spark.options.bounds import EARLIEST, LATEST, TimeSpan
from coranto_consumers.spark.options.source_options import Isolation, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

_SAMPLE_BYTES: Final = 64 << 10
_ADVICE: Final = (
    "Give offsets of the current journal. If the current journal has the same content up to the offset, give the "
    "offset as a number. With failOnDataLoss=false, a read from such an offset begins at the current journal's "
    "beginning, and a read up to such an offset reads nothing."
)
_MOST: Final = (1 << 63) - 1
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], object]]] = {
    "EqualTo": operator.eq,
    "EqualNullSafe": operator.eq,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "StringStartsWith": str.startswith,
    "StringEndsWith": str.endswith,
    "StringContains": operator.contains,
}
"""Comparisons by the name of the filter's class, because PySpark before 4.1 lacks these classes."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range of a column's values, from `least` to `most`, both inclusive."""

    least: int = -_MOST - 1
    most: int = _MOST

    def within(self, least: int, most: int) -> Bounds:
        return Bounds(max(self.least, least), min(self.most, most))

    def mask(self, values: Int64s) -> Mask:
        mask: Mask = (values >= self.least) & (values <= self.most)
        return mask


@dataclass(frozen=True, slots=True)
class FilterBounds:
    """Bounds of the rows that may pass a query's filters."""

    journals: tuple[Filter, ...] = ()
    """Filters on the names of journals."""
    offsets: Bounds = Bounds()
    clocks: Bounds = Bounds()

    @classmethod
    def of(cls, filters: Iterable[Filter], own: Mapping[str, str]) -> FilterBounds:
        """Return the bounds of rows that pass all `filters`. `own` maps columns to the source's fields."""
        found = cls()
        for each in filters:
            path: tuple[str, ...] = getattr(getattr(each, "child", each), "attribute", ())
            field = own.get(path[0]) if len(path) == 1 else None
            if field == "journal" and _of_name(each, "") is not None:
                found = replace(found, journals=(*found.journals, each))
            elif field == "offset":
                found = replace(found, offsets=_narrowed(found.offsets, each))
            elif field == "clock":
                found = replace(found, clocks=_narrowed(found.clocks, each))
        return found

    def may_match(self, journal: str) -> bool:
        """Return True if rows of a journal may pass the filters."""
        return all(_of_name(each, journal) for each in self.journals)

    @property
    def since(self) -> int | None:
        """The time in milliseconds since 1970 UTC, minus an hour of clock skew. No earlier content passes filters."""
        if self.clocks.least <= 0:
            return None
        return max(0, clock_to_ns(self.clocks.least) // 1_000_000 - LARGEST_SKEW_SECONDS * 1000)

    def mask(self, begins: Int64s, clocks: UInt64s) -> Mask:
        """Return the mask of messages that may pass the filters, by their offsets and clocks."""
        return self.offsets.mask(begins) & self.clocks.mask(clocks.view(np.int64))


def _narrowed(bounds: Bounds, each: Filter) -> Bounds:
    """Narrow the bounds of an integer column by a filter."""
    match type(each).__name__, getattr(each, "value", None):
        case "EqualTo" | "EqualNullSafe", int(value):
            return bounds.within(value, value)
        case "GreaterThan", int(value):
            return bounds.within(value + 1, _MOST)
        case "GreaterThanOrEqual", int(value):
            return bounds.within(value, _MOST)
        case "LessThan", int(value):
            return bounds.within(-_MOST - 1, value - 1)
        case "LessThanOrEqual", int(value):
            return bounds.within(-_MOST - 1, value)
        case "In", [*values]:
            numbers = [value for value in values if isinstance(value, int)]
            return bounds.within(min(numbers), max(numbers)) if len(numbers) == len(values) and numbers else bounds
    return bounds


def _of_name(each: Any, name: str) -> bool | None:
    """Return True if a name passes a filter, False if not, and None for an unsupported filter."""
    match type(each).__name__, getattr(each, "value", None):
        case "In", [*values] if all(isinstance(value, str) for value in values):
            return name in values
        case "IsNotNull" | "IsNull" as kind, _:
            return kind == "IsNotNull"
        case "Not", _:
            inner = _of_name(each.child, name)
            return None if inner is None else not inner
        case kind, str(value) if kind in _COMPARISONS:
            return bool(_COMPARISONS[kind](name, value))
    return None


class Shares(NamedTuple):
    ranges: Mapping[str, Sequence[Range]]
    """The ranges of each journal, in order, for committed reads: a task needs all ranges of its journals."""
    of_tasks: Sequence[tuple[NumberedRange, ...]]
    """The ranges that each task reads. A journal's ranges are numbered from 0."""


def plan_read(
    client: SyncJournalClient, options: SourceOptions, filter_bounds: FilterBounds = FilterBounds()
) -> Shares:
    """Return the ranges that tasks read, without ranges that cannot have rows within `filter_bounds`.

    Raises InvalidInput for offsets that the journals do not have, StreamChanged for a stream whose split or merge does
    not end, and errors for lost content.
    """
    found = _contents(client, options)
    options = _at_moment(client, found, options)
    wholes = [
        _whole(client, journal, extent, options)
        for journal, extent in found.items()
        if filter_bounds.may_match(journal)
    ]
    wholes = [needed for whole in wholes if (needed := _needed(client, whole, options, filter_bounds)).length > 0]
    if not isinstance(options.framing, JsonLines):
        return _unsplit(wholes, options)
    ranges = _split(client, wholes, options)
    parts = [part for found in ranges.values() for part in found]
    if len(parts) < options.min_partitions:
        even = max(1, sum(whole.length for whole in wholes) // options.min_partitions)
        ranges = {
            whole.journal: [each for part in ranges[whole.journal] for each in split(part, even)] for whole in wholes
        }
        parts = [part for found in ranges.values() for part in found]
    numbers = {part: NumberedRange(number, part) for found in ranges.values() for number, part in enumerate(found)}
    is_committed = options.isolation is Isolation.READ_COMMITTED
    if is_committed:
        # The committed rows of a part depend on all parts, but only these parts may have rows that pass.
        least, most = filter_bounds.offsets.least, filter_bounds.offsets.most
        parts = [part for part in parts if part.begin <= most and least < part.end]
    few = options.min_partitions > 1 or options.max_records is not None
    shares = [[part] for part in parts] if few else share(parts, min(WORTHWHILE_BYTES, options.max_bytes))
    return Shares(ranges if is_committed else {}, [tuple(numbers[part] for part in each) for each in shares])


def _contents(client: SyncJournalClient, options: SourceOptions) -> dict[str, ContentExtent]:
    """Return the extents of the journals.

    For a read up to the journals' ends, waits for splits and merges of streams, so that it has no event of a key
    without the earlier ones.
    """
    if options.ending is not None or options.as_of is not None:
        return contents(client, _journals(client, options))
    return wait_until_sealed(lambda: contents(client, _journals(client, options)), options.client.retry_timeout)


def _at_moment(client: SyncJournalClient, journals: Extents, options: SourceOptions) -> SourceOptions:
    """Replace `as_of` in options by the moment's offsets. Journals without one had no content. Raises ContentGone."""
    asked = options.as_of
    if asked is None:
        return options
    if isinstance(asked, Mapping):
        if unknown := sorted(set(asked) - set(journals)):
            raise InvalidInput(f"names {', '.join(unknown)}, which is not read", field="option asOf")
        ends = {journal: asked.get(journal, 0) for journal in journals}
    else:
        ends = dict(client.moment(label_selector(include=[("name", journal) for journal in journals]), asked).ends)
    given = options.starting or {}
    firsts = {journal: extent.segment.begin if extent.segment else 0 for journal, extent in journals.items()}
    begins = {
        journal: min(start if (start := given.get(journal, EARLIEST)) >= 0 else first, ends[journal])
        for journal, first in firsts.items()
    }
    if options.fail_on_data_loss:
        client.require_content(Moment(ends, begins))
    return replace(options, starting=begins, ending=ends, as_of=None)


def _unsplit(wholes: Sequence[Range], options: SourceOptions) -> Shares:
    """Return the shares for messages that are not lines: one task per journal."""
    for given, name in ((options.min_partitions > 1, "minPartitions"), (options.max_records, "maxRecordsPerPartition")):
        if given:
            raise InvalidInput(
                "only journals of lines can be read by several tasks: leave the option out to use one task per journal",
                field=f"option {name}",
            )
    return Shares({whole.journal: [whole] for whole in wholes}, [(NumberedRange(0, whole),) for whole in wholes])


def _journals(client: SyncJournalClient, options: SourceOptions) -> tuple[JournalInfo, ...]:
    listed = options.selected.list(client, options.labels)
    journals = [info.name for info in listed]
    for name, offsets in (("startingOffsets", options.starting), ("endingOffsets", options.ending)):
        if offsets is not None and set(offsets) != set(journals):
            raise InvalidInput(
                f"must name exactly the journals that are read: {', '.join(journals)}", field=f"option {name}"
            )
    return listed


def _whole(client: SyncJournalClient, journal: str, extent: ContentExtent, options: SourceOptions) -> Range:
    start = EARLIEST if options.starting is None else options.starting[journal]
    end = LATEST if options.ending is None else options.ending[journal]
    if start == EARLIEST:
        start = options.times.span(journal).first_offset(client, journal, extent.begin, extent.head)
    end = extent.head if end == LATEST else end
    start, end = _of_present(journal, start, end, extent, options)
    lost = _lost(journal, start, end, extent)
    if lost is not None and options.fail_on_data_loss and not lost.recreated:
        raise lost.error("")
    if lost is not None and not options.fail_on_data_loss:
        log_loss(lost)
        start = min(max(start, extent.begin), extent.head) if not lost.recreated else extent.begin
        end = max(start, min(end, extent.head))
    if not start <= end <= extent.head:
        raise InvalidInput(
            f"[{start}, {end}) is not a range of {journal}, whose head is {extent.head}; give offsets from 0 to that, "
            "or set failOnDataLoss to false",
            field="options",
        )
    # If a user's offset is within a line, reading begins with the next line.
    return Range(journal, start, end, extent.head, aligned=start <= extent.begin, journal_id=extent.journal_id)


def _of_present(journal: str, start: int, end: int, extent: ContentExtent, options: SourceOptions) -> tuple[int, int]:
    """Return the range to read of the current journal. The offsets may belong to an earlier journal of the same name.

    If `start` does, it becomes the current journal's begin, or the offset that its head was reset to. If `end` does,
    nothing is read, because that content is gone. Raises JournalRecreated if lost content is an error.
    """
    found = extent.journal_id
    of_earlier = [at for at in (start, end) if not is_same(id_of(at), at, found)]
    if not of_earlier:
        return start, end
    at = of_earlier[-1]
    if options.fail_on_data_loss:
        raise JournalRecreated(journal, at, id_of(at), found, extent.head, _ADVICE)
    if at is end:
        log_loss(LostContent(journal, start, end, known=id_of(end), found=found))
        return extent.begin, extent.begin
    lost = LostContent(journal, start, extent.head, recreated=True, known=id_of(start), found=found)
    log_loss(lost)
    return max(extent.begin, lost.same_through), min(end, extent.head)


def _needed(client: SyncJournalClient, whole: Range, options: SourceOptions, filter_bounds: FilterBounds) -> Range:
    begin, end = whole.begin, whole.end
    if filter_bounds.since is not None:
        begin = TimeSpan(filter_bounds.since).first_offset(client, whole.journal, begin, end)
    if options.isolation is Isolation.READ_UNCOMMITTED:
        end = min(end, filter_bounds.offsets.most + 1)
        if isinstance(options.framing, JsonLines):  # Other messages may begin anywhere.
            begin = max(begin, filter_bounds.offsets.least)
    return replace(whole, begin=begin, end=end, aligned=whole.aligned and begin == whole.begin)


def _lost(journal: str, start: int, end: int, extent: ContentExtent) -> LostContent | None:
    if end < start <= extent.head:
        return None  # An empty range.
    lost = loss_by_offsets(journal, start, extent.begin, extent.head, is_end=extent.is_end)
    if lost is not None and not lost.recreated:
        return replace(lost, end=min(lost.end, end)) if start < end else None
    return lost or loss_by_offsets(journal, end, 0, extent.head, is_end=extent.is_end)


def _split(client: SyncJournalClient, wholes: Sequence[Range], options: SourceOptions) -> dict[str, list[Range]]:
    most = {
        whole.journal: min(options.max_bytes, options.max_records * _mean_length(client, whole))
        if options.max_records is not None
        else options.max_bytes
        for whole in wholes
    }
    # Small journals are not split, so the begins of their fragments are not needed.
    cuts = cuts_of(client, [whole.journal for whole in wholes if whole.length > most[whole.journal]])
    return {whole.journal: split(whole, most[whole.journal], cuts.get(whole.journal, ())) for whole in wholes}


def _mean_length(client: SyncJournalClient, whole: Range) -> int:
    end = min(whole.end, whole.begin + _SAMPLE_BYTES)
    sample = client.read_all(whole.journal, whole.begin, end)
    return max(1, len(sample) // max(1, sample.count(b"\n")))
