"""Content that a consumer or a read should have, and that is gone: what is missing, and where to go on.

Retention may remove content before it was read, or the beginning of a transaction whose acknowledgement comes later. A
journal may be deleted and created again.
"""

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
    """Content of a journal that is gone: [begin, end).

    If `made_again`, nothing from `begin` on is there, and the journal with that name ends at `end`: it was deleted and
    created again, or has lost content. With `known`, it was created again: that is the id of the journal that `begin`
    is an offset of, and `found` is the present one's.
    """

    journal: str
    begin: int
    end: int
    made_again: bool = False
    known: str = ""
    found: str = ""

    def __str__(self) -> str:
        if self.known:
            return str(JournalRecreated(self.journal, self.begin, self.known, self.found, self.end, " "))
        if self.made_again:
            return (
                f"journal {self.journal} ends at {self.end}, but is processed through {self.begin}: it was deleted and "
                "created again, or has lost content"
            )
        return f"the {self.end - self.begin} bytes [{self.begin}, {self.end}) of journal {self.journal} are gone"

    @property
    def same_through(self) -> int:
        """The end offset of the content that both journals have, if the journal's head fell; else 0."""
        return held_through(self.known, self.begin, self.found) if self.known else 0

    def error(self, advice: str) -> CorantoError:
        """Return the error for those who must not go on without the content."""
        if self.known:
            return JournalRecreated(self.journal, self.begin, self.known, self.found, self.end, advice)
        if self.made_again:
            return CorruptData(f"{self}. {advice}")
        return OffsetJump(self.journal, self.begin, self.end)


def of_another(source: Source, journal: str, head: int, found: str) -> LostContent | None:
    """Return the loss of a reader if the journal, which ends at `head` and has the id `found`, is another one.

    None if it is the same, or if that is not known.
    """
    if is_same(source.expected_id, source.read_through, found):
        return None
    return LostContent(journal, source.read_through, head, made_again=True, known=source.expected_id, found=found)


def lost_before(journal: str, offset: int, begin: int, head: int, *, is_end: bool = True) -> LostContent | None:
    """Return what is lost to a reader that continues at `offset`, of a journal with the content [begin, head).

    Raises Unavailable if it continues after `head`, and `head` may not be where the journal ends (`is_end`).
    """
    if offset > head and not is_end:
        raise Unavailable(
            f"journal {journal} is processed through {offset}, and its broker has content through {head}: a broker "
            "with the rest does not answer. Start that broker. If its disk is lost, audit the journal"
        )
    if offset > head:
        return LostContent(journal, offset, head, made_again=True)
    return LostContent(journal, offset, begin) if offset < begin else None


def lost_of(error: JournalRecreated) -> LostContent:
    """Return the loss of a reader whose journal was replaced while it was read."""
    return LostContent(error.journal, error.offset, error.head, True, error.known, error.found)


@dataclass(frozen=True, slots=True)
class PartlyLost:
    """A pending transaction of which messages before the offset `end` are gone."""

    journal: str
    producer: ProducerId
    begin: int
    end: int


def go_on_behind(source: Source, lost: LostContent, begin: int = 0) -> tuple[Source, list[PartlyLost]]:
    """Return a source that needs nothing of the lost content any more, and the transactions that it has in part only.

    A journal that was made again is read from `begin`, or from where its head fell to. Messages of the one before that
    were pending are lost.
    """
    if lost.made_again:
        at = lost.same_through
        pending = [(producer, state) for producer, state in source.producers.items() if state.is_pending]
        parts = [
            PartlyLost(lost.journal, producer, max(state.begin, at), source.read_through) for producer, state in pending
        ]
        return source.fallen_to(at, lost.found) if at else Source(begin, journal_id=lost.found), parts
    read_through = max(source.read_through, lost.end) if source.read_through >= lost.begin else source.read_through
    producers: dict[ProducerId, ProducerState] = {}
    partly = []
    for producer, state in source.producers.items():
        if state.is_pending and state.begin < lost.end and lost.begin < source.read_through:
            # What remains of it is read from behind the lost content.
            partly.append(PartlyLost(lost.journal, producer, state.begin, min(lost.end, source.read_through)))
            state = replace(state, begin=lost.end if lost.end < source.read_through else -1)
        producers[producer] = state
    return replace(source, read_through=read_through, producers=producers), partly


def pass_by(sources: Mapping[str, Source], lost: LostContent, begin: int = 0) -> dict[str, Source]:
    """Return sources that go on behind lost content, as `go_on_behind` has it, and warn of what is missing."""
    source, partly = go_on_behind(sources[lost.journal], lost, begin)
    warn_of(lost, partly)
    return {**sources, lost.journal: source}


def warn_of(lost: LostContent, partly: Iterable[PartlyLost] = ()) -> None:
    """Log what is missing: content, and parts of transactions."""
    _log.warning(
        "source.content_lost",
        journal=lost.journal,
        begin=lost.begin,
        end=lost.end,
        made_again=lost.made_again,
        same_through=lost.same_through,
        **({"journal_id_before": lost.known, "journal_id": lost.found} if lost.known else {}),
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
    """Lost content that a run has met while it read, and has not passed by yet."""

    def __init__(self) -> None:
        self._holes: dict[str, LostContent] = {}
        self._met: set[LostContent] = set()

    def __bool__(self) -> bool:
        return bool(self._holes)

    def meet(self, lost: LostContent) -> None:
        """Take in what was met. Raises its error if it was met before: then passing it by did not help."""
        if lost in self._met:
            raise lost.error("It was passed by, and met again.")
        self._met.add(lost)
        self._holes[lost.journal] = lost

    def ends(self, heads: Mapping[str, int]) -> dict[str, int]:
        """Return the offsets up to which journals can be read now: their heads, or where lost content begins."""
        return {
            journal: min(head, self._holes[journal].begin) if journal in self._holes else head
            for journal, head in heads.items()
        }

    def stuck(self, journal: str, read_through: int) -> bool:
        """Return True if no hole is the reason why a journal was not read beyond an offset.

        Otherwise a line that has lost its end is lost, too.
        """
        hole = self._holes.get(journal)
        if hole is None:
            return True
        self._holes[journal] = replace(hole, begin=min(hole.begin, read_through))
        return False

    def due(self, sources: Mapping[str, Source]) -> list[LostContent]:
        """Return, once, the lost content that is next to be read."""
        due = [hole for journal, hole in self._holes.items() if hole.begin <= sources[journal].read_through]
        for hole in due:
            del self._holes[hole.journal]
        return due
