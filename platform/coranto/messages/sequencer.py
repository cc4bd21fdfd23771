"""Sequencing: the selection of a journal's committed messages, each exactly once.

A journal holds messages of several producers, duplicates, messages of open transactions, and messages of transactions
that were rolled back. For each producer of each journal a reader keeps the clock L of its last decided message and its
pending messages P. A producer that is first seen with clock c has L = c - 1. A message with clock c is then

==============  ======================================================================================================
clock is 0      committed, and no state changes
OUTSIDE_TXN     if c <= L: a duplicate; else committed, P is dropped and L = c. Unknown flags count as OUTSIDE_TXN.
CONTINUE_TXN    if c <= L, or c <= the largest clock of P: a duplicate; else it joins P
ACK_TXN, c > L  commits messages of P up to c, drops the others, and L = c
ACK_TXN, c = L  drops P: a rollback, or an acknowledgement appended again
ACK_TXN, c < L  drops P and L = c: the producer recovered an outdated checkpoint and will publish messages again
==============  ======================================================================================================

`Sequencer` holds the most recent messages in a ring buffer, so an acknowledgement usually delivers from memory, even
when messages of other producers are interleaved. Otherwise the caller reads the missing part of the journal again (a
replay). `columnar.py` applies the same rules to whole columns.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

from coranto.errors import InvalidInput
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.framing import Envelope
from coranto.messages.pruning import Pruning
from coranto.messages.uuids import Flags, ProducerId

M = TypeVar("M")
_CONTINUE, _ACK = Flags.CONTINUE_TXN, Flags.ACK_TXN

DEFAULT_RING_SIZE: Final = 8192
DEFAULT_RING_BYTES: Final = 256 << 20
"""The maximum size of the ring in bytes. A limit on the number of messages is not enough, because sizes vary."""


class QueueOutcome(enum.Enum):
    """The outcome of a message given to `Sequencer.queue`."""

    OUTSIDE_DUPLICATE = "outside, seen before"
    OUTSIDE_COMMIT = "outside, committed"
    CONTINUE_DUPLICATE = "continue, decided before"
    CONTINUE_CLOCK_LARGER = "continue, its transaction has a larger clock"
    CONTINUE_BEGIN = "continue, begins a transaction"
    CONTINUE_EXTEND = "continue, extends a transaction"
    ACK_ROLLBACK = "acknowledgement, rolls back"
    ACK_RESET = "acknowledgement below an earlier one, rolls back"
    """Exactly-once semantics are lost for messages that the producer publishes again."""
    ACK_EMPTY = "acknowledgement, commits nothing"
    ACK_COMMIT_RING = "acknowledgement, commits messages of the ring"
    ACK_COMMIT_REPLAY = "acknowledgement, commits messages to be replayed"


class ReplayRange(NamedTuple):
    """Journal content [begin, end) to be read again."""

    journal: str
    begin: int
    end: int


class _Undo(NamedTuple, Generic[M]):
    """The last message returned, and the state before that, for `put_back`."""

    envelope: Envelope[M]
    partial: _Partial[M] | None
    """The state of its producer; None for a message with a zero clock."""
    last_ack: int
    begin: int
    max_clock: int
    offset: int
    is_trigger: bool


class _Partial(Generic[M]):
    """The state of one producer of one journal."""

    __slots__ = ("begin", "generation", "held", "last_ack", "seen_through", "top")

    def __init__(self, last_ack: int, begin: int = -1, seen_through: int = 0) -> None:
        self.last_ack = last_ack
        self.begin = begin  # The offset of the first pending message, or -1.
        self.seen_through = seen_through  # The end offset of the last queued message.
        self.top = last_ack  # The largest clock that is decided, or known to be pending.
        self.held: deque[Envelope[M]] | None = None
        """The pending messages in the ring. None saves memory: most producers have no pending messages."""
        self.generation = 0  # Incremented when `held` is dropped: older entries of the ring are then stale.

    def decide(self, clock: int) -> None:
        self.last_ack = self.top = clock
        self.begin = -1
        self.held = None
        self.generation += 1

    def state(self) -> ProducerState:
        return ProducerState(self.last_ack, self.begin, self.seen_through)


class Sequencer(Generic[M]):
    """Decides which messages are committed, for any number of journals. Does no I/O.

    Pass each message to `queue`, in offset order for each journal. After each message, take the messages that it
    commits:

    1.  If `replay_range` is not None, read that part of the journal again. Pass its messages to `replay` in order,
        which returns True for committed messages. Then call `end_replay`.
    2.  Call `step` until it returns None.

    A committed message counts as delivered when `step` has returned it, or `replay` has returned True for it. A
    `checkpoint` may be taken at any time and covers exactly the delivered messages.

    `step` also returns each acknowledgement with c > L, after the messages that it commits.
    """

    def __init__(
        self,
        sources: Mapping[str, Source] | None = None,
        ring_size: int = DEFAULT_RING_SIZE,
        *,
        ring_bytes: int = DEFAULT_RING_BYTES,
        max_producers: float = math.inf,
    ) -> None:
        """Create a sequencer. Its ring holds at most `ring_size` messages and `ring_bytes`, but at least one message.

        `max_producers` is the maximum number of producers that are remembered for one journal at a time.
        """
        if ring_size < 1:
            raise InvalidInput(f"a ring of {ring_size} messages cannot hold one; give 1 or more")
        self._ring_size = ring_size
        self._ring_bytes = ring_bytes
        self._max_producers = max_producers
        self._ring: deque[tuple[_Partial[M], int, int]] = deque()  # Producer, generation, size.
        self._ring_used = 0  # Bytes of all entries of the ring, stale ones included.
        self._offsets: dict[str, int] = {}
        self._partials: dict[str, dict[ProducerId, _Partial[M]]] = {}
        for journal, source in (sources or {}).items():
            self._offsets[journal] = source.read_through
            self._partials[journal] = {
                producer: _Partial(state.last_ack, state.begin, state.seen_through)
                for producer, state in source.seen_producers.items()
            }
        self._open_since_checkpoint: set[tuple[str, ProducerId]] = set()
        # The current delivery: the message that commits others, its producer, and the end of the replay.
        self._trigger: Envelope[M] | None = None
        self._partial: _Partial[M] | None = None
        self._replay_end: int | None = None
        self._undo: _Undo[M] | None = None
        self._max_clock = 0  # The largest clock of the transaction's messages so far: smaller clocks are duplicates.

    @property
    def is_delivering(self) -> bool:
        """True if committed messages remain to be taken.

        A consumer ends its own transaction only when this is False. It thus consumes all messages that one
        acknowledgement commits in a journal in the same transaction.
        """
        return self._trigger is not None

    def read_through(self, journal: str) -> int:
        """Return the end of the delivered messages of the journal."""
        return self._offsets.get(journal, 0)

    @property
    def has_pending(self) -> bool:
        """True if a transaction began since the last checkpoint and is still open: more messages are likely soon."""
        return bool(self._open_since_checkpoint)

    @property
    def replay_range(self) -> ReplayRange | None:
        """The content to replay before `step` can continue, or None."""
        if self._replay_end is None or self._trigger is None or self._partial is None:
            return None
        return ReplayRange(self._trigger.journal, self._partial.begin, self._replay_end)

    def queue(self, envelope: Envelope[M]) -> QueueOutcome:
        """Queue the next message of its journal.

        Raises InvalidInput while committed messages remain to be delivered, for a message below `read_through`, and
        when its producer would exceed `max_producers`. The state is then unchanged.
        """
        self._undo = None
        if self._trigger is not None:
            raise InvalidInput("committed messages remain: take them with step() before queueing the next one")
        journal, clock = envelope.journal, envelope.clock
        if envelope.begin < self._offsets.get(journal, 0):
            raise InvalidInput(
                f"message at offset {envelope.begin} of {journal} was queued before; "
                f"continue from offset {self._offsets[journal]}"
            )
        if clock == 0:
            self._trigger = envelope
            return QueueOutcome.OUTSIDE_COMMIT

        partials = self._partials.get(journal)
        if partials is None:
            partials = self._partials[journal] = {}
        partial = partials.get(envelope.producer)
        if partial is None:
            if len(partials) >= self._max_producers:
                raise InvalidInput(
                    f"{journal} has messages of more than {self._max_producers} producers: one more is at offset "
                    f"{envelope.begin}. Do writers use each producer id only once? Skip their content with "
                    "the source's min_offset, or let them write to another journal"
                )
            partial = partials[envelope.producer] = _Partial(clock - 1)
        partial.seen_through = envelope.end

        if envelope.flags == _CONTINUE:
            outcome = self._queue_continue(envelope, partial)
        elif envelope.flags == _ACK:
            outcome = self._queue_ack(envelope, partial)
        elif clock <= partial.last_ack:
            outcome = QueueOutcome.OUTSIDE_DUPLICATE
        else:
            # `step` drops the pending messages when it delivers this message.
            self._trigger = envelope
            return QueueOutcome.OUTSIDE_COMMIT

        if self._trigger is None:
            self._offsets[journal] = envelope.end
        return outcome

    def advance_to(self, journal: str, end: int) -> None:
        """Advance `read_through` to `end`, over content without messages such as empty lines."""
        if end > self._offsets.get(journal, 0):
            self._undo = None
            self._offsets[journal] = end

    def _queue_continue(self, envelope: Envelope[M], partial: _Partial[M]) -> QueueOutcome:
        if envelope.clock <= partial.last_ack:
            return QueueOutcome.CONTINUE_DUPLICATE
        if envelope.clock <= partial.top:
            return QueueOutcome.CONTINUE_CLOCK_LARGER
        outcome = QueueOutcome.CONTINUE_EXTEND
        if partial.begin == -1:
            outcome = QueueOutcome.CONTINUE_BEGIN
            partial.begin = envelope.begin
            self._open_since_checkpoint.add((envelope.journal, envelope.producer))
        partial.top = envelope.clock
        if partial.held is None:
            partial.held = deque()
        partial.held.append(envelope)
        size = envelope.end - envelope.begin
        self._ring_used += size
        self._ring.append((partial, partial.generation, size))
        while len(self._ring) > self._ring_size or (self._ring_used > self._ring_bytes and len(self._ring) > 1):
            oldest, generation, size = self._ring.popleft()
            self._ring_used -= size
            if oldest.generation == generation and oldest.held:
                oldest.held.popleft()
        return outcome

    def _queue_ack(self, envelope: Envelope[M], partial: _Partial[M]) -> QueueOutcome:
        if envelope.clock <= partial.last_ack:
            outcome = QueueOutcome.ACK_ROLLBACK if envelope.clock == partial.last_ack else QueueOutcome.ACK_RESET
            partial.decide(envelope.clock)
            self._open_since_checkpoint.discard((envelope.journal, envelope.producer))
            return outcome
        self._trigger, self._partial, self._max_clock = envelope, partial, partial.last_ack
        if partial.begin == -1:
            return QueueOutcome.ACK_EMPTY
        in_ring = partial.held[0].begin if partial.held else envelope.begin
        if partial.begin == in_ring:
            return QueueOutcome.ACK_COMMIT_RING
        self._replay_end = in_ring
        return QueueOutcome.ACK_COMMIT_REPLAY

    def replay(self, envelope: Envelope[M]) -> bool:
        """Accept the next message of `replay_range`. Return True if it is committed; the caller then delivers it.

        Raises InvalidInput for a message outside of the range.
        """
        trigger, partial, end = self._trigger, self._partial, self._replay_end
        if trigger is None or partial is None or end is None:
            raise InvalidInput("no replay is needed: replay_range is None")
        if envelope.begin < partial.begin or envelope.end > end or envelope.journal != trigger.journal:
            raise InvalidInput(
                f"message of {envelope.journal} at [{envelope.begin}, {envelope.end}) is not part of the replay of "
                f"{trigger.journal} at [{partial.begin}, {end})"
            )
        if envelope.producer != trigger.producer or envelope.flags != _CONTINUE:
            return False
        return self._deliver(envelope, partial, trigger)

    def end_replay(self) -> None:
        """End the replay. Call this after all messages of `replay_range` were passed to `replay`."""
        self._replay_end = None

    def step(self) -> Envelope[M] | None:
        """Return the next committed message, or None when all are delivered and the next message can be queued.

        Raises InvalidInput while `replay_range` must be replayed first.
        """
        trigger, partial = self._trigger, self._partial
        if trigger is None:
            return None
        if self._replay_end is not None:
            raise InvalidInput("replay the content of replay_range, then call end_replay()")
        if partial is not None:
            while partial.held:
                held = partial.held.popleft()
                if self._deliver(held, partial, trigger):
                    return held
        # All committed messages are delivered. The message that committed them is returned last.
        offset = self._offsets.get(trigger.journal, 0)
        if trigger.clock:
            decided = self._partials[trigger.journal][trigger.producer]
            self._undo = _Undo(trigger, decided, decided.last_ack, decided.begin, self._max_clock, offset, True)
            decided.decide(trigger.clock)
            self._open_since_checkpoint.discard((trigger.journal, trigger.producer))
        else:
            self._undo = _Undo(trigger, None, 0, -1, self._max_clock, offset, True)
        self._trigger = self._partial = None
        self._offsets[trigger.journal] = trigger.end
        return trigger

    def put_back(self) -> None:
        """Undo the delivery of the last message, because it was not consumed.

        A consumer that defers a message to its next transaction calls this before it takes its checkpoint. The next
        `step` returns the message again. During a replay, pass the message to `replay` again instead.

        Raises InvalidInput when no message was delivered since the last `queue`, `checkpoint` or `put_back`.
        """
        undo, self._undo = self._undo, None
        if undo is None:
            raise InvalidInput("nothing to put back: only the last delivered message can be put back")
        envelope, partial = undo.envelope, undo.partial
        self._max_clock = undo.max_clock
        if partial is not None:
            partial.last_ack, partial.begin = undo.last_ack, undo.begin
        if undo.is_trigger:
            self._trigger = envelope
            self._partial = partial if envelope.flags == _ACK else None
            self._offsets[envelope.journal] = undo.offset
        elif partial is not None and self._replay_end is None:
            if partial.held is None:
                partial.held = deque()
            partial.held.appendleft(envelope)

    def _deliver(self, envelope: Envelope[M], partial: _Partial[M], trigger: Envelope[M]) -> bool:
        """Return True if `trigger` commits a pending message, which then counts as delivered."""
        # A replay contains duplicates, and the ring may repeat messages from before a restored checkpoint.
        if envelope.clock <= self._max_clock:
            return False
        max_clock, self._max_clock = self._max_clock, envelope.clock
        if envelope.clock > trigger.clock:
            return False
        self._undo = _Undo(envelope, partial, partial.last_ack, partial.begin, max_clock, 0, False)
        # A reader that restores a checkpoint taken after this point reads the acknowledgement again, and delivers only
        # the messages after this one.
        partial.last_ack = envelope.clock
        partial.begin = envelope.end
        return True

    def checkpoint(self, pruning: Pruning | None = None) -> dict[str, Source]:
        """Return the state to restore from, for each journal. Forgets producers according to `pruning`, if given."""
        self._open_since_checkpoint.clear()
        self._undo = None
        sources = {}
        for journal in self._offsets.keys() | self._partials.keys():
            partials = self._partials.get(journal, {})
            states = {producer: partial.state() for producer, partial in partials.items()}
            read_through = self._offsets.get(journal, 0)
            # During a delivery no producer is forgotten: the rest of the delivery depends on its producer.
            if pruning is not None and self._trigger is None:
                kept = pruning.prune(journal, states, read_through)
                for producer in states.keys() - kept.keys():
                    partials.pop(producer).decide(0)
                states = kept
            sources[journal] = Source(read_through, states)
        return sources


def read_committed(
    envelopes: Iterable[Envelope[M]],
    sequencer: Sequencer[M],
    replay: Callable[[ReplayRange], Iterable[Envelope[M]]],
) -> Iterator[Envelope[M]]:
    """Yield the committed content messages of `envelopes`, each once, without acknowledgements.

    `replay` reads a part of a journal again. A checkpoint of `sequencer` that is taken between two messages covers the
    messages yielded so far.
    """
    for envelope in envelopes:
        sequencer.queue(envelope)
        wanted = sequencer.replay_range
        if wanted is not None:
            yield from (replayed for replayed in replay(wanted) if sequencer.replay(replayed))
            sequencer.end_replay()
        while (committed := sequencer.step()) is not None:
            if committed.flags != _ACK or committed.clock == 0:
                yield committed


async def read_committed_async(
    envelopes: AsyncIterable[Envelope[M]],
    sequencer: Sequencer[M],
    replay: Callable[[ReplayRange], AsyncIterable[Envelope[M]]],
) -> AsyncIterator[Envelope[M]]:
    """Asynchronous `read_committed`.

    A cancelled read ends the iteration. Continue with a new sequencer from the last checkpoint.
    """
    async for envelope in envelopes:
        sequencer.queue(envelope)
        wanted = sequencer.replay_range
        if wanted is not None:
            async for replayed in replay(wanted):
                if sequencer.replay(replayed):
                    yield replayed
            sequencer.end_replay()
        while (committed := sequencer.step()) is not None:
            if committed.flags != _ACK or committed.clock == 0:
                yield committed
