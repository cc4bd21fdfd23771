"""The options of a run, derived from its seed. Each can be overridden."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from coranto.errors import InvalidInput
from tests.simulation.broker.options import Options as BrokerOptions
from tests.simulation.broker.options import options_of as broker_options_of

FAULTS = (
    "kill consumer",
    "kill at step",
    "pause consumer",
    "zombie",
    "zombie at step",
    "consumer outage",
    "exit consumer",
    "cut consumer from etcd",
    "cut consumer from broker",
    "cut consumers",
    "cut database",
    "database errors",
    "break consumer calls",
    "move shard",
    "change shard",
)
"""Faults of consumers. Faults of brokers are in `tests.simulation.broker.options`."""

KINDS = ("sql", "tables", "json", "sqlite")
"""Kinds of stores: a simulated database, `SqlShardStore` over a file, and the two of recovery logs."""

_DAY = 24 * 3600.0
PRODUCER_SKEWS = ((0.0,), (0.0, 1.1 * _DAY), (0.0, -1.1 * _DAY, 1.1 * _DAY), (0.0, 9000 * _DAY, -9000 * _DAY))


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run. Times are virtual seconds. `faults` names the faults that may happen."""

    seed: int
    consumers: int = 3
    shards: tuple[str, ...] = ("sql", "json", "sqlite")
    inputs: int = 2
    outputs: int = 2
    sources: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1))
    standbys: int = 1
    producers: int = 3
    transactions: int = 10
    """The number of transactions of each producer."""
    plain: bool = False
    """True if the application's methods are synchronous."""
    defers: bool = False
    min_txn_seconds: float = 0.0
    max_txn_seconds: float = 1.0
    ring_size: int = 0
    read_ahead: int = 0
    copy_bytes: int = 1 << 16
    """A SQLite store rewrites the recording of its database at this size."""
    seconds: float = 15.0
    """The approximate duration of faults."""
    lease_seconds: float = 6.0
    skew: float = 0.0
    """The largest skew of the consumers' clocks in either direction, in seconds."""
    producer_skews: tuple[float, ...] = (0.0,)
    """The skews of the producers' clocks. Each producer has one of these, and another one after a restart."""
    faults: tuple[str, ...] = ()
    brokers: BrokerOptions = field(default_factory=lambda: broker_options_of(0))

    def __str__(self) -> str:
        return " ".join(f"{name}={value!r}" for name, value in asdict(self).items())


def options_of(seed: int, **given: Any) -> Options:
    """Return the options of a seed, with some replaced by `given`. Raises InvalidInput for an unknown name.

    `broker_faults` may be given, too.
    """
    rng = random.Random(f"consumers of {seed}")
    brokers = broker_options_of(seed, durability="")  # These journals have no labels.
    rate = rng.choice((0.0, 0.3, 0.7))
    broker_faults = given.pop("broker_faults", tuple(fault for fault in brokers.faults if rng.random() < rate))
    # A restore of an older etcd would lose the shards, too. The brokers' simulation restores etcd.
    broker_faults = tuple(fault for fault in broker_faults if fault != "restore etcd")
    inputs = rng.choice((1, 2, 2, 3))
    shards = tuple(rng.choice(KINDS) for _ in range(rng.choice((1, 2, 3))))
    producers = rng.choice((1, 2, 3))
    options = Options(
        seed,
        consumers=rng.choice((1, 2, 3, 3)),
        shards=shards,
        inputs=inputs,
        outputs=rng.choice((1, 2)),
        sources=tuple(tuple(sorted(rng.sample(range(inputs), rng.randint(1, min(2, inputs))))) for _ in shards),
        standbys=rng.choice((0, 1, 1)),
        producers=producers,
        transactions=rng.choice((8, 14, 20)),
        plain=rng.random() < 0.3,
        defers=rng.random() < 0.3,
        min_txn_seconds=rng.choice((0.0, 0.0, 0.3)),
        max_txn_seconds=rng.choice((0.05, 0.5, 1.0, 3.0)),
        ring_size=rng.choice((0, 0, 1, 4)),
        read_ahead=rng.choice((0, 0, 3)),
        copy_bytes=rng.choice((1, 1 << 14, 1 << 20)),
        lease_seconds=rng.choice((2.0, 4.0)),
        skew=rng.choice((0.0, 0.5, 5.0)),
        producer_skews=random.Random(f"clocks of {seed}").choice(PRODUCER_SKEWS),
        # Few kinds of faults per run, sometimes none, so that runs differ.
        faults=tuple(fault for fault in FAULTS if rng.random() < rng.choice((0.15, 0.4))),
        brokers=replace(brokers, journals=1, writers=producers, readers=0, faults=broker_faults),
    )
    unknown = set(given) - set(asdict(options))
    if unknown:
        names = ", ".join([*asdict(options), "broker_faults"])
        raise InvalidInput(f"{', '.join(sorted(unknown))}: no such option; there are {names}")
    return replace(options, **given)
