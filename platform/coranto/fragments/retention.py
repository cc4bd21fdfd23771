"""Which fragments a journal's retention lets go of. Pure: brokers and `coranto journals prune` both ask here.

A stored fragment is *old* when it was stored at least `retention` ago. Removed are only fragments at the beginning of
the journal, so that what is left has no gap that was not there before (from its first offset on, every offset that was
covered still is). Kept, whatever their age, are

* every fragment that ends above an offset at which a fragment ends that is not old: also where they overlap, no offset
  is lost that a kept fragment does not cover,
* what reaches furthest in the stores: it tells where the journal's head is, once no broker has more,
* what is on either side of a gap, if what follows it was stored less than six hours ago: the time for which readers,
  too, take it that somebody may still be storing what belongs there.

Fragments that are in no store yet are not old.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from coranto.fragments.fragment import Fragment

GAP_SECONDS: Final = 6 * 60 * 60


def expired(fragments: Iterable[Fragment], retention_seconds: float, now: float) -> list[Fragment]:
    """The stored fragments to remove, in the order in which to remove them: whenever that is broken off, what is left
    has no gap. `fragments` are all that are known of one journal, in any order; `now` is wall time in seconds.

    A retention of zero or less keeps everything.
    """
    known = sorted(fragments, key=lambda fragment: (fragment.begin, fragment.end))
    if retention_seconds <= 0 or not known:
        return []
    stored = [fragment.end for fragment in known if fragment.backing_store]
    ends = {max(stored, default=0)}  # What ends here is kept.
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
    limit = min((fragment.end for fragment in kept), default=0)
    return sorted((each for each in gone if each.end <= limit), key=lambda fragment: (fragment.end, fragment.begin))


def _is_young(fragment: Fragment, seconds: float, now: float) -> bool:
    return not fragment.backing_store or now - fragment.mod_time < seconds
