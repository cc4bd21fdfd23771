"""The choice of a fork's shared fragments, and its spec. Pure.

A fork shares no fragment whose removal may have been planned before the source held it. Plans contain only fragments
that are older than the source's retention. So a fork shares only fragments that are younger, by a *margin* that covers
the time for every planner to learn of the hold, and clock differences. Older fragments that another fork holds are in
no plan, but the fork's inherited retention would omit them.

The shared content has no gaps that its source does not have. Fragments are stored in any order, so an unstored fragment
may lie between stored ones. The fork shares the fragments below it, and the rest is copied.
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
    """Return the margin: shared fragments must be younger than the journal's retention by this time."""
    return min(MAX_MARGIN_SECONDS, duration_seconds(spec.fragment.retention) / 4)


def is_safe(spec: pb.JournalSpec, fragment: Fragment, now: float, margin: float) -> bool:
    """Return True if no removal plan of a journal can contain a fragment, within `margin` seconds of `now`."""
    held = fragment.journal != spec.name or fragment.end > held_from(spec)
    return held or _is_young(spec, fragment, now, margin)


def _is_young(spec: pb.JournalSpec, fragment: Fragment, now: float, margin: float) -> bool:
    retention = duration_seconds(spec.fragment.retention)
    return retention <= 0 or now - fragment.mod_time < retention - margin


def choose(source: pb.JournalSpec, fragments: Iterable[Fragment], offset: int, head: int, now: float) -> SharedSpan:
    """Choose the `fragments` of the source that a fork at `offset` shares, at wall time `now` in seconds.

    The fork may begin later than the source, if the source's retention is about to remove the beginning. It shares
    nothing after the first unstored content. Raises ContentGone if retention has removed all content below
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
        begin = end = stored[len(stored) - 1].begin  # Retention keeps it only while it is the last. So it is copied.
    return SharedSpan(begin, end)


def _shareable(known: CoverSet[Fragment], offset: int) -> CoverSet[Fragment]:
    """Return the stored fragments that end at or below `offset`, and below the first content that they do not cover."""
    stored = CoverSet(each for each in known if each.backing_store and each.end <= offset)
    limit = min((_uncovered(stored, each.begin, min(each.end, offset)) for each in known), default=offset)
    return CoverSet(each for each in stored if each.end <= limit)


def missing(fragments: Iterable[Fragment], listed: Iterable[Fragment], shared: SharedSpan) -> int | None:
    """Return the first offset of a shared span that the source's `fragments` cover, but the fork's `listed` do not.

    Return None if there is none.
    """
    covered = CoverSet(each for each in listed if each.backing_store)
    for each in CoverSet(fragments):
        begin, end = max(each.begin, shared.begin), min(each.end, shared.end)
        if begin < end and (at := _uncovered(covered, begin, end)) < end:
            return at
    return None


def _uncovered(covers: CoverSet[Fragment], begin: int, end: int) -> int:
    """Return the first uncovered offset of [begin, end); MAX_OFFSET if all are covered."""
    while begin < end:
        index, found = covers.query(begin)
        if not found:
            return begin
        begin = covers[index].end
    return MAX_OFFSET


def fork_at(source: pb.JournalSpec, name: str, offset: int, shared: SharedSpan) -> Fork:
    """Return the fork to create, which is forming."""
    shares = shares_of(source, shared.begin, shared.end)
    return Fork(source.name, name, offset, shared.end, shared.begin, shares, forming=True)


def new_spec(source: pb.JournalSpec, fork: Fork, *, same_labels: bool = False) -> pb.JournalSpec:
    """Return the spec of a fork: the source's, with only the labels that describe content or demand durability.

    With other labels, selectors that match the source would match the fork, too. With `same_labels` it has all labels,
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


def with_hold(source: pb.JournalSpec, fork: Fork) -> pb.JournalSpec:
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
    """Return the spec of a fork that has all its initial content. `extra` labels replace its own of the same names."""
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
