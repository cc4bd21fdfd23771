"""Positions of journals, which orchestrators store to detect growth, and digests of positions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coranto.client.heads import Heads
from coranto.journal_ids import held_through, same_journal
from coranto.offsets import JournalOffset


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """A journal's write head, the etcd revision that created it, and its id, empty if unknown."""

    head: int
    create_revision: int
    journal_id: str = ""

    @property
    def json_value(self) -> list[int | str]:
        """The position as a JSON value. `from_json` reads it."""
        return [self.create_revision, self.head, *([self.journal_id] if self.journal_id else [])]

    @classmethod
    def from_json(cls, value: Sequence[int | str]) -> JournalPosition:
        """Return the position from `json_value`. Raises ValueError, TypeError or IndexError for anything else."""
        return cls(int(value[1]), int(value[0]), str(value[2]) if len(value) > 2 else "")

    @property
    def offset(self) -> JournalOffset:
        """The head with the journal's id."""
        return JournalOffset(self.head, self.journal_id)

    def clamped_to(self, now: JournalPosition) -> JournalPosition:
        """Return the position up to where the current journal still has the content before this position.

        That is this position, unless the journal was recreated or its head fell.
        """
        if same_journal(self.create_revision, self.journal_id, self.head, now.create_revision, now.journal_id):
            return self
        return replace(now, head=held_through(self.journal_id, self.head, now.journal_id))


def positions_of(heads: Heads) -> dict[str, JournalPosition]:
    """Return the positions of journals whose heads are known, in order of their names."""
    return {
        each.journal: JournalPosition(each.head, each.create_revision, each.journal_id) for each in heads if each.known
    }


def present_positions(heads: Heads, before: Mapping[str, JournalPosition]) -> dict[str, JournalPosition]:
    """Return current positions by name. A journal whose head is unknown keeps its earlier position."""
    unknown = {each.journal: before[each.journal] for each in heads.unknown if each.journal in before}
    return dict(sorted({**positions_of(heads), **unknown}.items()))


def heads_of(positions: Mapping[str, JournalPosition]) -> dict[str, int]:
    """Return the offset vector of positions, with the ids of the journals."""
    return {journal: position.offset for journal, position in positions.items()}


def begins_of(now: Mapping[str, JournalPosition], before: Mapping[str, JournalPosition]) -> dict[str, int]:
    """Return the offset vector where growth began: 0 for a recreated journal, the lower head after a loss."""
    held = {journal: at.clamped_to(now.get(journal, at)) for journal, at in before.items()}
    return {journal: at.offset if at is before[journal] or at.head else 0 for journal, at in held.items()}


def grown_bytes(now: Mapping[str, JournalPosition], before: Mapping[str, JournalPosition]) -> int:
    """Return the growth of journals in bytes, new journals included."""
    grown = 0
    for journal, at in now.items():
        known = before.get(journal)
        grown += max(0, at.head - (0 if known is None else known.clamped_to(at).head))
    return grown


def vector_digest(offsets: Mapping[str, int]) -> str:
    """Return a digest of an offset vector: 32 hexadecimal digits, for any number of journals."""
    text = "".join(f"{journal}\0{offset}\0" for journal, offset in sorted(offsets.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
