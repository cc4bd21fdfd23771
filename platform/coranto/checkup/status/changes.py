"""The differences between two snapshots of a cluster. Pure.

etcd keeps revisions but no times, so a change is only known to be between the times of two snapshots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from coranto.checkup.status.values import ClusterSnapshot, StatusChange

_EXAMPLES: Final = 3


def changes_between(before: ClusterSnapshot, now: ClusterSnapshot) -> list[StatusChange]:
    """Return the differences between two snapshots, the most important first.

    If etcd's cluster differs, that is the only difference: revisions of two etcds are not comparable.
    """
    return [StatusChange(before.at, now.at, text) for text in _texts(before, now)]


def _texts(before: ClusterSnapshot, now: ClusterSnapshot) -> Iterator[str]:
    if before.cluster != now.cluster:
        yield f"etcd's cluster {before.cluster} became {now.cluster}: etcd was restored or replaced"
        return
    old, new = before.journals, now.journals
    for subject in sorted(set(now.problems) - set(before.problems)):
        yield f"new problem: {subject}"
    for subject in sorted(set(before.problems) - set(now.problems)):
        yield f"no longer a problem: {subject}"
    for name in sorted(before.brokers.keys() - now.brokers.keys()):
        yield f"broker {name} no longer answers"
    for name in sorted(now.brokers.keys() - before.brokers.keys()):
        yield f"broker {name} answers, and did not before"
    for name in sorted(before.brokers.keys() & now.brokers.keys()):
        if before.brokers[name] != now.brokers[name]:
            yield f"broker {name}: version {before.brokers[name] or 'unknown'} became {now.brokers[name] or 'unknown'}"
    for name in sorted(before.starts.keys() & now.starts.keys()):
        if before.starts[name] != now.starts[name]:
            yield f"broker {name} started again"
    if before.raft_term != now.raft_term:
        yield f"etcd's term of leadership changed from {before.raft_term} to {now.raft_term}"
    both = [name for name in new if name in old]
    recreated = [name for name in both if old[name].create_revision != new[name].create_revision]
    same = [name for name in both if old[name].create_revision == new[name].create_revision]
    yield from _about("created", [name for name in new if name not in old])
    yield from _about("deleted", [name for name in old if name not in new])
    yield from _about("deleted and created again", recreated)
    yield from _about(
        "with a changed spec", [name for name in same if old[name].mod_revision != new[name].mod_revision]
    )
    moves = Counter(
        (old[name].primary or "none", new[name].primary or "none")
        for name in same
        if old[name].primary != new[name].primary
    )
    for (source, target), count in moves.most_common():
        yield f"{count:,} {_journals(count)}: the primary {source} became {target}"


def _about(text: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _EXAMPLES:,} more" if len(names) > _EXAMPLES else ""
        yield f"{len(names):,} {_journals(len(names))} {text}: {', '.join(sorted(names)[:_EXAMPLES])}{more}"


def _journals(count: int) -> str:
    return "journal" if count == 1 else "journals"
