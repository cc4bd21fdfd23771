"""The input of one transaction. Ranges are read once, then their committed messages are chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from pyspark.sql.utils import is_remote

from coranto.client import ClientConfig
from coranto.client.routes import KnownRoute
from coranto.errors import CorantoError
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.framing import JsonLines
from coranto.messages.pruning import Pruning
from coranto.messages.skew import SkewWatch
from coranto.messages.uuids import ProducerId
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.spark.committed.long_transactions import LongTransaction, find_long, sequence_part
from coranto_consumers.spark.committed.scanning import RangeSummary
from coranto_consumers.spark.committed.sequencing import Sequenced, sequence
from coranto_consumers.spark.decoding.parsers import parser_of
from coranto_consumers.spark.inputs.frames import (
    COMMITTED_AT,
    ExpectedRows,
    PlannedRows,
    check_misfits,
    choose_committed,
    collect_summaries,
    nothing_committed,
    packed_input,
    packed_summaries,
    parsed_values,
    planned_rows,
    read_lines,
    summaries_in,
)
from coranto_consumers.spark.inputs.packed import PackedInput, PackedRows
from coranto_consumers.spark.journals.framings import ReadFraming
from coranto_consumers.spark.journals.placing import FragmentPlaces, executors_of
from coranto_consumers.spark.journals.ranges import WORTHWHILE_BYTES, Range, ReadPlan, plan_slices
from coranto_consumers.spark.session.jobs import described
from coranto_consumers.spark.source.source import register

_SLICES_PER_CORE = 2

W = TypeVar("W")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Input:
    """The input of a transaction, while its context is open."""

    committed: DataFrame
    """The application's columns and metadata, persisted."""
    messages: int
    """The number of rows of `committed`."""
    rows: int
    """The number of messages that were read."""
    sources: dict[str, Source]
    """The sources' states after this transaction."""
    dead: DataFrame | None = None
    """Journal, offset and line of misfits that are not in `committed`, if any."""
    misfits: int = 0
    """The number of messages that do not fit."""
    packed: PackedInput | None = None
    """The messages as packed rows, if they are cached as such."""
    required: frozenset[str] = frozenset()
    """The application's columns that are declared NOT NULL."""
    lines_at: Callable[[Sequence[tuple[str, int]]], list[bytes]] | None = None
    """Reads the lines of messages again, by journal and offset."""


class MetLongTransactions(Exception):
    """Acknowledgements of transactions that must be replayed in parts were read. Never leaves a consumer."""

    def __init__(self, found: Sequence[LongTransaction]) -> None:
        super().__init__(f"{len(found)} long transactions")
        self.found = found


