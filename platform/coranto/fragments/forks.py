"""Forks: journals that begin with the stored fragments of another journal, and share them. Pure.

A fork of a *source* has the source's bytes up to the *fork offset*, where the two diverge. It shares the source's
stored fragments up to its *shared end*: their files stay in the source's folder, and are not copied. The rest up to the
fork offset is appended to the fork as its own initial content.

All of this is in labels, so it is invisible to Gazette's clients:

* A fork names its source, its offset, the first offset that it shares, and each journal whose fragments it shares, with
  the end of the shared part. A fork of a fork names the first source as well. So the fork's own spec locates its
  fragments, whatever happens to other journals.
* A source has a *hold* for each fork: it keeps its content from the hold's offset on. So the source's own spec limits
  the removal of its fragments.

All code that lists the fragments of a journal calls `folders_of`, which maps each offset to one folder: the first
source's up to the end of that share, then the next source's, and the fork's own from its shared end on. So files of an
earlier journal with the fork's name never become shared content.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from coranto import labels
from coranto.errors import InvalidInput
from coranto.fragments.fragment import MAX_OFFSET, Fragment
from coranto.wire import protocol_pb2 as pb

MAX_SHARES: Final = 16
"""Maximum journals whose fragments a fork may share. A fork of a fork shares the journals of both."""


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """The fragments in a journal's folder that lie wholly within the offsets [begin, end)."""

    journal: str
    begin: int
    end: int

    def contains(self, fragment: Fragment) -> bool:
        return self.covers(fragment.begin, fragment.end)

    def covers(self, begin: int, end: int) -> bool:
        return self.begin <= begin and end <= self.end


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork: the journal `name` has the bytes [begin, offset) of `source`, and diverges there.

    It shares stored fragments up to `shared_end`, which is `begin` if it shares none. `shares` are the journals that
    have them. `forming` is True until it has all bytes up to `offset`.
    """

    source: str
    name: str
    offset: int
    shared_end: int
    begin: int
    shares: tuple[Share, ...] = ()
    forming: bool = False


def is_label(name: str) -> bool:
    """Return True for the name of a label of forks or of their sources."""
    return name.startswith(labels.FORKS)


def fork_of(spec: pb.JournalSpec) -> Fork | None:
    """Return the fork that a spec's labels describe, or None. Raises InvalidInput for invalid labels."""
    source = labels.value_of(spec.labels, labels.FORK_OF)
    if not source:
        return None
    begin = _offset(spec, labels.FORK_BEGIN, labels.value_of(spec.labels, labels.FORK_BEGIN))
    shares = _in_turn(begin, _pairs(spec, labels.FORK_SHARES, spec.labels).items())
    return Fork(
        source,
        spec.name,
        _offset(spec, labels.FORK_OFFSET, labels.value_of(spec.labels, labels.FORK_OFFSET)),
        max((share.end for share in shares), default=begin),
        begin,
        shares,
        labels.value_of(spec.labels, labels.FORK_STATE) == labels.FORMING,
    )


def shares_of(source: pb.JournalSpec, begin: int, end: int) -> tuple[Share, ...]:
    """Return the shares of a fork that shares the stored fragments of `source` within [begin, end)."""
    above = fork_of(source)
    ends = [(each.journal, min(each.end, end)) for each in above.shares] if above is not None else []
    return _in_turn(begin, [*ends, (source.name, end)])


def _in_turn(begin: int, ends: Iterable[tuple[str, int]]) -> tuple[Share, ...]:
    """Return consecutive shares: the first begins at `begin`, and each ends at one of `ends`."""
    found: list[Share] = []
    for journal, end in sorted(ends, key=lambda each: each[1]):
        if begin < end:
            found.append(Share(journal, begin, end))
            begin = end
    return tuple(found)


def fork_labels(fork: Fork) -> list[tuple[str, str]]:
    """Return the labels that describe a fork in its spec."""
    return [
        (labels.FORK_OF, fork.source),
        (labels.FORK_OFFSET, str(fork.offset)),
        (labels.FORK_BEGIN, str(fork.begin)),
        *((labels.FORK_SHARES, f"{share.end}/{share.journal}") for share in fork.shares),
        *([(labels.FORK_STATE, labels.FORMING)] if fork.forming else []),
    ]


def hold_for(fork: Fork) -> tuple[str, str]:
    """Return the source's label that keeps a fork's shared content."""
    return labels.FORK_HOLD, f"{fork.begin}/{fork.name}"


