"""The input of one transaction. Ranges are read once, and then their committed messages are selected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from pyspark.sql.utils import is_remote

from coranto.client import ClientConfig
from coranto.messages.checkpoints import Source
from coranto.messages.framing import JsonLines
from coranto.messages.pruning import Pruning
from coranto.messages.skew import SkewWatch
from coranto_consumers.journals.framings import ReadFraming, as_tolerant
from coranto_consumers.journals.ranges import Cuts, Range, ReadPlan, States, plan_slices
from coranto_consumers.journals.reading import read_lines
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.spark.committed.scanning import RangeSummary, Summaries
from coranto_consumers.spark.committed.sequencing import (
    LongTransaction,
    SequencedRanges,
    Sources,
    find_long,
    sequence,
    sequence_part,
    warn_of_resets,
)
from coranto_consumers.spark.inputs.frames import (
    COMMITTED_AT,
    CheckedRows,
    PlannedRows,
    Routes,
    check_misfits,
    choose_committed,
    nothing_committed,
    parsed_values,
    planned_rows,
    sequenced_layout,
)
from coranto_consumers.spark.inputs.locality import FragmentLocality, executors_of
from coranto_consumers.spark.inputs.strategies import ExpectedRows, is_little, read_rows
from coranto_consumers.spark.options.source_options import zone_option
from coranto_consumers.spark.session.fetching import read_together, task_client
from coranto_consumers.spark.session.sessions import described
from coranto_consumers.spark.source.data_source import register

_SLICES_PER_CORE = 2


@dataclass(frozen=True, slots=True)
class Input:
    """The input of a transaction, while its context is open."""

    committed: DataFrame
    """The application's columns and metadata, persisted."""
    messages: int
    rows: int
    sources: dict[str, Source]
    is_empty: bool = False
    """True if there are no messages, so that the application is not called."""
    dead: DataFrame | None = None
    """Journal, offset and line of misfits that are not in `committed`, if any."""
    misfits: int = 0
    required: frozenset[str] = frozenset()
    lines_at: Callable[[Sequence[tuple[str, int]]], list[bytes]] | None = None
    """Reads the lines of messages again, by journal and offset."""
    batch: str = ""
    """The name of a batch of a query, in errors and dead letters. Empty for messages of journals."""
    record: str = ""
    """The content of a batch, as its checkpoint records it."""


@dataclass(frozen=True, slots=True)
class FoundLong:
    """The result of a read that found long transactions, to deliver in parts. The read rows must not be committed."""

    transactions: tuple[LongTransaction, ...]


class _Sequencing(NamedTuple):
    rows: DataFrame
    results: dict[str, SequencedRanges]
    summaries: Sequence[RangeSummary]


