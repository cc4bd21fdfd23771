"""Changes of a stream's segments: planning splits and merges, and deriving them from the load. Pure.

`transition` plans explicit splits and merges. `decide` applies a `ScalingPolicy` to the measured rates of segments, by
Pravega's rules. A segment is split if its rate over 2, 5 or 10 minutes is above 5, 2 or 1 times the target. Two
adjacent segments are merged if each of them was below the target over those windows and below half of it over 20
minutes, and their rates over 10 minutes together are below the target. A segment that was observed for less than the
cool-down (10 minutes) is not changed, so that the effect of a change is seen before the next one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeAlias

from coranto.errors import InvalidInput, StreamSealed
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.stream import Segment, Stream, ordered, segment_journal

MAX_CHANGES: Final = 120
"""Maximum segments in one transition. It is one etcd transaction, which has at most 128 operations."""


@dataclass(frozen=True, slots=True)
class Split:
    """Replace an active segment by `into` segments of equal widths."""

    segment: int
    into: int = 2


@dataclass(frozen=True, slots=True)
class Merge:
    """Replace adjacent active segments, at least two, by one."""

    segments: tuple[int, ...]


Change: TypeAlias = Split | Merge


@dataclass(frozen=True, slots=True)
class Transition:
    """A planned change, applied as a whole: `predecessors` to seal and `successors` to create."""

    epoch: int
    predecessors: tuple[Segment, ...]
    successors: tuple[Segment, ...]


def transition(stream: Stream, changes: Sequence[Change]) -> Transition:
    """Plan splits and merges of different segments as one transition. Raises StreamSealed and InvalidInput."""
    if stream.is_sealed:
        raise StreamSealed(
            f"stream {stream.name} is sealed: it does not scale any more. Create another stream for more events"
        )
    if not changes:
        raise InvalidInput("ask for at least one split or merge", field="changes")
    active = {segment.number: segment for segment in stream.active()}
    epoch, number = stream.epoch + 1, max(stream.segments) + 1
    replaced: list[Segment] = []
    successors: list[Segment] = []
    for change in changes:
        numbers = (change.segment,) if isinstance(change, Split) else change.segments
        found = [_active(stream, active, each) for each in numbers]
        if isinstance(change, Split):
            if change.into < 2:
                raise InvalidInput(f"segment {change.segment} cannot be split into {change.into}; ask for 2 or more")
            if change.into >= MAX_CHANGES:
                raise InvalidInput(
                    f"segment {change.segment} cannot be split into {change.into} in one change, only into less than "
                    f"{MAX_CHANGES}; scale in several steps"
                )
            ranges = found[0].range.split(change.into)
        else:
            if len(set(numbers)) < 2:
                raise InvalidInput(f"a merge needs two or more segments, not {_listed(numbers)}")
            try:
                ranges = (KeyRange.merge(each.range for each in found),)
            except InvalidInput as error:
                raise InvalidInput(f"segments {_listed(numbers)}: {error.message}; name neighbours") from None
        for keys in ranges:
            journal = segment_journal(stream.name, number)
            successors.append(Segment(number, epoch, journal, keys, frozenset(numbers)))
            number += 1
        replaced += found
    twice = {each.number for each in replaced if replaced.count(each) > 1}
    if twice:
        raise InvalidInput(
            f"segment {_listed(sorted(twice))} is in more than one change; name each segment once", field="changes"
        )
    if len(replaced) + len(successors) > MAX_CHANGES:
        raise InvalidInput(
            f"{len(replaced)} replaced by {len(successors)} are more than the {MAX_CHANGES} segments that one "
            "change may concern; scale in several steps",
            field="changes",
        )
    return Transition(epoch, ordered(replaced), tuple(successors))


def _active(stream: Stream, active: Mapping[int, Segment], number: int) -> Segment:
    found = active.get(number)
    if found is None:
        state = "being sealed or sealed" if number in stream.segments else "not there"
        raise InvalidInput(
            f"segment {number} of {stream.name} is {state}; active are {_listed(sorted(active))}", field="changes"
        )
    return found


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


# ----------------------------------------------------------------------------------------------------------- policies


class RateUnit(enum.Enum):
    """The unit of a policy's target."""

    BYTES = "bytes"
    EVENTS = "events"


@dataclass(frozen=True, slots=True)
class RateWindows:
    """The windows of measurements, in seconds. The defaults are Pravega's."""

    short: float = 120
    middle: float = 300
    long: float = 600
    idle: float = 1200
    cool_down: float = 600


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """The rule for the number of a stream's segments: fixed, or by its load.

    `target` is the rate per segment and second. A segment is split into at most `factor` segments. The stream keeps at
    least `min_segments` and at most `max_segments`.
    """

    unit: RateUnit | None
    target: float = 0
    factor: int = 2
    min_segments: int = 1
    max_segments: int = 64

    def __post_init__(self) -> None:
        if self.unit is not None and not self.target > 0:
            raise InvalidInput(
                f"{self.target:g} per second is not a rate to scale by; give more than 0", field="target"
            )
        if self.factor < 2:
            raise InvalidInput(f"{self.factor} parts are not a split; give 2 or more", field="factor")
        if not 1 <= self.min_segments <= self.max_segments:
            raise InvalidInput(
                f"{self.min_segments} is not between 1 and {self.max_segments}; choose a number that is",
                field="min_segments",
            )

    @classmethod
    def fixed(cls, segments: int) -> ScalingPolicy:
        """Return a policy that never scales by itself."""
        return cls(None, min_segments=segments, max_segments=max(segments, 1))

    @classmethod
    def by_bytes(cls, target: float, factor: int = 2, min_segments: int = 1, max_segments: int = 64) -> ScalingPolicy:
        """Return a policy of `target` bytes per second and segment, including the framing of events."""
        return cls(RateUnit.BYTES, target, factor, min_segments, max_segments)

    @classmethod
    def by_events(cls, target: float, factor: int = 2, min_segments: int = 1, max_segments: int = 64) -> ScalingPolicy:
        """Return a policy of `target` events per second and segment."""
        return cls(RateUnit.EVENTS, target, factor, min_segments, max_segments)


