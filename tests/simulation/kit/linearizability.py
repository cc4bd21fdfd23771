"""The check of linearizability: could concurrent calls have happened one after the other?

The algorithm is Wing and Gong's with Lowe's cache: walk the calls in real-time order, try each pending call as the next
one, and backtrack if none fits. States must be hashable and few. The search explodes for a history with unknown
outcomes, so resolve those first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """One call, from `invoked` to `returned` (infinity if no return was seen).

    `step` returns the state after the call, or None if the call is impossible in the given state.
    """

    invoked: float
    returned: float
    step: Callable[[Hashable], Hashable | None]
    label: str


@dataclass(slots=True, eq=False)
class _Mark:
    call: Call
    number: int
    match: _Mark | None  # The return of an invocation; None for a return.
    before: _Mark | None = None
    after: _Mark | None = None


def first_impossible(initial: Hashable, calls: Sequence[Call]) -> Call | None:
    """Return None if the calls are linearizable, else the earliest call that no order can satisfy."""
    head = _linked(calls)
    state = initial
    taken = 0
    seen: set[tuple[int, Hashable]] = {(0, initial)}
    stack: list[tuple[_Mark, Hashable]] = []
    entry = head.after
    worst: Call | None = None
    furthest = -1
    while head.after is not None:
        assert entry is not None  # The list ends with a return entry, where the walk backtracks.
        if entry.match is not None:
            following = entry.call.step(state)
            if following is not None:
                key = (taken | 1 << entry.number, following)
                if key not in seen:
                    seen.add(key)
                    stack.append((entry, state))
                    state, taken = key[1], key[0]
                    _lift(entry)
                    entry = head.after
                    continue
            entry = entry.after
            continue
        if len(stack) > furthest:
            furthest, worst = len(stack), entry.call
        if not stack:
            return worst
        entry, state = stack.pop()
        taken &= ~(1 << entry.number)
        _unlift(entry)
        entry = entry.after
    return None


def _linked(calls: Sequence[Call]) -> _Mark:
    events: list[tuple[float, int, int, _Mark]] = []
    for number, call in enumerate(calls):
        end = _Mark(call, number, None)
        # At equal times, invocations come first, so that the calls overlap.
        events.append((call.invoked, 0, number, _Mark(call, number, end)))
        events.append((call.returned, 1, number, end))
    events.sort(key=lambda event: event[:3])
    head = _Mark(Call(-math.inf, math.inf, lambda state: state, "start"), -1, None)
    last = head
    for *_, entry in events:
        last.after, entry.before = entry, last
        last = entry
    return head


def _lift(entry: _Mark) -> None:
    """Remove a call's two entries from the list."""
    for each in (entry, entry.match):
        assert each is not None
        assert each.before is not None
        each.before.after = each.after
        if each.after is not None:
            each.after.before = each.before


def _unlift(entry: _Mark) -> None:
    """Put a call's two entries back, in reverse order."""
    for each in (entry.match, entry):
        assert each is not None
        assert each.before is not None
        each.before.after = each
        if each.after is not None:
            each.after.before = each