class InputReader:
    """Reads the inputs of transactions. `name` is the consumer's name, for descriptions of Spark jobs."""

    def __init__(
        self,
        spark: SparkSession,
        client: ClientConfig,
        schema: StructType,
        max_partition_bytes: int,
        *,
        misfits: MisfitPolicy = MisfitPolicy.FAIL,
        framing: ReadFraming | None = None,
        name: str = "journals",
    ) -> None:
        self.routes: Routes = {}
        self._name = name
        self._misfits = misfits
        register(spark)  # For executors that get Coranto from the session's archive.
        self._spark = spark
        self._commits = COMMITTED_AT in schema.names
        self._schema = StructType([field for field in schema.fields if field.name != COMMITTED_AT])
        self._required = frozenset(field.name for field in self._schema.fields if not field.nullable)
        zone = zone_option(str(spark.conf.get("spark.sql.session.timeZone")))
        framing = framing or JsonLines()
        self._layout = sequenced_layout(
            self._schema, framing if misfits is MisfitPolicy.FAIL else as_tolerant(framing), zone
        )
        self._client = client
        self._max_partition_bytes = max_partition_bytes
        self._skew: dict[str, SkewWatch] = {}
        self._locality = FragmentLocality()

    def nothing(self) -> DataFrame:
        return nothing_committed(self._spark, self._schema, commits=self._commits)

    @contextmanager
    def read(
        self,
        ranges: Sequence[Range],
        sources: Sources,
        cuts: Cuts,
        pruning: Pruning,
        max_replay_bytes: int | None = None,
    ) -> Iterator[Input | FoundLong]:
        """Read ranges that begin where `sources` end. `cuts` are offsets where splits are cheap.

        Yields FoundLong when more than `max_replay_bytes` of a journal would have to be read again. Raises CorruptData
        when a message is missing. Errors of tasks are Spark's errors.
        """
        with ExitStack() as kept:
            found = self._sequenced(kept, ranges, sources, cuts, pruning, max_replay_bytes)
            yield found if isinstance(found, FoundLong) else self._input_of(found, sources)

    @contextmanager
    def read_part(self, long: LongTransaction, sources: Sources, head: int, max_bytes: int) -> Iterator[Input]:
        """Read the due part of a long transaction, in a journal that ends at `head`. Raises as `read` does."""
        journal, source = long.journal, sources[long.journal]
        replay = {journal: {long.producer: source.producers[long.producer]}}
        with ExitStack() as kept:
            _, found = self._kept(kept, self._plan([long.acknowledgement(head)], {}))
            [acknowledgement] = found.values()
            plan = self._plan([long.part(source, max_bytes)], {}, first_number=1, replay=replay)
            rows, parts = self._kept(kept, plan)
            result = sequence_part(long, source, acknowledgement, parts)
            summaries = [summary._replace(rows=0) for summary in parts.values()]
            yield self._input_of(_Sequencing(rows, {journal: result}, summaries), sources)

    def expect(self, ranges: Sequence[Range], cuts: Cuts) -> ExpectedRows | None:
        """Return the messages of ranges as if all were committed. Write them, then `confirm`. None if impossible."""
        plan = self._plan(ranges, cuts)
        if self._commits or is_little(plan) or is_remote():
            return None
        return ExpectedRows(self._spark, self._planned(plan), self._schema)

    def confirm(self, expected: ExpectedRows, sources: Sources, pruning: Pruning) -> Input | None:
        """Return the input of expected messages that were written. None unless all of them fit and are committed."""
        summaries = expected.summaries()
        if summaries is None or any(summary.misfits for summary in summaries.values()):
            return None
        results = self._results(_by_journal(summaries), sources, pruning)
        decisions = [each for result in results.values() for each in result.decisions.values()]
        if any(each.limits for each in decisions):
            return None
        if any(each.replay is not None or each.messages is None for each in results.values()):
            return None
        self._watch(results, sources, pruning)
        messages = sum(result.messages or 0 for result in results.values())
        count = sum(summary.rows for summary in summaries.values())
        return self._input(CheckedRows(expected.committed, messages), count, _after(sources, results))

    def _input_of(self, read: _Sequencing, sources: Sources) -> Input:
        """Return the input from sequenced rows. Raises CorruptMessage for a misfit that ends the run."""
        results, summaries = read.results, read.summaries
        count = sum(summary.rows for summary in summaries)
        counts = [result.messages for result in results.values()]
        decisions = {number: each for result in results.values() for number, each in result.decisions.items()}
        chosen = choose_committed(self._spark, read.rows, decisions, commits=self._commits)
        if None in counts or any(summary.misfits for summary in summaries):
            with described(self._spark, f"{self._name}: counts committed messages and misfits"):
                checked = check_misfits(chosen, self._schema, self._misfits)
        else:
            checked = CheckedRows(parsed_values(chosen, self._schema), sum(each or 0 for each in counts))
        return self._input(checked, count, _after(sources, results))

    def _input(self, checked: CheckedRows, count: int, after: dict[str, Source]) -> Input:
        def lines_at(locations: Sequence[tuple[str, int]]) -> list[bytes]:
            ranges = [Range(journal, offset, offset + 1, after[journal].read_through) for journal, offset in locations]
            framing = self._layout.framing
            with task_client(self._client) as client, read_together(client, ranges, framing) as content:
                return [next(read_lines(content, each, framing)).values[0].as_py() for each in ranges]

        rows, messages, misfits, dead = checked
        return Input(rows, messages, count, after, not messages, dead, misfits, self._required, lines_at)

    def advance(self, ranges: Sequence[Range], sources: Sources, cuts: Cuts, pruning: Pruning) -> dict[str, Source]:
        """Read ranges as `read` does, but return only the states of sources after them."""
        with ExitStack() as kept:
            found = self._sequenced(kept, ranges, sources, cuts, pruning)
            assert isinstance(found, _Sequencing)  # Without a limit, there are no long transactions.
            return _after(sources, found.results)

    def _sequenced(
        self,
        kept: ExitStack,
        ranges: Sequence[Range],
        sources: Sources,
        cuts: Cuts,
        pruning: Pruning,
        max_replay_bytes: int | None = None,
    ) -> _Sequencing | FoundLong:
        """Read ranges, and earlier content that must be read again. Spark keeps the rows until `kept` closes."""
        rows, summaries = self._kept(kept, self._plan(ranges, cuts))
        parts = _by_journal(summaries)
        results = self._results(parts, sources, pruning)
        if max_replay_bytes is not None:
            found = (find_long(journal, sources[journal], each, max_replay_bytes) for journal, each in results.items())
            if long := tuple(each for each in found if each is not None):
                return FoundLong(long)
        seen = list(summaries.values())
        # Messages before the checkpoint that were pending, and are committed now, are read again.
        replays = {journal: result.replay for journal, result in results.items() if result.replay is not None}
        if replays:
            producers = {journal: states for journal, (_, states) in replays.items()}
            plan = self._plan([whole for whole, _ in replays.values()], cuts, len(summaries), producers)
            again, summaries_again = self._kept(kept, plan)
            rows = rows.unionByName(again)
            seen += (summary._replace(rows=0) for summary in summaries_again.values())
            for journal, replayed in _by_journal(summaries_again).items():
                _, states = replays[journal]
                results[journal] = sequence(journal, sources[journal], parts[journal], replayed, states, pruning)
        self._watch(results, sources, pruning)
        return _Sequencing(rows, results, seen)

    def _results(
        self, parts: Mapping[str, dict[Range, RangeSummary]], sources: Sources, pruning: Pruning
    ) -> dict[str, SequencedRanges]:
        return {
            journal: sequence(journal, sources[journal], parts[journal], pruning=pruning) for journal in sorted(parts)
        }

    def _watch(self, results: Mapping[str, SequencedRanges], sources: Sources, pruning: Pruning) -> None:
        for journal, result in results.items():
            warn_of_resets(journal, result)
            watch = self._skew.setdefault(journal, SkewWatch(journal, sources[journal]))
            watch.check(result.source, pruning.now)

    def _planned(self, plan: ReadPlan) -> PlannedRows:
        return planned_rows(self._layout, plan, self._client, self.routes)

    def _kept(self, kept: ExitStack, plan: ReadPlan) -> tuple[DataFrame, dict[Range, RangeSummary]]:
        """Return the rows of a plan, kept until `kept` closes, and the ranges' summaries."""
        with described(self._spark, f"{self._name}: reads {sum(part.length for part in plan.numbers):,} bytes"):
            return read_rows(self._spark, self._planned(plan), kept)

    def _plan(
        self, ranges: Sequence[Range], cuts: Cuts, first_number: int = 0, replay: Mapping[str, States] | None = None
    ) -> ReadPlan:
        max_slices = _SLICES_PER_CORE * cores(self._spark)  # Not cached: executors may be added and removed.
        max_bytes = self._max_partition_bytes if isinstance(self._layout.framing, JsonLines) else None
        places: tuple[str, ...] = ()
        if cuts and max_bytes is not None and (executors := executors_of(self._spark)):
            slices, places = self._locality.plan_slices(
                ranges, max_bytes=max_bytes, max_slices=max_slices, cuts=cuts, executors=executors
            )
        else:
            slices = plan_slices(ranges, max_bytes=max_bytes, max_slices=max_slices, cuts=cuts)
        return ReadPlan(tuple(slices), first_number, replay or {}, self._commits, places)


def cores(spark: SparkSession) -> int:
    """Return the number of tasks that run concurrently. For Spark Connect, derive it from the session's settings."""
    try:
        return max(1, int(spark.sparkContext.defaultParallelism))
    except PySparkException:
        pass
    if parallelism := spark.conf.get("spark.default.parallelism", ""):
        return int(parallelism)
    master = spark.conf.get("spark.master", "") or ""
    if local := re.fullmatch(r"local\[(\d+)(?:,\d+)?\]", master):
        return int(local[1])
    if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(cluster[1]) * int(cluster[2])
    if most := spark.conf.get("spark.cores.max", ""):
        return int(most)
    each = int(spark.conf.get("spark.executor.cores", "") or 1)
    return max(2, each * int(spark.conf.get("spark.executor.instances", "") or 2))


def _after(sources: Sources, results: Mapping[str, SequencedRanges]) -> dict[str, Source]:
    return {**sources, **{journal: result.source for journal, result in results.items()}}


def _by_journal(summaries: Summaries) -> dict[str, dict[Range, RangeSummary]]:
    found: dict[str, dict[Range, RangeSummary]] = {}
    for part, summary in summaries.items():
        found.setdefault(part.journal, {})[part] = summary
    return found
