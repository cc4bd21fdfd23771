"""Planning of a query's micro-batches over all of its journals (`batches.py` plans one journal's part)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final

from coranto.client import SyncJournalClient
from coranto.errors import CorruptData, OffsetJump
from coranto.messages.checkpoints import Source
from coranto.messages.framing import JsonLines
from coranto_consumers.journals.discovery import (
    ContentExtent,
    Extents,
    contents,
    fragment_begins,
    gone_segments,
    unread_segment_error,
)
from coranto_consumers.journals.losses import LostContent, PartlyLost, continue_after, log_loss, loss_by_offsets
from coranto_consumers.journals.ranges import Range
from coranto_consumers.spark.committed.sequencing import LongTransaction
from coranto_consumers.spark.options.source_options import SourceOptions
from coranto_consumers.spark.session.fetching import task_client
from coranto_consumers.spark.streaming.batches import (
    BatchPlanner,
    JournalBatch,
    ReadState,
    part_between,
    require_end,
    require_part,
)
from coranto_consumers.spark.streaming.offsets import MAX_LISTED, Position, Positions, begin_of, loads
from coranto_consumers.spark.streaming.stream_options import StreamOptions

_MIN_LISTED: Final = 8
_THREADS: Final = 8


_IDLE_SECONDS: Final = 0.1
"""The minimum seconds between two requests for heads. Spark itself would request them without a pause."""


class QueryJournals:
    """Finds the journals that a query selects, and their extents. Connects on first use."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._client: SyncJournalClient | None = None
        self._refreshed_at = 0.0
        self.heads: dict[str, ContentExtent] = {}

    @property
    def client(self) -> SyncJournalClient:
        if self._client is None:
            self._client = task_client(self._options.client, self._options.cache_bytes)
        return self._client

    def refresh(self) -> dict[str, ContentExtent]:
        self.heads = contents(self.client, self._options.selected.list(self.client, self._options.labels))
        self._refreshed_at = time.monotonic()
        return self.heads

    def refresh_throttled(self) -> dict[str, ContentExtent]:
        """Call `refresh`, but wait if the last call was too recent."""
        since = time.monotonic() - self._refreshed_at
        if since < _IDLE_SECONDS:
            time.sleep(_IDLE_SECONDS - since)
        return self.refresh()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def lost_at(journal: str, position: Position, found: ContentExtent | None) -> LostContent | None:
    """Return the lost content between a position and the next content. `found` is None if the journal is absent."""
    if found is None:
        return LostContent(journal, position.offset, 0, recreated=True)
    if not position.is_of(found.created, found.journal_id):
        ids = (position.journal_id, found.journal_id)
        return LostContent(journal, position.offset, found.head, True, *(ids if all(ids) else (None, None)))
    return loss_by_offsets(journal, position.offset, found.begin, found.head, is_end=found.is_end)


def require(journal: str, position: Position, heads: Extents) -> None:
    """Raise an error if a journal does not have the content from a position on."""
    found = heads.get(journal)
    if found is None:
        raise CorruptData(
            f"journal {journal} was read through {position.offset}, but was deleted or is not selected any more. "
            "Select it again, or begin a new query, with a new checkpoint"
        )
    lost = lost_at(journal, position, found)
    if lost is None:
        return
    advice = "Begin a new query, with a new checkpoint"
    if lost.known:
        advice += (
            ", or continue without (failOnDataLoss=false). If the present journal has the content of the earlier one "
            "up to that offset, such as recovered content, set the option "
            f"acceptJournals={lost.found}/{journal} of the source, and start the query with the same checkpoint."
        )
    raise lost.error(advice)


