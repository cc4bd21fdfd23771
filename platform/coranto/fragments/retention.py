"""Retention: the choice of fragments to remove. Pure. Brokers and `coranto journals prune` both use it.

A stored fragment is *old* if it was stored at least `retention` ago. Only fragments at the beginning of the journal are
removed, so that no new gap appears: every offset from the first remaining one on is still covered if it was covered
before. These fragments are kept at any age:

* Every fragment that ends above the end of a kept one, such as a fragment that is not old. So even where fragments
  overlap, no new gap appears.
* The stored fragment with the highest end. It shows the journal's head if no broker has more content.
* The fragments on both sides of a gap, if the one after it was stored less than six hours ago. For that time, readers
  also assume that the missing content may still be stored.
* Every fragment that ends above the first offset that the journal keeps for its forks
  (`coranto.fragments.forks`).

Fragments that are in no store yet are not old.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from coranto.fragments.fragment import MAX_OFFSET, Fragment

GAP_SECONDS: Final = 6 * 60 * 60


def expired(
    fragments: Iterable[Fragment], retention_seconds: float, now: float, held_from: int = MAX_OFFSET
) -> list[Fragment]:
    """Return the stored fragments to remove, in the order of removal.

    A removal in this order leaves no new gap if it stops early. `fragments` are all known fragments of one journal, in
    any order. `now` is wall time in seconds. A retention of zero or less keeps everything. `held_from` is the first
    offset that is kept for forks.
    """
    known = sorted(fragments, key=lambda fragment: (fragment.begin, fragment.end))
    if retention_seconds <= 0 or not known:
        return []
    stored = [fragment.end for fragment in known if fragment.backing_store]
    ends = {max(stored, default=0)}  # Fragments that end at one of these are kept.
    covered = known[0].begin
    for fragment in known:
        if fragment.begin > covered and _is_young(fragment, GAP_SECONDS, now):
            ends.add(covered)
        covered = max(covered, fragment.end)
    gone: list[Fragment] = []
    kept: list[Fragment] = []
    for fragment in known:
        keep = fragment.end in ends or _is_young(fragment, retention_seconds, now)
        (kept if keep else gone).append(fragment)
    limit = min((*(fragment.end for fragment in kept), held_from))
    return sorted((each for each in gone if each.end <= limit), key=lambda fragment: (fragment.end, fragment.begin))


def _is_young(fragment: Fragment, seconds: float, now: float) -> bool:
    return not fragment.backing_store or now - fragment.mod_time < seconds
