"""Content that is gone before it was read: detection, reports, and the position to continue from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import structlog

from coranto.errors import CorantoError, CorruptData, JournalRecreated, OffsetJump, Unavailable
from coranto.journal_ids import held_through, is_same
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.uuids import ProducerId

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LostContent:
    """Content of a journal that is gone: [begin, end), or, if `recreated`, all content after `begin`.

    A `recreated` journal ends at `end`, and was deleted and created again, or has lost its newest content. The ids
    prove it if `known` is set: the id of the journal that `begin` refers to. `found` is the current id.
    """

    journal: str
    begin: int
    end: int
    recreated: bool = False
    known: str | None = None
    found: str | None = None

    def __str__(self) -> str:
        if self.known and self.found:
            return str(self.error(" "))
        if self.recreated:
            return (
                f"journal {self.journal} ends at {self.end}, but is processed through {self.begin}: it was deleted and "
                "created again, or has lost content"
            )
        return f"the {self.end - self.begin} bytes [{self.begin}, {self.end}) of journal {self.journal} are gone"

    @property
    def same_through(self) -> int:
        """The end offset of the content that both ids share, if the journal's head fell; else 0."""
        return held_through(self.known, self.begin, self.found) if self.known and self.found else 0

    def error(self, advice: str) -> CorantoError:
        """Return the error for a reader that must not continue without the content."""
        if self.known and self.found:
            return JournalRecreated(self.journal, self.begin, self.known, self.found, self.end, advice)
        if self.recreated:
            return CorruptData(f"{self}. {advice}")
        return OffsetJump(self.journal, self.begin, self.end)


def loss_by_id(source: Source, journal: str, head: int, found: str) -> LostContent | None:
    """Return the loss of a reader if the id `found` shows that the journal lacks content that was read, or None."""
    if is_same(source.expected_id, source.read_through, found):
        return None
    return LostContent(journal, source.read_through, head, recreated=True, known=source.expected_id, found=found)


def loss_by_offsets(journal: str, offset: int, begin: int, head: int, *, is_end: bool = True) -> LostContent | None:
    """Return the loss of a reader at `offset` if a journal now has [begin, head), or None.

    Raises Unavailable for an offset after `head` that may not be the journal's end (`is_end`).
    """
    if offset > head and not is_end:
        raise Unavailable(
            f"journal {journal} is processed through {offset}, and its broker has content through {head}: a broker "
            "with the rest does not answer. Start that broker. If its disk is lost, audit the journal"
        )
    if offset > head:
        return LostContent(journal, offset, head, recreated=True)
    return LostContent(journal, offset, begin) if offset < begin else None


def loss_from_error(error: JournalRecreated) -> LostContent:
    return LostContent(error.journal, error.offset, error.head, True, error.known, error.found)


@dataclass(frozen=True, slots=True)
class PartlyLost:
    """A pending transaction that has lost its messages before the offset `end`."""

    journal: str
    producer: ProducerId
    begin: int
    end: int


def continue_after(source: Source, lost: LostContent, begin: int = 0) -> tuple[Source, list[PartlyLost]]:
    """Return the source after lost content, and partly lost transactions. A recreated journal is read from `begin`."""
    if lost.recreated:
        at = lost.same_through
        pending = [(producer, state) for producer, state in source.producers.items() if state.is_pending]
        parts = [
            PartlyLost(lost.journal, producer, max(state.begin, at), source.read_through) for producer, state in pending
        ]
        found = lost.found or ""
        return source.after_head_fell(at, found) if at else Source(begin, journal_id=found), parts
    read_through = max(source.read_through, lost.end) if source.read_through >= lost.begin else source.read_through
    producers: dict[ProducerId, ProducerState] = {}
    partly = []
    for producer, state in source.producers.items():
        if state.is_pending and state.begin < lost.end and lost.begin < source.read_through:
            # The rest of the transaction is read from the end of the lost content.
            partly.append(PartlyLost(lost.journal, producer, state.begin, min(lost.end, source.read_through)))
            state = replace(state, begin=lost.end if lost.end < source.read_through else -1)
        producers[producer] = state
    return replace(source, read_through=read_through, producers=producers), partly


def log_loss(lost: LostContent, partly: Iterable[PartlyLost] = (), **context: str) -> None:
    """Log lost content, with `context` as further fields, and partly lost transactions."""
    _log.warning(
        "source.content_lost",
        journal=lost.journal,
        begin=lost.begin,
        end=lost.end,
        recreated=lost.recreated,
        same_through=lost.same_through,
        **({"journal_id_before": lost.known, "journal_id": lost.found} if lost.known else {}),
        **context,
    )
    for each in partly:
        _log.warning(
            "source.transaction_lost_in_part",
            journal=each.journal,
            producer=each.producer.hex(),
            begin=each.begin,
            end=each.end,
        )


class Holes:
    """Lost content that a read has found, and that is not skipped yet."""

    def __init__(self) -> None:
        self._holes: dict[str, LostContent] = {}
        self._recorded: set[LostContent] = set()

    def __bool__(self) -> bool:
        return bool(self._holes)

    def record(self, lost: LostContent) -> None:
        """Record lost content. Raises its error if it was recorded before, because skipping it did not help."""
        if lost in self._recorded:
            raise lost.error("It was skipped, and found again.")
        self._recorded.add(lost)
        self._holes[lost.journal] = lost

    def ends(self, heads: Mapping[str, int]) -> dict[str, int]:
        """Return the offsets to read journals to: their heads, or the begin offsets of lost content."""
        return {
            journal: min(head, self._holes[journal].begin) if journal in self._holes else head
            for journal, head in heads.items()
        }

    def is_blocked(self, journal: str, read_through: int) -> bool:
        """Return True if reading stopped at an offset without lost content. Otherwise, it lacks the end of a line."""
        hole = self._holes.get(journal)
        if hole is None:
            return True
        self._holes[journal] = replace(hole, begin=min(hole.begin, read_through))
        return False

    def pop_reached(self, sources: Mapping[str, Source]) -> list[LostContent]:
        """Remove and return the lost content that reading has reached."""
        due = [hole for journal, hole in self._holes.items() if hole.begin <= sources[journal].read_through]
        for hole in due:
            del self._holes[hole.journal]
        return due