class QueryPlanner:
    """Plans the micro-batches of one query. With `commits`, rows include the offsets that committed them."""

    def __init__(self, options: StreamOptions, journals: QueryJournals, *, commits: bool) -> None:
        self._options = options
        self._journals = journals
        self._commits = commits
        self._states: dict[str, ReadState] = {}
        self._lost: set[LostContent] = set()

    def set_state(self, journal: str, state: ReadState) -> None:
        self._states[journal] = state

    def accepted(self, positions: Positions, heads: Extents) -> dict[str, Position]:
        """Return positions with the ids of current journals that have the same content, according to the options."""
        found = dict(positions)
        for name in positions.keys() & heads.keys():
            head = heads[name]
            if f"{head.journal_id}/{name}" in self._options.accepted:
                found[name] = replace(found[name], journal_id=head.journal_id, created=head.created)
        return found

    def drop_truncated(self, begun: Positions, heads: Extents) -> dict[str, Position]:
        """Return positions without truncated segments. If losses are errors, raises for a segment that was not read."""
        gone = gone_segments(heads, begun)
        for name in sorted(gone.unread):
            if self._options.source.fail_on_data_loss:
                raise unread_segment_error(name, begun[name].offset)
            if (lost := lost_at(name, begun[name], None)) is not None:
                self._warn_once(lost)
        return {name: position for name, position in begun.items() if name not in gone.read | gone.unread}

    def entry(self, begun: Positions, heads: Extents) -> dict[str, ReadState]:
        """Return the state of each journal before the next batch. Raises if a journal was recreated or lost content."""
        if self._options.source.fail_on_data_loss:
            for name, position in begun.items():
                require(name, position, heads)
        return {name: self._at(name, begun.get(name, Position(head.begin)), head) for name, head in heads.items()}

    def plan(
        self, ranges: Sequence[Range], states: Mapping[str, ReadState], heads: Extents, limited: bool
    ) -> dict[str, JournalBatch]:
        """Plan the next batch. If it is `limited`, the options limit its messages."""
        total = sum(each.length for each in ranges)
        options = self._options

        def planned(each: Range) -> JournalBatch:
            head, state = heads[each.journal], states[each.journal]
            share = None
            if limited and options.max_messages is not None:
                share = max(1, options.max_messages * each.length // total)
            whole = self._range(each.journal, each.begin, each.end, head, not state.position.created)
            return self._planned(
                whole,
                state,
                total,
                counted=limited and bool(options.min_messages),
                max_messages=share,
                listed=self._listed(len(states)),
                first_offset=head.begin,
                max_replay_bytes=options.max_bytes if limited else None,
            )

        with ThreadPoolExecutor(min(_THREADS, len(ranges)) or 1) as threads:
            return dict(zip([each.journal for each in ranges], threads.map(planned, ranges), strict=True))

    def plan_again(self, start: dict[str, Any], end: dict[str, Any]) -> dict[str, JournalBatch]:
        """Plan a batch of the checkpoint again. Raises as `plan` does, and if its content is gone."""
        heads = self._journals.refresh()
        begun, ended = self.accepted(loads(start), heads), self.accepted(loads(end), heads)
        batches = {}
        for name, position in ended.items():
            begin = begin_of(begun.get(name), position)
            before = begun.get(name)
            if begin == position.offset and (before is None or before.producers == position.producers):
                continue
            at = before if before is not None and before.offset == begin else Position(begin)
            named = replace(at, created=position.created, journal_id=position.journal_id)
            left = position.offset
            if self._options.source.fail_on_data_loss:
                require(name, named, heads)
                if not position.is_of(heads[name].created, heads[name].journal_id):
                    require(name, position, heads)  # The journal's head fell to an offset within the batch.
            elif (lost := lost_at(name, named, heads.get(name))) is not None:
                self._warn_once(lost)
                if lost.recreated or lost.end >= position.offset:
                    continue  # Nothing is left of this journal's part of the batch.
                at = Position(lost.end)
            elif (lost := lost_at(name, position, heads.get(name))) is not None and begin < lost.same_through < left:
                self._warn_once(lost)
                left = lost.same_through
            begin, state = at.offset, self._known(name, at)
            if begin == position.offset:
                if (found := part_between(name, state, position)) is not None:
                    batches[name] = self._part_again(found, state, heads[name].head, len(ended))
                    require_part(name, batches[name], position)
                    self.set_state(name, replace(batches[name].state, position=position))
                continue
            whole = self._range(name, begin, left, heads[name], position.since is not None)
            batches[name] = self._planned(replace(whole, limit=left), state, listed=self._listed(len(ended)))
            if left == position.offset:
                require_end(name, batches[name], left)
            self.set_state(name, replace(batches[name].state, position=position))
        return batches

    def _part_again(
        self, found: tuple[LongTransaction, int], state: ReadState, head: int, journals: int
    ) -> JournalBatch:
        long, length = found
        again = partial(self._planner().plan_part, long, head=head, max_bytes=length, listed=self._listed(journals))
        return self._tried(partial(again, cuts=self._cuts(long.part(state.source, length))), state)

    def _at(self, journal: str, position: Position, head: ContentExtent) -> ReadState:
        """Return the state at a position. If content is gone and that is not an error, return a new state after it."""
        if self._options.source.fail_on_data_loss or (lost := lost_at(journal, position, head)) is None:
            return self._known(journal, position)
        source = Source(position.offset, position.producers)
        self._warn_once(lost, continue_after(source, lost)[1] if lost.recreated else ())
        begin = lost.same_through or head.begin
        return ReadState(Position(begin), Source(begin), {})

    def _warn_once(self, lost: LostContent, partly: Iterable[PartlyLost] = ()) -> None:
        if lost not in self._lost:
            self._lost.add(lost)
            log_loss(lost, partly)

    def _known(self, journal: str, position: Position) -> ReadState:
        state = self._states.get(journal)
        if state is None or state.position != position:
            known = position
            if not self._options.source.fail_on_data_loss and position.rescan is not None:
                least = min(self._journals.heads[journal].begin, position.offset)
                known = replace(position, rescan=max(position.rescan, least))
            state = replace(self._planner().restore(journal, known), position=position)
            self._states[journal] = state
        return state

    def _planned(self, whole: Range, state: ReadState, total: int = 0, **how: Any) -> JournalBatch:
        """Plan a range of a batch with `total` bytes in all journals. `how` is as for `BatchPlanner.plan`."""
        return self._tried(partial(self._planner(total).plan, whole, cuts=self._cuts(whole), **how), state)

    def _tried(self, plan: Callable[..., JournalBatch], state: ReadState) -> JournalBatch:
        """Plan from a state. If content of open transactions is gone and that is not an error, plan without it."""
        try:
            return plan(state=state)
        except OffsetJump as error:
            if self._options.source.fail_on_data_loss or error.expected >= state.position.offset:
                raise
            lost = LostContent(error.journal, error.expected, error.actual)
            source, partly = continue_after(state.source, lost)
            if not partly:
                raise
            log_loss(lost, partly)
            return plan(state=replace(state, source=source))

    def _range(self, journal: str, begin: int, end: int, head: ContentExtent, first: bool) -> Range:
        """Return a range to read. A journal's `first` batch begins at a user's offset, which may be within a line."""
        aligned = not isinstance(self._options.source.framing, JsonLines) or not first or begin <= head.begin
        return Range(journal, begin, end, head.head, aligned, head.journal_id)

    def _cuts(self, whole: Range) -> Sequence[int]:
        if whole.length <= self._options.source.max_bytes:
            return ()
        return fragment_begins(self._journals.client, whole.journal)

    def _listed(self, journals: int) -> int:
        return max(_MIN_LISTED, MAX_LISTED // max(1, journals))

    def _planner(self, total: int = 0) -> BatchPlanner:
        source = self._options.source
        part_bytes = min(source.max_bytes, max(1, total // source.min_partitions) if total else source.max_bytes)
        return BatchPlanner(self._journals.client, source.framing, self._options.committed, part_bytes, self._commits)
