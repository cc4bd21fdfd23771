"""Positions of journals, as an orchestrator keeps them to see what has grown since, and digests of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from coranto.client.heads import Heads


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """A journal's write head, and the etcd revision that created it. A journal that is created anew begins at 0."""

    head: int
    create_revision: int


def positions_of(heads: Heads) -> dict[str, JournalPosition]:
    """Return the positions of journals whose heads are known, in order of their names."""
    return {each.journal: JournalPosition(each.head, each.create_revision) for each in heads if each.known}


def present_positions(heads: Heads, before: Mapping[str, JournalPosition]) -> dict[str, JournalPosition]:
    """Return present positions by name. A journal whose head nobody can tell is taken to be where it was before."""
    unknown = {each.journal: before[each.journal] for each in heads.unknown if each.journal in before}
    return dict(sorted({**positions_of(heads), **unknown}.items()))


def heads_of(positions: Mapping[str, JournalPosition]) -> dict[str, int]:
    """Return the offset vector of positions."""
    return {journal: position.head for journal, position in positions.items()}


def grown_bytes(now: Mapping[str, JournalPosition], before: Mapping[str, JournalPosition]) -> int:
    """Return the bytes by which journals have grown, those that were created since included."""
    grown = 0
    for journal, at in now.items():
        known = before.get(journal)
        same = known is not None and known.create_revision == at.create_revision
        grown += max(0, at.head - (known.head if known is not None and same else 0))
    return grown


def vector_digest(offsets: Mapping[str, int]) -> str:
    """Return a digest of an offset vector: 32 hexadecimal digits, for any number of journals."""
    text = "".join(f"{journal}\0{offset}\0" for journal, offset in sorted(offsets.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
