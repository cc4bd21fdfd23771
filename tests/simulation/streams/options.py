"""The options of a run, derived from its seed. Each can be overridden."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from coranto.errors import InvalidInput
from coranto.fragments.fragment import Codec
from coranto_broker.spool.durable_spool import Fsync
from tests.simulation.broker.options import Options as BrokerOptions
from tests.simulation.broker.options import shares_streams

FAULTS = (
    "kill",
    "kill in write",
    "pause",
    "long outage",
    "cut brokers",
    "cut one way",
    "isolate broker",
    "cut etcd",
    "cut client",
    "break calls",
    "break watches",
    "exit gracefully",
)
"""Faults of brokers. There are also faults of writers' calls (`harm`) and of the stream (`scale_seconds`)."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run. Times are virtual seconds. `units` is the number of events and transactions per writer."""

    seed: int
    brokers: int = 3
    replication: int = 2
    segments: int = 2
    keys: int = 4
    writers: int = 3
    stable: int = 2
    """The number of writers with a fixed id, which all processes of such a writer use."""
    units: int = 80
    in_flight: int = 4
    window: int = 8
    """The number of units that a writer writes concurrently."""
    json_lines: bool = False
    seconds: float = 8.0
    """The time over which writers spread their units, and faults happen."""
    harm: float = 0.04
    """The probability of a fault at one of the messages of an append."""
    scale_seconds: float = 2.0
    """The average time between two scalings of the stream; 0 for no scaling."""
    sealed: bool = False
    largest: int = 200
    """The most bytes of an event's padding."""
    max_writers: int = 64
    lease_seconds: float = 3.0
    congestion: float = 0.0
    shuffle: bool = True
    fragment_length: int = 1 << 14
    readers: int = 1
    movers: int = 0
    """Programs that write transactions on several keys."""
    moves: int = 20
    """The number of transactions of each of them."""
    members: int = 0
    append_streams: bool = True
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(f"{name}={value!r}" for name, value in asdict(self).items())

    @property
    def broker(self) -> BrokerOptions:
        return BrokerOptions(
            self.seed,
            brokers=self.brokers,
            zones=min(2, self.brokers),
            replication=self.replication,
            journals=0,
            writers=self.writers,
            seconds=self.seconds,
            lease_seconds=self.lease_seconds,
            fsync=Fsync.NEVER,
            codec=Codec.NONE,
            fragment_length=self.fragment_length,
            congestion=self.congestion,
            shuffle=self.shuffle,
            append_streams=self.append_streams,
            faults=self.faults,
        )


def options_of(seed: int, **given: Any) -> Options:
    """Return the options of a seed, with some replaced by `given`. Raises InvalidInput for an unknown name."""
    rng = random.Random(f"streams {seed}")
    brokers = rng.choice((1, 2, 3, 3))
    writers = rng.choice((1, 2, 3, 4))
    options = Options(
        seed,
        brokers=brokers,
        replication=rng.randint(1, min(brokers, 2)),
        segments=rng.choice((1, 1, 2, 3)),
        keys=rng.choice((1, 2, 5, 12)),
        writers=writers,
        stable=rng.randint(0, writers),
        units=320 // writers,
        in_flight=rng.choice((1, 2, 4, 8)),
        window=rng.choice((1, 4, 16)),
        json_lines=rng.random() < 0.5,
        harm=rng.choice((0.0, 0.1, 0.3)),
        scale_seconds=rng.choice((0.0, 0.3, 0.7, 2.0)),
        sealed=rng.random() < 0.3,
        max_writers=_max_writers_of(seed, writers, rng.choice((writers, 64, 64))),
        congestion=rng.choice((0.0, 0.0, 0.01, 0.1)),
        shuffle=rng.random() < 0.7,
        fragment_length=rng.choice((1 << 12, 1 << 20)),
        append_streams=shares_streams(seed),
        # Few kinds of faults per run, so that runs differ. Often only the faults of calls.
        faults=tuple(fault for fault in FAULTS if rng.random() < rng.choice((0.0, 0.1, 0.25))),
    )
    return _given(options, given)


def _max_writers_of(seed: int, writers: int, most: int) -> int:
    """Return a number that is sometimes less than the number of writers, so that active writers expire."""
    rng = random.Random(f"crowded {seed}")
    return writers - 1 if writers > 1 and rng.random() < 0.15 else most


def shared_options_of(seed: int, **given: Any) -> Options:
    """Return `options_of` with transactions on several keys, a reader group, and fewer other units."""
    rng = random.Random(f"groups {seed}")
    options = options_of(seed)
    return _given(
        replace(
            options,
            keys=max(3, options.keys),
            segments=max(2, options.segments),
            units=60 // options.writers,
            readers=rng.randint(0, 1),
            movers=rng.randint(1, 2),
            moves=20,
            members=rng.randint(1, 3),
            sealed=rng.random() < 0.6,
        ),
        given,
    )


def lost_answers_options_of(seed: int, **given: Any) -> Options:
    """Return a short run of one writer with a fault in each append: for T10's ten thousand seeds."""
    rng = random.Random(f"answers {seed}")
    options = replace(
        options_of(seed),
        brokers=rng.choice((1, 1, 2)),
        replication=1,
        segments=1,
        keys=2,
        writers=1,
        stable=rng.randint(0, 1),
        units=12,
        seconds=0.6,
        harm=1.0,
        scale_seconds=rng.choice((0.0, 0.0, 0.3)),
        sealed=False,
        readers=0,
        faults=(),
    )
    return _given(options, given)


def _given(options: Options, given: Mapping[str, Any]) -> Options:
    unknown = set(given) - set(asdict(options))
    if unknown:
        raise InvalidInput(f"{', '.join(sorted(unknown))}: no such option; there are {', '.join(asdict(options))}")
    return replace(options, **given)