def holds_of(spec: pb.JournalSpec) -> Mapping[str, int]:
    """Return the forks that a journal keeps content for, each with the first kept offset.

    Raises InvalidInput for an invalid hold.
    """
    return _pairs(spec, labels.FORK_HOLD, spec.labels)


def require_unread(specs: Iterable[pb.JournalSpec], left: Collection[str]) -> None:
    """Check that no journal is a fork of one in `left`, the journals that a consumer has read and no longer reads.

    Otherwise the consumer, for example after a promotion with forks as its sources, would read their shared content
    again. Raises InvalidInput.
    """
    for spec in specs:
        source = labels.value_of(spec.labels, labels.FORK_OF)
        if source in left:
            raise InvalidInput(
                f"is a fork of {source}, which the consumer has read up to its checkpoint. It would process the shared "
                f"content twice: make {source} its source, or start a consumer of another name on the fork",
                field=f"source {spec.name}",
            )


def is_held(holds: Mapping[str, int], fork: str, begin: int) -> bool:
    """Return True if a journal with these holds keeps its content from `begin` on for a fork."""
    return holds.get(fork, begin + 1) <= begin


def held_from(spec: pb.JournalSpec) -> int:
    """Return the first offset that a journal keeps for its forks; MAX_OFFSET without any.

    An invalid hold keeps everything. A fork that is forming keeps everything, too, because its content is yet to be
    compared with its source's.
    """
    if labels.value_of(spec.labels, labels.FORK_STATE) == labels.FORMING:
        return 0
    try:
        return min(holds_of(spec).values(), default=MAX_OFFSET)
    except InvalidInput:
        return 0


def first_offset(spec: pb.JournalSpec) -> int:
    """Return the first offset that a journal ever had: 0, or the first offset that a fork shares."""
    try:
        fork = fork_of(spec)
    except InvalidInput:
        return 0
    return fork.begin if fork is not None else 0


def folders_of(spec: pb.JournalSpec) -> tuple[Share, ...]:
    """Return the folders that have a journal's fragments, its own first, each with the offsets that count there.

    Raises InvalidInput for invalid labels of a fork.
    """
    fork = fork_of(spec)
    if fork is None:
        return (Share(spec.name, 0, MAX_OFFSET),)
    return (Share(spec.name, fork.shared_end, MAX_OFFSET), *fork.shares)


def counts_in(folders: Iterable[Share], fragment: Fragment) -> bool:
    """Return True if a fragment is in one of these folders and counts there."""
    return any(folder.journal == fragment.journal and folder.contains(fragment) for folder in folders)


def without_expired_shares(spec: pb.JournalSpec, fragments: Iterable[Fragment], now: float) -> list[Fragment]:
    """Return a journal's listed fragments without shared ones that are older than its own retention.

    The files of shared fragments belong to the source, so the fork only omits them from the list: from the beginning on
    and without a new gap. Unlike in `retention`, a later gap keeps no fragment: the gap is in the fork's own content,
    where retention has removed it, because no shared content is missing. `now` is wall time in seconds.
    """
    listed = list(fragments)
    retention = spec.fragment.retention.ToNanoseconds() / 1e9
    gone: set[Fragment] = set()
    shared = (each for each in listed if each.journal != spec.name)
    for each in sorted(shared, key=lambda fragment: (fragment.end, fragment.begin)) if retention > 0 else ():
        if each.end > held_from(spec) or now - each.mod_time < retention:
            break
        gone.add(each)
    return [each for each in listed if each not in gone]


def _pairs(spec: pb.JournalSpec, name: str, found: pb.LabelSet) -> dict[str, int]:
    """Return the values `<offset>/<journal>` of a label as offsets by journal: the lowest of several offsets."""
    pairs: dict[str, int] = {}
    for value in labels.values_of(found, name):
        offset, _, journal = value.partition("/")
        at = _offset(spec, name, offset)
        if not journal:
            raise InvalidInput(f"{value!r} of {spec.name} is not <offset>/<journal>", field=name)
        pairs[journal] = min(at, pairs.get(journal, at))
    return pairs


def _offset(spec: pb.JournalSpec, name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or int(text) > MAX_OFFSET:
        raise InvalidInput(f"{text!r} of {spec.name} is not an offset", field=name)
    return int(text)