def format_policy(policy: ScalingPolicy) -> str:
    """Encode a policy as the value of a label: `bytes/1e+06/2/1/64`, or `fixed/4`."""
    if policy.unit is None:
        return f"fixed/{policy.min_segments}"
    return f"{policy.unit.value}/{policy.target!r}/{policy.factor}/{policy.min_segments}/{policy.max_segments}"


def parse_policy(text: str) -> ScalingPolicy:
    """Decode a policy from `format_policy`. Parts that are missing at the end have defaults. Raises InvalidInput."""
    kind, *values = text.split("/")
    try:
        if kind == "fixed" and len(values) == 1:
            return ScalingPolicy.fixed(int(values[0]))
        if 1 <= len(values) <= 4:
            return ScalingPolicy(RateUnit(kind), float(values[0]), *map(int, values[1:]))
    except InvalidInput:
        raise
    except ValueError:
        pass
    raise InvalidInput(
        f"{text!r} is not a scaling policy; write fixed/SEGMENTS, bytes/RATE or events/RATE, "
        "and optionally /FACTOR/MIN_SEGMENTS/MAX_SEGMENTS after it",
        field="policy",
    )


# --------------------------------------------------------------------------------------------------------------- loads


@dataclass(frozen=True, slots=True)
class Rates:
    """A segment's write rate per second over each window; None if it was not observed for that long."""

    short: float | None = None
    middle: float | None = None
    long: float | None = None
    idle: float | None = None
    observed: float = 0
    """Seconds since the segment was first observed."""


@dataclass
class Meter:
    """Computes the write rates of segments from samples of their totals."""

    windows: RateWindows = RateWindows()
    _samples: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def sample(self, now: float, totals: Mapping[int, float]) -> None:
        """Add a sample of segments' totals at `now`, in monotonic seconds. Segments not in it are forgotten."""
        self._samples = {number: self._samples.get(number, []) for number in totals}
        for number, total in totals.items():
            samples = self._samples[number]
            samples.append((now, total))
            # Keep one sample from before the longest window, to compute the total at the window's beginning.
            while len(samples) > 2 and samples[1][0] <= now - max(self.windows.idle, self.windows.cool_down):
                samples.pop(0)

    def rates(self) -> dict[int, Rates]:
        """Return the rates of all segments in the last sample."""
        windows = self.windows
        return {
            number: Rates(
                _rate(samples, windows.short),
                _rate(samples, windows.middle),
                _rate(samples, windows.long),
                _rate(samples, windows.idle),
                samples[-1][0] - samples[0][0],
            )
            for number, samples in self._samples.items()
        }


def _rate(samples: Sequence[tuple[float, float]], window: float) -> float | None:
    """Return the growth per second over the last `window` seconds, interpolating at the window's beginning."""
    now, total = samples[-1]
    begin = now - window
    if samples[0][0] > begin:
        return None
    for (early, low), (late, high) in zip(reversed(samples[:-1]), reversed(samples[1:]), strict=True):
        if early <= begin:
            at_begin = low + (high - low) * (begin - early) / (late - early) if late > early else high
            return (total - at_begin) / window
    return None


def decide(stream: Stream, rates: Mapping[int, Rates], policy: ScalingPolicy, windows: RateWindows) -> list[Change]:
    """Return the changes that a policy requires. `rates` are in its unit. Segments without rates are not changed."""
    active = stream.active()
    if policy.unit is None or not active:
        return []
    changes: list[Change] = []
    count = len(active)
    known = {
        each.number: found
        for each in active
        if (found := rates.get(each.number)) is not None and found.observed >= windows.cool_down
    }
    hot = {number: over for number, found in known.items() if (over := _over(found, policy.target)) is not None}
    # The hottest first, in case not all of them can be split.
    for number in sorted(hot, key=lambda each: (-hot[each], each)):
        segment = stream.segments[number]
        most = min(policy.max_segments - count + 1, segment.range.width, MAX_CHANGES // 2)
        into = min(max(2, int(hot[number])), policy.factor, most)
        if into >= 2 and sum(_size(change) for change in changes) + into + 1 <= MAX_CHANGES:
            changes.append(Split(number, into))
            count += into - 1
    taken: set[int] = set()
    for left, right in pairwise(active):
        one, other = known.get(left.number), known.get(right.number)
        if one is None or other is None or {left.number, right.number} & taken or count <= policy.min_segments:
            continue
        together = (one.long or 0) + (other.long or 0)
        cold = _is_cold(one, policy.target) and _is_cold(other, policy.target) and together < policy.target
        if cold and sum(_size(change) for change in changes) + 3 <= MAX_CHANGES:
            changes.append(Merge((left.number, right.number)))
            taken |= {left.number, right.number}
            count -= 1
    return changes


def _over(rates: Rates, target: float) -> float | None:
    """Return a segment's rate in multiples of the target if it is to be split; otherwise None."""
    for rate, limit in ((rates.short, 5), (rates.middle, 2), (rates.long, 1)):
        if rate is not None and rate > limit * target:
            return rate / target
    return None


def _is_cold(rates: Rates, target: float) -> bool:
    within = (rates.short, rates.middle, rates.long)
    below = all(rate is not None and rate < target for rate in within)
    return below and rates.idle is not None and rates.idle < target / 2


def _size(change: Change) -> int:
    return 1 + change.into if isinstance(change, Split) else 1 + len(change.segments)
