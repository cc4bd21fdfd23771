"""Sequencing of a shard's sources: from read messages to committed messages, one at a time. Pure.

The caller adds read messages (`add`), and takes committed messages (`pull`) until it must read more: usually from the
sources. If an acknowledgement commits messages that the sequencer no longer holds, a range of a journal must be read
again (`replay_range`, `add_replayed`, `end_replay`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, Generic, TypeVar

from coranto.errors import InvalidInput
from coranto.messages import Envelope, Pruning, QueueOutcome, ReplayRange, Sequencer, Source
from coranto.messages.sequencer import DEFAULT_RING_SIZE

M = TypeVar("M")

ATOMIC_BYTES: Final = 256 << 20
"""The maximum bytes of a journal, from the first message of a set to its acknowledgement, that an `atomic` application
gets in one transaction."""
MAX_PRODUCERS: Final = 250_000
"""The maximum number of known producers of a source. Each checkpoint has all of them, and a checkpoint of this many
blocks the process for seconds. With many more, the process would lose its lease and all its shards."""

_COMMITS = frozenset(
    {QueueOutcome.OUTSIDE_COMMIT, QueueOutcome.ACK_EMPTY, QueueOutcome.ACK_COMMIT_RING, QueueOutcome.ACK_COMMIT_REPLAY}
)
# Most messages have these outcomes, so they are compared without hashing.
_BEGINS, _EXTENDS = QueueOutcome.CONTINUE_BEGIN, QueueOutcome.CONTINUE_EXTEND


def require_short(journal: str, producer: bytes, begin: int, end: int, atomic_bytes: int | None) -> None:
    """Raise InvalidInput for a set of messages that is too long for one transaction. None: sets may be split."""
    if atomic_bytes is not None and end - begin > atomic_bytes:
        raise InvalidInput(
            f"producer {producer.hex()} has committed a set of messages in the {end - begin} bytes [{begin}, {end}) of "
            f"journal {journal}, and a transaction of an atomic application takes {atomic_bytes}. None of it is "
            "consumed. Let the producer commit more often, or set atomic to False to have it split",
            field="atomic",
        )


class Intake(Generic[M]):
    """Sequences the messages of one shard. `atomic_bytes` limits the sets of an application that gets them whole."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        ring_size: int = DEFAULT_RING_SIZE,
        atomic_bytes: int | None = None,
    ) -> None:
        self._sequencer = Sequencer[M](sources, ring_size, max_producers=MAX_PRODUCERS)
        self._read: deque[Envelope[M]] = deque()
        self._read_bytes = 0
        self._replayed: deque[Envelope[M]] = deque()
        self._delivering = False
        self._replaying = False
        self._atomic_bytes = atomic_bytes
        self._trigger: Envelope[M] | None = None
        """The message that commits the current set."""
        self._was_in_partial_set = self.in_partial_set = False
        """True if only a part of a set of messages that were committed together was pulled."""
        self.resets = 0
        """The number of acknowledgements that were below an earlier one of their producer."""
        self.skipped_ends: dict[str, int] = {}
        """The end offsets, by journal, of messages that commit nothing and open nothing, such as duplicates."""

    @property
    def size(self) -> int:
        """The number of messages that were added and not sequenced yet."""
        return len(self._read)

    @property
    def size_bytes(self) -> int:
        """The bytes of the messages that were added and not sequenced yet."""
        return self._read_bytes

    @property
    def is_ready(self) -> bool:
        """True if `pull` has messages to work on."""
        return bool(self._read) or self._delivering

    @property
    def has_pending(self) -> bool:
        """True if a transaction that is still open was read since the last checkpoint."""
        return self._sequencer.has_pending

    @property
    def replay_range(self) -> ReplayRange | None:
        """The range to read again before `pull` can continue. None when nothing has to be read again."""
        return self._sequencer.replay_range if self._replaying and not self._replayed else None

    def read_through(self, journal: str) -> int:
        return self._sequencer.read_through(journal)

    def add(self, envelopes: Iterable[Envelope[M]]) -> None:
        """Add messages that were read from a source, in order."""
        before = len(self._read)
        self._read.extend(envelopes)
        self._read_bytes += sum(each.end - each.begin for each in islice(self._read, before, None))

    def add_replayed(self, envelopes: Iterable[Envelope[M]]) -> None:
        """Add messages of `replay_range`, in order."""
        self._replayed.extend(envelopes)

    def end_replay(self) -> None:
        """End the replay, after all messages of `replay_range` were added and pulled. Raises InvalidInput before."""
        if self._replayed:
            raise InvalidInput(f"{len(self._replayed)} replayed messages were not pulled yet")
        self._replaying = False
        self._sequencer.end_replay()

    def pull(self) -> Envelope[M] | None:
        """Return the next committed message, acknowledgements included. None when more has to be read first."""
        sequencer = self._sequencer
        while True:
            while self._replayed:
                envelope = self._replayed.popleft()
                if sequencer.replay(envelope):
                    return self._of_set(envelope)
            if self._replaying:
                return None
            if self._delivering:
                committed = sequencer.step()
                if committed is not None:
                    return self._of_set(committed)
                self._delivering = False
            if not self._read:
                return None
            envelope = self._read.popleft()
            self._read_bytes -= envelope.end - envelope.begin
            outcome = sequencer.queue(envelope)
            if outcome is _EXTENDS or outcome is _BEGINS:
                continue
            if outcome in _COMMITS:
                self._delivering, self._trigger = True, envelope
                self._replaying = outcome is QueueOutcome.ACK_COMMIT_REPLAY
            else:
                self.skipped_ends[envelope.journal] = envelope.end
                self.resets += outcome is QueueOutcome.ACK_RESET

    def _of_set(self, envelope: Envelope[M]) -> Envelope[M]:
        """Record that a message of the current set is pulled. Raises InvalidInput if the set is too long."""
        trigger = self._trigger
        assert trigger is not None
        if not self.in_partial_set:
            require_short(envelope.journal, envelope.producer, envelope.begin, trigger.end, self._atomic_bytes)
        self._was_in_partial_set, self.in_partial_set = self.in_partial_set, envelope is not trigger
        return envelope

    def put_back(self, envelope: Envelope[M]) -> None:
        """Put back the message that was pulled last and not consumed. The next `pull` returns it again."""
        self._sequencer.put_back()
        self.in_partial_set = self._was_in_partial_set
        if self._replaying:
            self._replayed.appendleft(envelope)

    def checkpoint(self, pruning: Pruning | None) -> dict[str, Source]:
        """Return the states of sources. An intake restored from them pulls exactly the messages not pulled yet."""
        return self._sequencer.checkpoint(pruning)
