"""From what was read of a shard's sources to committed messages, one at a time. Pure.

The shell gives it messages as they are read (`add`) and takes committed ones (`pull`) until there are none without
further reading. What must be read is either more of the sources or, when an acknowledgement commits messages that the
sequencer holds no longer, a piece of a journal once more (`replay_range`, `add_replayed`, `end_replay`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, Generic, TypeVar

from coranto.errors import InvalidInput
from coranto.messages import Envelope, Outcome, ReplayRange, Sequencer, Source
from coranto.messages.sequencer import DEFAULT_RING_SIZE

M = TypeVar("M")

MAX_PRODUCERS: Final = 250_000
"""Of a source, that are known at once: all of them are in each checkpoint. Making one of so many takes seconds, in
which the process does nothing else; of many more, it would lose its lease, and with it all its shards."""

_COMMITS = frozenset({Outcome.OUTSIDE_COMMIT, Outcome.ACK_EMPTY, Outcome.ACK_COMMIT_RING, Outcome.ACK_COMMIT_REPLAY})
# Most messages are these, so looking at them costs no hashing.
_BEGINS, _EXTENDS = Outcome.CONTINUE_BEGIN, Outcome.CONTINUE_EXTEND


class Intake(Generic[M]):
    """Sequences the messages of one shard."""

    def __init__(self, sources: Mapping[str, Source], ring_size: int = DEFAULT_RING_SIZE) -> None:
        self._sequencer = Sequencer[M](sources, ring_size, max_producers=MAX_PRODUCERS)
        self._read: deque[Envelope[M]] = deque()
        self._read_bytes = 0
        self._replayed: deque[Envelope[M]] = deque()
        self._delivering = False
        self._replaying = False
        self.resets = 0
        """How many acknowledgements were met that lie below an earlier one of their producer."""
        self.passed_over: dict[str, int] = {}
        """How far journals were read by messages that commit nothing and open nothing, such as duplicates."""

    @property
    def size(self) -> int:
        """How many messages were read and not looked at yet."""
        return len(self._read)

    @property
    def size_bytes(self) -> int:
        """How many bytes they have."""
        return self._read_bytes

    @property
    def is_ready(self) -> bool:
        """Whether `pull` has something to work on."""
        return bool(self._read) or self._delivering

    @property
    def has_pending(self) -> bool:
        """Whether a producer's transaction was met since the last checkpoint that is not decided yet."""
        return self._sequencer.has_pending

    @property
    def replay_range(self) -> ReplayRange | None:
        """What is to be read again before `pull` can go on."""
        return self._sequencer.replay_range if self._replaying and not self._replayed else None

    def read_through(self, journal: str) -> int:
        return self._sequencer.read_through(journal)

    def add(self, envelopes: Iterable[Envelope[M]]) -> None:
        """Messages that were read of a source, in order."""
        before = len(self._read)
        self._read.extend(envelopes)
        self._read_bytes += sum(each.end - each.begin for each in islice(self._read, before, None))

    def add_replayed(self, envelopes: Iterable[Envelope[M]]) -> None:
        """Messages of `replay_range`, in order."""
        self._replayed.extend(envelopes)

    def end_replay(self) -> None:
        """All messages of `replay_range` were added and pulled."""
        if self._replayed:
            raise InvalidInput(f"{len(self._replayed)} replayed messages were not pulled yet")
        self._replaying = False
        self._sequencer.end_replay()

    def pull(self) -> Envelope[M] | None:
        """The next committed message, acknowledgements included; None when more has to be read first."""
        sequencer = self._sequencer
        while True:
            while self._replayed:
                envelope = self._replayed.popleft()
                if sequencer.replay(envelope):
                    return envelope
            if self._replaying:
                return None
            if self._delivering:
                committed = sequencer.step()
                if committed is not None:
                    return committed
                self._delivering = False
            if not self._read:
                return None
            envelope = self._read.popleft()
            self._read_bytes -= envelope.end - envelope.begin
            outcome = sequencer.queue(envelope)
            if outcome is _EXTENDS or outcome is _BEGINS:
                continue
            if outcome in _COMMITS:
                self._delivering = True
                self._replaying = outcome is Outcome.ACK_COMMIT_REPLAY
            else:
                self.passed_over[envelope.journal] = envelope.end
                self.resets += outcome is Outcome.ACK_RESET

    def put_back(self, envelope: Envelope[M]) -> None:
        """Have the message pulled last, which was not consumed, pulled again."""
        self._sequencer.put_back()
        if self._replaying:
            self._replayed.appendleft(envelope)

    def checkpoint(self, prune_horizon_s: float) -> dict[str, Source]:
        """What to restore from, so that exactly the messages not pulled yet are pulled again."""
        return self._sequencer.checkpoint(prune_horizon_s)
