"""Consumption of a shard's input in time slices, and replays of content that a sequencer no longer holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final

import structlog

from coranto.client import Chunk, JournalClient
from coranto.errors import InvalidInput
from coranto.messages import Framing, Pruning, ReplayRange, Source
from coranto.messages.checkpoints import identified
from coranto.messages.sequencer import DEFAULT_RING_SIZE
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.columns import Columns
from coranto_consumers.runtime.inputs import BatchInput, Feed, MessageInput, SourceInput
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.runtime.rejections import Consumed, RejectionSearch
from coranto_consumers.runtime.transaction import DeferToNextTransaction, Transactions
from coranto_consumers.stores.base import Store

SLICE_SECONDS: Final = 0.02
"""Seconds of consuming messages before the event loop runs other work."""
STAGED_BYTES: Final = 1 << 20
"""The bytes of published messages after which a slice ends, so that they are appended."""

_log = structlog.get_logger(__name__)


class Consuming:
    """The input of one shard, and its delivery to the application. The primary has the transactions."""

    def __init__(
        self,
        app: Application[Any],
        shard: Shard,
        publisher: ShardPublisher,
        transactions: Transactions,
        monotonic: Callable[[], float],
        in_thread: Callable[..., Awaitable[Any]],
        sources: Mapping[str, Source],
        search: RejectionSearch,
    ) -> None:
        """`in_thread` calls a function on the shard's thread."""
        self._app = app
        self._shard = shard
        self._publisher = publisher
        self._transactions = transactions
        self._now = monotonic
        self._in_thread = in_thread
        self._sources = sources
        self._search = search
        ring_size = shard.spec.ring_buffer_size or DEFAULT_RING_SIZE
        self._messages = MessageInput(app, shard, publisher, sources, ring_size, search.treatments)
        self.ids = {journal: source.journal_id for journal, source in sources.items() if source.journal_id}
        """The known ids of the journals that offsets refer to."""
        self._batches: BatchInput | None = None
        self._inputs: list[SourceInput] = [self._messages]
        self._arrived: list[tuple[SourceInput, str, Any]] = []
        self._arrived_counts: Counter[SourceInput] = Counter()
        self._arrived_bytes = 0
        self._replays: dict[SourceInput, RangeReading] = {}
        self._skipped_ends: dict[str, int] = {}
        self._decoded: dict[str, int] = {}
        """The ends of decoded content, by journal, until all of it is sequenced."""
        self._last: tuple[SourceInput, Any] | None = None
        self.in_hand = 0
        """The number of messages in the current call of the application. They do not count as consumed yet."""
        self.aborted = False
        """Set it to end a slice as soon as possible."""

    def add_source(self, journal: str, framing: Framing[Any] | Columns, store: Store) -> SourceInput:
        """Return the input of a source with a framing."""
        if not isinstance(framing, Columns):
            self._messages.add_source(journal, framing, store)
            return self._messages
        if self._batches is None:
            self._batches = BatchInput(
                self._app, self._shard, self._publisher, self._sources, self._in_thread, self._search.treatments
            )
            self._inputs.append(self._batches)
        self._batches.add_source(journal, framing, store)
        return self._batches

    # -- State ---------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True if there is input to work on."""
        return self._has_messages or (bool(self._decoded) and not self.has_pending)

    @property
    def _has_messages(self) -> bool:
        return bool(self._arrived) or any(each.intake.is_ready for each in self._inputs)

    @property
    def has_pending(self) -> bool:
        """True if a transaction that is still open was read since the last checkpoint."""
        return any(each.intake.has_pending for each in self._inputs)

    @property
    def in_partial_set(self) -> bool:
        """True if the transaction must continue, because an atomic application has only a part of a set."""
        return any(map(self._must_continue, self._inputs))

    def _must_continue(self, of: SourceInput) -> bool:
        return self._app.atomic and bool(of.intake.in_partial_set)

    @property
    def resets(self) -> int:
        """The number of acknowledgements that were below an earlier one of their producer."""
        return sum(each.intake.resets for each in self._inputs)

    def size_of(self, of: SourceInput) -> int:
        """Return the number of an input's messages that were read and not sequenced yet."""
        return self._arrived_counts[of] + int(of.intake.size)

    @property
    def size_bytes(self) -> int:
        """The bytes of the messages that were read and not sequenced yet."""
        return self._arrived_bytes + sum(int(each.intake.size_bytes) for each in self._inputs)

    @property
    def skipped_ends(self) -> dict[str, int]:
        """The end offsets, by journal, of messages that commit nothing and open nothing. May be emptied."""
        for each in self._inputs:
            passed = each.intake.skipped_ends
            while passed:  # One by one, since a slice may add entries concurrently.
                journal, end = passed.popitem()
                self._skipped_ends[journal] = max(end, self._skipped_ends.get(journal, 0))
        return self._skipped_ends

    def checkpoint(self, pruning: Pruning) -> dict[str, Source]:
        """Return the states of sources that cover exactly the consumed messages."""
        # The message input has the restored states of all sources. States of sources in columns have advanced since.
        sources = dict(self._messages.checkpoint(pruning))
        if self._batches is not None:
            sources.update(self._batches.checkpoint(pruning))
        return identified(sources, self.ids)

    # -- Events --------------------------------------------------------------------------------------------------------

    def arrive(self, of: SourceInput, journal: str, decoded: Any, through: int) -> None:
        """Add decoded content that was read up to an offset. The next slice sequences it: one may be running now."""
        self._decoded[journal] = through
        if not decoded:
            return
        messages, size = of.size_of(decoded)
        self._arrived.append((of, journal, decoded))
        self._arrived_counts[of] += messages
        self._arrived_bytes += size

    @property
    def last(self) -> Consumed | None:
        """The message in the last call of the application. None if the call had none, or several."""
        return None if self._last is None else self._last[0].subject(self._last[1])

    async def consume(self, store: Store) -> None:
        """Let the application consume available messages, for a time slice of each input."""
        if self._batches is not None:
            self._batches.limit(self._transactions.limits.max_messages)
        for of, journal, decoded in self._arrived:
            of.add(journal, decoded)
        self._arrived.clear()
        self._arrived_counts.clear()
        self._arrived_bytes = 0
        self._inputs.append(self._inputs.pop(0))  # Alternate: an endless input must not block the other.
        for each in self._inputs:
            if not each.intake.is_ready:
                continue
            if each.is_async:
                await self._consume_slice(each, store)
            else:
                await self._in_thread(self._consume_slice_plainly, each, store)
        if not self._has_messages and not self.has_pending:  # Only blank content may be left, such as empty lines.
            for journal, end in self._decoded.items():
                self._skipped_ends[journal] = max(end, self._skipped_ends.get(journal, 0))
            self._decoded.clear()

    def _consume_slice_plainly(self, of: SourceInput, store: Store) -> None:
        now = self._now()
        until = now + SLICE_SECONDS
        while (pulled := self._next(of, now, until)) is not None:
            try:
                of.consume(store, pulled)
            except DeferToNextTransaction:
                self._defer(of, pulled)
                return
            now = self._consumed(of, pulled)

    async def _consume_slice(self, of: SourceInput, store: Store) -> None:
        now = self._now()
        until = now + SLICE_SECONDS
        while (pulled := self._next(of, now, until)) is not None:
            try:
                await of.consume_async(store, pulled)
            except DeferToNextTransaction:
                self._defer(of, pulled)
                return
            now = self._consumed(of, pulled)

    def _consumed(self, of: SourceInput, pulled: Any) -> float:
        """Count messages that were consumed. Returns the time."""
        now = self._now()
        messages, acknowledgements, size = of.weigh(pulled)
        self.in_hand = 0
        self._transactions.consumed(now, size, messages, acknowledgements)
        return now

    def _next(self, of: SourceInput, now: float, until: float) -> Any | None:
        """Return the next input to consume. None when there is nothing, or when the slice has to end."""
        if self.aborted or now >= until or self._publisher.staged_bytes >= STAGED_BYTES:
            return None
        pulled = of.intake.pull() if self._transactions.reads(now) or self._must_continue(of) else None
        if pulled is not None:
            self._last, self.in_hand = (of, pulled), of.weigh(pulled)[0]
        return pulled

    def _defer(self, of: SourceInput, pulled: Any) -> None:
        self.in_hand = 0
        of.intake.put_back(pulled)
        if self._must_continue(of):
            raise InvalidInput(
                f"{type(self._app).__name__} is atomic, and has deferred a message within a set of messages that were "
                "committed together: defer the first one of a set only",
                field="atomic",
            )
        self._transactions.deferred()

    async def replay(self, client: JournalClient) -> None:
        """Read the next chunk of each range that a sequencer has to replay."""
        for each in self._inputs:
            if (wanted := each.replay_range) is None:
                continue
            replay = self._replays.get(each)
            if replay is None:
                _log.debug(
                    "shard.replaying", shard=self._shard.id, journal=wanted.journal, begin=wanted.begin, end=wanted.end
                )
                replay = self._replays[each] = RangeReading(client, each, wanted, self.ids.get(wanted.journal, ""))
            if not await replay.read_on():
                del self._replays[each]

    async def close(self) -> None:
        """End replays."""
        for replay in self._replays.values():
            await replay.close()


class RangeReading:
    """The reader of a range that is replayed."""

    def __init__(self, client: JournalClient, of: SourceInput, wanted: ReplayRange, journal_id: str) -> None:
        self._of = of
        self._chunks: AsyncGenerator[Chunk] = client.read(
            wanted.journal, wanted.begin, end_offset=wanted.end, block=True, journal_id=journal_id
        )
        self._feed: Feed = of.feed(wanted.journal, wanted.begin)

    async def read_on(self) -> bool:
        """Read a chunk, and return True; return False at the end of the range."""
        chunk = await anext(self._chunks, None)
        if chunk is None:
            self._of.intake.end_replay()
            return False
        decoded, _ = self._feed(chunk)
        if decoded is not None:
            self._of.add_replayed(decoded)
        return True

    async def close(self) -> None:
        """Close the read."""
        await self._chunks.aclose()
