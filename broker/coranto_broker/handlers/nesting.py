"""No new journal's name may nest with another journal's: what a transaction must ask of etcd so that none does. Pure.

A journal's files lie below a folder of its name, so names nest where one of them goes on from the other after a slash:
`shop/events` with `shop/events/eu`, but not with `shop/events-eu`. Journals that nest already may be changed, and
deleted.

The mirrored key space tells which names exist, as of a revision. That none that matters was created since is for etcd
to say, in the transaction that creates: of two that nest and are created at the same time, by whatever brokers, one
loses.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coranto.coordination.etcd import MAX_TXN_OPS, Compare, Relation, Target, absent
from coranto.names import names_above

if TYPE_CHECKING:
    from coranto_broker.replication.resolver import JournalState


def nesting_pair(state: JournalState, created: Sequence[str]) -> tuple[str, str] | None:
    """A name of `created`, and one that it nests with: of a journal that exists, or another of `created`."""
    for name in created:
        for other in _nesting(state, name):
            return name, other
    together = frozenset(created)
    for name in created:
        for above in names_above(name):
            if above in together:
                return name, above
    return None


def _nesting(state: JournalState, name: str) -> Iterator[str]:
    layout = state.layout
    yield from (above for above in names_above(name) if state.entries.get(layout.item_key(above)) is not None)
    for entry in state.entries.prefixed(f"{layout.item_key(name)}/"):
        yield entry.kv.key.removeprefix(layout.items)


def with_guards(state: JournalState, created: Sequence[str], compares: Sequence[Compare]) -> list[Compare]:
    """`compares`, and those that fail when a journal was created since `state` that nests with one of `created`.

    As many as a transaction may have. Where it takes more to ask of each name, etcd is asked of a whole folder whether
    anything was created there since; that may fail for journals that are of no matter, and is to be tried again then.
    """
    if not created:
        return list(dict.fromkeys(compares))
    layout = state.layout
    below = [Compare(f"{layout.item_key(name)}/", Target.CREATE_REVISION, 0, prefix=True) for name in created]
    above = [absent(layout.item_key(each)) for name in created for each in names_above(name)]
    guarded = list(dict.fromkeys([*compares, *above, *below]))
    if len(guarded) <= MAX_TXN_OPS:
        return guarded
    # Of what is in the folder, `state` tells what there was: that a name is new need not be asked of each.
    keys = {layout.item_key(name) for name in created}
    others = [each for each in compares if each.key not in keys or each.operand != 0]
    folder = _folder(created)
    if folder:
        outside = [absent(layout.item_key(each)) for each in (*names_above(folder), folder)]
        guarded = list(dict.fromkeys([*others, *outside, _unchanged(state, f"{layout.item_key(folder)}/")]))
        if len(guarded) <= MAX_TXN_OPS:
            return guarded
    return list(dict.fromkeys([*others, _unchanged(state, layout.items)]))


def _unchanged(state: JournalState, prefix: str) -> Compare:
    """Nothing was created below `prefix` since `state`."""
    return Compare(prefix, Target.CREATE_REVISION, state.revision + 1, Relation.LESS, prefix=True)


def _folder(names: Sequence[str]) -> str:
    """The longest name that all of `names` go on from after a slash; empty when there is none."""
    return os.path.commonpath([name.rpartition("/")[0] for name in names])
