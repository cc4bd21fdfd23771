"""The choice of a fork's shared fragments, and its spec. Pure.

A fork shares no fragment that may already be under removal, by a plan made before the source held it. Plans consist
of fragments that are older than the source's retention. So a fork shares only those that are younger, by a
*margin* that covers the time for every planner to learn of the hold, and the difference of clocks. Older ones that
another fork holds are in no plan, but the fork's inherited retention would leave them out.

The shared content has only the gaps of its source. Fragments are stored in any order, so one that is not stored yet
may lie between others. The fork shares the fragments below it, and the rest is copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from coranto import labels
from coranto.errors import ContentGone, InvalidInput
from coranto.fragments.cover_set import CoverSet
from coranto.fragments.forks import Fork, held_from, hold_for, is_label, shares_of
from coranto.fragments.forks import fork_labels as labels_of
from coranto.fragments.fragment import MAX_OFFSET, Fragment
from coranto.specs import durability
from coranto.specs.validation import duration_seconds, may_write
from coranto.wire import protocol_pb2 as pb

MAX_MARGIN_SECONDS: Final = 600.0
_OURS: Final = "coranto.dev/"
_DESCRIBING: Final = frozenset({labels.CONTENT_TYPE, labels.LINES, labels.MESSAGE_TYPE, labels.MESSAGE_SUBTYPE})
"""Labels that describe the content. A fork always has them."""


@dataclass(frozen=True, slots=True)
class SharedSpan:
    """The content that a fork shares: all stored fragments within [begin, end)."""

    begin: int
    end: int


def margin_seconds(spec: pb.JournalSpec) -> float:
    """Return how much younger than the retention of a journal its fragments must be to be shared."""
    return min(MAX_MARGIN_SECONDS, duration_seconds(spec.fragment.retention) / 4)


def is_safe(spec: pb.JournalSpec, fragment: Fragment, now: float, margin: float) -> bool:
    """Return True if no plan of a journal's retention can have a fragment, `margin` seconds around `now`."""
    held = fragment.journal != spec.name or fragment.end > held_from(spec)
    return held or _is_young(spec, fragment, now, margin)


def _is_young(spec: pb.JournalSpec, fragment: Fragment, now: float, margin: float) -> bool:
    retention = duration_seconds(spec.fragment.retention)
    return retention <= 0 or now - fragment.mod_time < retention - margin


def choose(source: pb.JournalSpec, fragments: Iterable[Fragment], offset: int, head: int, now: float) -> SharedSpan:
    """Choose the fragments that a fork at `offset` shares of its source's `fragments`, at wall time `now` in seconds.

    The fork may begin later than the source, where the source's retention is about to remove the beginning. It shares
    nothing behind the first unstored content. Raises ContentGone if retention has removed all content below
    `offset`.
    """
    known = CoverSet(fragments)
    first = known.begin_offset if len(known) else head
    if offset < first:
        raise ContentGone({source.name: (offset, first)}, {source.name: first})
    stored = _shareable(known, offset)
    begin = end = stored.end_offset if len(stored) else first
    for fragment in reversed(list(stored)):
        if not _is_young(source, fragment, now, margin_seconds(source)):
            break
        begin = fragment.begin
    if begin == end and len(stored):
        begin = end = stored[len(stored) - 1].begin  # It stays only until there is more. So it is copied.
    return SharedSpan(begin, end)


def _shareable(known: CoverSet[Fragment], offset: int) -> CoverSet[Fragment]:
    """Return the stored fragments that are wholly below `offset`, and below all content that is not stored so."""
    stored = CoverSet(each for each in known if each.backing_store and each.end <= offset)
    limit = min((_uncovered(stored, each.begin, min(each.end, offset)) for each in known), default=offset)
    return CoverSet(each for each in stored if each.end <= limit)


def missing(fragments: Iterable[Fragment], listed: Iterable[Fragment], shared: SharedSpan) -> int | None:
    """Return the first offset of a shared span that a source's `fragments` have, and a fork's `listed` ones do not.

    Return None if there is none.
    """
    covered = CoverSet(each for each in listed if each.backing_store)
    for each in CoverSet(fragments):
        begin, end = max(each.begin, shared.begin), min(each.end, shared.end)
        if begin < end and (at := _uncovered(covered, begin, end)) < end:
            return at
    return None


def _uncovered(covers: CoverSet[Fragment], begin: int, end: int) -> int:
    """Return the first offset of [begin, end) that nothing covers; MAX_OFFSET if all are covered."""
    while begin < end:
        index, found = covers.query(begin)
        if not found:
            return begin
        begin = covers[index].end
    return MAX_OFFSET


def fork_at(source: pb.JournalSpec, name: str, offset: int, shared: SharedSpan) -> Fork:
    """Return the fork of a source that is to be made."""
    shares = shares_of(source, shared.begin, shared.end)
    return Fork(source.name, name, offset, shared.end, shared.begin, shares, forming=True)


def new_spec(source: pb.JournalSpec, fork: Fork, *, same_labels: bool = False) -> pb.JournalSpec:
    """Return the spec of a fork. It is the source's, but of its labels a fork has only those that say what content is.

    With its other labels, selectors that find the source would find the fork, too. With `same_labels` it has all,
    except those that make the source a part of a stream, a ledger or a registry.
    """
    spec = pb.JournalSpec()
    spec.CopyFrom(source)
    spec.name = fork.name
    spec.suspend.CopyFrom(pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.NONE, offset=fork.shared_end))
    if not may_write(spec):
        spec.flags = pb.JournalSpec.O_RDWR
    kept = [(name, value) for name, value in labels.as_pairs(source.labels) if _stays(name, value, same_labels)]
    spec.labels.CopyFrom(labels.label_set([*kept, *labels_of(fork)]))
    return spec


def _stays(name: str, value: str, same_labels: bool) -> bool:
    if name in _DESCRIBING or name in durability.LABELS:
        return True
    if name == labels.MANAGED_BY and value in labels.OF_RECORDS:
        return False
    return same_labels and not name.startswith(_OURS)


def holding(source: pb.JournalSpec, fork: Fork) -> pb.JournalSpec:
    """Return the spec of a source that keeps a fork's shared content."""
    spec = pb.JournalSpec()
    spec.CopyFrom(without_hold(source, fork.name))
    if fork.shares:
        spec.labels.CopyFrom(labels.add_value(spec.labels, *hold_for(fork)))
    return spec


def without_hold(source: pb.JournalSpec, name: str) -> pb.JournalSpec:
    """Return the spec of a source that keeps nothing for the fork `name`."""
    spec = pb.JournalSpec()
    spec.CopyFrom(source)
    left = [
        label
        for label in source.labels.labels
        if label.name != labels.FORK_HOLD or label.value.partition("/")[2] != name
    ]
    spec.labels.CopyFrom(pb.LabelSet(labels=left))
    return spec


def complete(spec: pb.JournalSpec, extra: pb.LabelSet | None) -> pb.JournalSpec:
    """Return the spec of a fork that has all of its first content, with `extra` labels in place of its own."""
    done = pb.JournalSpec()
    done.CopyFrom(spec)
    found = labels.without(spec.labels, labels.FORK_STATE)
    for name in {label.name for label in extra.labels} if extra is not None else ():
        if is_label(name):
            raise InvalidInput(f"{name} is a label of forks themselves; leave it out", field="labels")
        found = labels.without(found, name)
    pairs = [*labels.as_pairs(found), *(labels.as_pairs(extra) if extra is not None else ())]
    done.labels.CopyFrom(labels.label_set(pairs))
    return done
