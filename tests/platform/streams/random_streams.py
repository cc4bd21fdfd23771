"""Streams made by random splits and merges, for tests of readers."""

from __future__ import annotations

import random
from dataclasses import replace

from coranto.streams.model.keys import KeyRange
from coranto.streams.model.stream import Segment, Stream, segment_journal


def segment(number: int, keys: KeyRange, predecessors: frozenset[int] = frozenset(), epoch: int = 0) -> Segment:
    return Segment(number, epoch, segment_journal("s", number), keys, predecessors)


def random_stream(rng: random.Random, *, scalings: int = 4, longest: int = 4) -> Stream:
    """Return a stream that was scaled `scalings` times and then sealed.

    Each segment has at most `longest` events of one byte.
    """
    segments = {n: segment(n, keys) for n, keys in enumerate(KeyRange.FULL.split(rng.randint(1, 3)))}
    for epoch in range(1, scalings + 1):
        active = sorted((each for each in segments.values() if not each.sealing), key=lambda each: each.range)
        at = rng.randrange(len(active))
        count = len(segments)
        if rng.random() < 0.5 and len(active) > 1:
            merged = active[at : at + 2] if at + 2 <= len(active) else active[-2:]
            new = [
                segment(
                    count, KeyRange.merge(each.range for each in merged), frozenset(m.number for m in merged), epoch
                )
            ]
        else:
            merged = [active[at]]
            new = [
                segment(count + part, keys, frozenset([active[at].number]), epoch)
                for part, keys in enumerate(active[at].range.split(rng.randint(2, 3)))
            ]
        for each in merged:
            segments[each.number] = replace(each, sealing=True, sealed_at=rng.randint(0, longest))
        segments.update((each.number, each) for each in new)
    for each in list(segments.values()):
        if not each.sealing:
            segments[each.number] = replace(each, sealing=True, sealed_at=rng.randint(0, longest), end_of_stream=True)
    return Stream("s", segments)