class InputReader:
    """Reads the inputs of transactions. `name` is the consumer's, for descriptions of Spark's jobs."""

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
        packs: bool = False,
    ) -> None:
        self.packs = packs
        """True to cache rows as whole Arrow batches, for outputs that can use them."""
        self.routes: Mapping[str, KnownRoute] = {}
        """The routes of journals that tasks try first."""
        self._name = name
        self._misfits = misfits
        self._framing = framing or JsonLines()
        register(spark)  # For executors that get Coranto from the session's archive.
        self._spark = spark
        self._client = client
        self._commits = COMMITTED_AT in schema.names
        self._schema = StructType([field for field in schema.fields if field.name != COMMITTED_AT])
        self._required = frozenset(field.name for field in self._schema.fields if not field.nullable)
        parser_of(self._framing, self._schema)  # Raises InvalidInput.
        self._zone = str(spark.conf.get("spark.sql.session.timeZone"))
        self._max_partition_bytes = max_partition_bytes
        self._skew: dict[str, SkewWatch] = {}
        self._places = FragmentPlaces()

    def nothing(self) -> DataFrame:
        """Return the application's frame for a transaction without messages."""
        return nothing_committed(self._spark, self._schema, commits=self._commits)

    @contextmanager
    def read(
        self,
        ranges: Sequence[Range],
        sources: Mapping[str, Source],
        cuts: Mapping[str, Sequence[int]],
        pruning: Pruning,
        max_replay_bytes: int | None = None,
    ) -> Iterator[Input]:
        """Read ranges that begin where `sources` end. `cuts` are cheap offsets for splits.

        Forgets producers by `pruning`. Raises CorruptData when a message is missing, and MetLongTransactions when more
        than `max_replay_bytes` of a journal would have to be read again. Errors of tasks are raised as Spark's errors.
        """
        with ExitStack() as persisted:
            rows, results, summaries, packed = self._sequenced(
                persisted, ranges, sources, cuts, pruning, max_replay_bytes
            )
            yield from self._inputs(rows, results, summaries, sources, packed)

    @contextmanager
    def read_part(
        self, long: LongTransaction, sources: Mapping[str, Source], head: int, max_bytes: int
    ) -> Iterator[Input]:
        """Read the due part of a long transaction, in a journal that ends at `head`. Raises as `read` does."""
        journal, source = long.journal, sources[long.journal]
        begins = {journal: {long.producer.hex(): source.producers[long.producer].begin}}
        with ExitStack() as persisted:
            _, found, _ = self._kept(persisted, self._plan([long.acknowledgement(head)], {}))
            [acknowledgement] = found.values()
            plan = self._plan([long.part(source, max_bytes)], {}, first_number=1, replay=begins)
            rows, parts, _ = self._kept(persisted, plan)
            result = sequence_part(long, source, acknowledgement, parts)
            summaries = [replace(summary, rows=0) for summary in parts.values()]
            yield from self._inputs(rows, {journal: result}, summaries, sources)

    def read_and_write(
        self,
        ranges: Sequence[Range],
        sources: Mapping[str, Source],
        cuts: Mapping[str, Sequence[int]],
        pruning: Pruning,
        write: Callable[[ExpectedRows], W],
    ) -> tuple[Input, W] | None:
        """Read ranges in the same job that `write` runs to write the outputs of their messages.

        Returns None if not all messages turn out to be committed and to fit their columns, or if something failed. The
        written rows must then be ignored, and `read` used instead.
        """
        plan = self._plan(ranges, cuts)
        if self._commits or _is_little(plan) or is_remote():
            return None
        expected = ExpectedRows(self._spark, self._planned(plan), self._schema)
        try:
            written = write(expected)
            summaries = expected.summaries(plan)
        except (CorantoError, PySparkException, Py4JError) as error:
            _log.info("transaction.read_again", consumer=self._name, error=str(error).partition("\n")[0])
            return None
        if summaries is None or any(summary.misfits for summary in summaries.values()):
            return None
        parts = _by_journal(summaries)
        results = {
            journal: sequence(journal, sources[journal], parts[journal], pruning=pruning) for journal in sorted(parts)
        }
        if any(each.limits or each.replay is not None or each.messages is None for each in results.values()):
            return None
        self._watch(results, sources, pruning)
        messages = sum(result.messages or 0 for result in results.values())
        count = sum(summary.rows for summary in summaries.values())
        return self._input(expected.committed, messages, count, _after(sources, results)), written

    def _inputs(
        self,
        rows: DataFrame,
        results: Mapping[str, Sequenced],
        summaries: Sequence[RangeSummary],
        sources: Mapping[str, Source],
        packed: PackedRows | None = None,
    ) -> Iterator[Input]:
        """Yield the one input of rows and their summaries."""
        count = sum(summary.rows for summary in summaries)
        counts = [result.messages for result in results.values()]
        limits = [limit for result in results.values() for limit in result.limits]
        commits = [commit for result in results.values() for commit in result.commits] if self._commits else None
        chosen = choose_committed(self._spark, rows, limits, commits)
        after = _after(sources, results)
        misfits = 0
        if None in counts or any(summary.misfits for summary in summaries):
            with described(self._spark, f"{self._name}: counts committed messages and misfits"):
                taken = check_misfits(chosen, self._schema, self._misfits)
            committed, messages, misfits = taken.all, taken.messages, taken.misfits
            if self._misfits is MisfitPolicy.DEAD_LETTERS and misfits:
                yield self._input(taken.fitting, messages - misfits, count, after, dead=taken.dead, misfits=misfits)
                return
        else:
            committed, messages = parsed_values(chosen, self._schema), sum(each or 0 for each in counts)
        found = None if packed is None else packed_input(packed, committed, limits, commits)
        yield self._input(committed, messages, count, after, misfits=misfits, packed=found)

    def _input(self, committed: DataFrame, messages: int, rows: int, after: dict[str, Source], **others: Any) -> Input:
        def lines_at(places: Sequence[tuple[str, int]]) -> list[bytes]:
            ranges = [Range(journal, offset, offset + 1, after[journal].read_through) for journal, offset in places]
            plan = ReadPlan((tuple(sorted(ranges)),))
            found = read_lines(self._client, plan, self._framing, self._zone)
            return [found[place] for place in places]

        return Input(committed, messages, rows, after, required=self._required, lines_at=lines_at, **others)

    def advance(
        self,
        ranges: Sequence[Range],
        sources: Mapping[str, Source],
        cuts: Mapping[str, Sequence[int]],
        pruning: Pruning,
    ) -> dict[str, Source]:
        """Read ranges as `read` does, for the sources' states only. Return these states."""
        with ExitStack() as persisted:
            _, results, _, _ = self._sequenced(persisted, ranges, sources, cuts, pruning)
            return _after(sources, results)

    def _sequenced(
        self,
        persisted: ExitStack,
        ranges: Sequence[Range],
        sources: Mapping[str, Source],
        cuts: Mapping[str, Sequence[int]],
        pruning: Pruning,
        max_replay_bytes: int | None = None,
    ) -> tuple[DataFrame, dict[str, Sequenced], list[RangeSummary], PackedRows | None]:
        """Return the rows of ranges, cached until `persisted` closes, the results by journal, and all summaries.

        The last value has the same rows packed, if they are cached packed.
        """
        rows, summaries, packed = self._kept(persisted, self._plan(ranges, cuts))
        seen = list(summaries.values())
        parts = _by_journal(summaries)
        results = {
            journal: sequence(journal, sources[journal], parts[journal], pruning=pruning) for journal in sorted(parts)
        }
        if max_replay_bytes is not None:
            found_long = (
                find_long(journal, sources[journal], result, max_replay_bytes) for journal, result in results.items()
            )
            if long := [each for each in found_long if each is not None]:
                raise MetLongTransactions(long)
        if any(result.replay for result in results.values()):
            replays = self._plan_replays(results, cuts, first_number=len(summaries))
            again, found_again, _ = self._kept(persisted, replays)
            rows, packed = rows.unionByName(again), None
            replayed = _by_journal(found_again)
            seen += (replace(summary, rows=0) for summary in found_again.values())
            for journal, found in replayed.items():
                producers = _replaying(results[journal])
                results[journal] = sequence(journal, sources[journal], parts[journal], found, producers, pruning)
        self._watch(results, sources, pruning)
        return rows, results, seen, packed

    def _watch(self, results: Mapping[str, Sequenced], sources: Mapping[str, Source], pruning: Pruning) -> None:
        """Log resets of producers and clock skew."""
        _warn_of_resets(results)
        for journal, result in results.items():
            watch = self._skew.setdefault(journal, SkewWatch(journal, sources[journal]))
            watch.look(result.source, pruning.now)

    def _planned(self, plan: ReadPlan) -> PlannedRows:
        tolerant = self._misfits is not MisfitPolicy.FAIL
        planned = planned_rows(self._client, plan, self._schema, self._framing, self._zone, tolerant=tolerant)
        return planned.along(self.routes)

    def _kept(
        self, persisted: ExitStack, plan: ReadPlan
    ) -> tuple[DataFrame, dict[Range, RangeSummary], PackedRows | None]:
        """Return the rows of a plan, cached until `persisted` closes, the ranges' summaries, and the packed rows."""
        planned = self._planned(plan)
        if _is_little(plan):
            # A Spark job takes longer than reading so little here.
            table = planned.read_here()
            return self._spark.createDataFrame(table, planned.schema).coalesce(1), summaries_in(table, plan), None
        with described(self._spark, f"{self._name}: reads {sum(part.length for part in plan.numbers):,} bytes"):
            if self.packs and not self._commits:
                packed = planned.packed_by_tasks(self._spark)
                persisted.enter_context(persisting(packed.kept))
                return packed.rows(), packed_summaries(packed, plan), packed
            rows = persisted.enter_context(persisting(planned.by_tasks(self._spark)))
            return rows, collect_summaries(rows, plan), None

    def _plan(
        self,
        ranges: Sequence[Range],
        cuts: Mapping[str, Sequence[int]],
        first_number: int = 0,
        replay: Mapping[str, Mapping[str, int]] | None = None,
    ) -> ReadPlan:
        max_slices = _SLICES_PER_CORE * cores(self._spark)  # Executors come and go.
        max_bytes = self._max_partition_bytes if isinstance(self._framing, JsonLines) else None
        places: tuple[str, ...] = ()
        if cuts and max_bytes is not None and (executors := executors_of(self._spark)):
            slices, places = self._places.plan_slices(
                ranges, max_bytes=max_bytes, max_slices=max_slices, cuts=cuts, executors=executors
            )
        else:
            slices = plan_slices(ranges, max_bytes=max_bytes, max_slices=max_slices, cuts=cuts)
        return ReadPlan(tuple(slices), first_number, replay or {}, self._commits, places)

    def _plan_replays(
        self, results: Mapping[str, Sequenced], cuts: Mapping[str, Sequence[int]], first_number: int
    ) -> ReadPlan:
        """Plan to read messages before the checkpoint again that were pending, and are committed now."""
        ranges = [result.replay[0] for result in results.values() if result.replay is not None]
        begins = {
            journal: {producer.hex(): state.begin for producer, state in _replaying(result).items()}
            for journal, result in results.items()
            if result.replay is not None
        }
        return self._plan(ranges, cuts, first_number, begins)


