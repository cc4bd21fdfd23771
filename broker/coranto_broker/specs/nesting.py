"""Checks and etcd compares that keep a new journal's name from nesting with another journal's. Pure.

A journal's files lie below a folder of its name. Names nest if one continues the other after a slash: `shop/events`
nests with `shop/events/eu`, but not with `shop/events-eu`. Journals that nest already may be changed and deleted.

The mirrored key space has the names that exist as of a revision. The transaction that creates a journal lets etcd check
that no journal with a nesting name was created since. If two brokers create nesting journals concurrently, one fails.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coranto.coordination.etcd import MAX_TXN_OPS, Compare, CompareTarget, Relation, absent
from coranto.names import names_above

if TYPE_CHECKING:
    from coranto_broker.replication.resolver import JournalState


def nesting_pair(state: JournalState, created: Sequence[str]) -> tuple[str, str] | None:
    """Return two nesting names, or None. The first is of `created`, the second of `created` or an existing journal."""
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
    """Add compares that fail if a journal that nests with one of `created` was created since `state`.

    If compares by name do not fit into one transaction, etcd checks instead that no journal was created in the common
    folder, or at all. That may also fail because of unrelated journals; the caller then tries again.
    """
    if not created:
        return list(dict.fromkeys(compares))
    layout = state.layout
    below = [Compare(f"{layout.item_key(name)}/", CompareTarget.CREATE_REVISION, 0, prefix=True) for name in created]
    above = [absent(layout.item_key(each)) for name in created for each in names_above(name)]
    guarded = list(dict.fromkeys([*compares, *above, *below]))
    if len(guarded) <= MAX_TXN_OPS:
        return guarded
    # `state` has the content of the folder, so no compare is needed to check that each name is new.
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
    """Return a compare that fails if a key below `prefix` was created since `state`."""
    return Compare(prefix, CompareTarget.CREATE_REVISION, state.revision + 1, Relation.LESS, prefix=True)


def _folder(names: Sequence[str]) -> str:
    """Return the longest common folder of `names`, or ""."""
    return os.path.commonpath([name.rpartition("/")[0] for name in names])