def cores(spark: SparkSession) -> int:
    """Return the number of tasks that run concurrently.

    Spark reports it, except in a session of Spark Connect: then it is derived from the settings.
    """
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


@contextmanager
def persisting(frame: DataFrame) -> Iterator[DataFrame]:
    """Let Spark cache a frame's rows within the context: in memory, and on local disks if that is full."""
    frame.persist()
    try:
        yield frame
    finally:
        frame.unpersist()


def _is_little(plan: ReadPlan) -> bool:
    return len(plan.slices) == 1 and sum(part.length for part in plan.numbers) <= WORTHWHILE_BYTES


def _after(sources: Mapping[str, Source], results: Mapping[str, Sequenced]) -> dict[str, Source]:
    return {**sources, **{journal: result.source for journal, result in results.items()}}


def _by_journal(summaries: Mapping[Range, RangeSummary]) -> dict[str, dict[Range, RangeSummary]]:
    found: dict[str, dict[Range, RangeSummary]] = {}
    for part, summary in summaries.items():
        found.setdefault(part.journal, {})[part] = summary
    return found


def _replaying(result: Sequenced) -> Mapping[ProducerId, ProducerState]:
    return result.replay[1] if result.replay is not None else {}


def _warn_of_resets(results: Mapping[str, Sequenced]) -> None:
    for journal, result in results.items():
        for reset in result.resets:
            _log.warning(
                "producer.reset",
                journal=journal,
                producer=reset.producer.hex(),
                offset=reset.offset,
            )
