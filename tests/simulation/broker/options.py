"""The options of a run, derived from its seed. Each can be overridden."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from coranto.errors import InvalidInput
from coranto.fragments.fragment import Codec
from coranto.specs.durability import ACK_SYNCED, ACK_UNMET, ACK_ZONES, FSYNC
from coranto_broker.spool.durable_spool import Fsync

FAULTS = (
    "kill",
    "kill in write",
    "pause",
    "long pause",
    "long outage",
    "crash machine",
    "cut brokers",
    "cut one way",
    "isolate broker",
    "cut etcd",
    "cut client",
    "cut store",
    "break calls",
    "break watches",
    "compact",
    "store errors",
    "slow store",
    "disk full",
    "disk fails",
    "exit gracefully",
    "change spec",
    "suspend",
    "store refuses fragments",
    "flip a bit",
    "restore etcd",
)
FRAME_FAULTS = ("slow readers",)
"""Faults of connections for frames."""

DEMANDS: Mapping[str, Mapping[str, str]] = {
    "fsync": {FSYNC: "commit"},
    "synced": {ACK_SYNCED: "true"},
    "zones": {ACK_ZONES: "2"},
    "zones or less": {ACK_ZONES: "2", ACK_UNMET: "accept"},
}
"""Labels of journals that define the durability of acknowledged appends, by the value of the option."""

_SYNCED = ("fsync", "synced")
CRASH = "crash machine"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run. Times are virtual seconds, sizes are bytes. `faults` names the faults that may happen."""

    seed: int
    brokers: int = 3
    zones: int = 2
    replication: int = 3
    journals: int = 2
    writers: int = 4
    appends: int = 17
    """Number of operations of each writer."""
    readers: int = 2
    seconds: float = 20.0
    lease_seconds: float = 6.0
    fsync: Fsync = Fsync.NEVER
    codec: Codec = Codec.NONE
    fragment_length: int = 1024
    congestion: float = 0.01
    skew: float = 0.0
    shuffle: bool = True
    min_append_rate: int = 1 << 16
    stored_at_end: bool = True
    """True: end by a graceful shutdown, after which everything must be stored. False: end by killing every broker."""
    nested: bool = False
    """True if the name of each journal but the first extends the name of the one before."""
    append_streams: bool = True
    group_append_bytes: int = 1 << 16
    """Larger calls stream their content to the replicas."""
    frames: bool = False
    """True if brokers also serve frames, and clients and brokers move to them."""
    frame_read_bytes: int = 1 << 20
    """Bytes that a connection for frames receives ahead of its reader."""
    faults: tuple[str, ...] = ()
    durability: str = ""
    """The name in `DEMANDS` of the labels that all journals have; empty for none."""

    @property
    def syncs_commits(self) -> bool:
        """True if acknowledged appends are synced, by the brokers' policy or the journals' labels."""
        return self.fsync is Fsync.COMMIT or self.durability in _SYNCED

    @property
    def names(self) -> list[str]:
        if self.nested:
            return ["/".join(["sim/journal-0", *map(str, range(1, depth + 1))]) for depth in range(self.journals)]
        return [f"sim/journal-{number}" for number in range(self.journals)]

    def __str__(self) -> str:
        return " ".join(f"{name}={value!r}" for name, value in asdict(self).items())


def demands_of(seed: int, *, spread: bool) -> str:
    """Return the name of the durability labels in a seed's runs. Only with `spread` may they require two zones."""
    rng = random.Random(f"durability of {seed}")
    return rng.choice([each for each in DEMANDS if spread or each in _SYNCED]) if rng.random() < 0.2 else ""


def shares_streams(seed: int) -> bool:
    """Return True if small appends share streams in the runs of a seed, as they do in most."""
    return random.Random(f"appends of {seed}").random() < 0.7


def buffered_by(seed: int) -> int:
    """Return the most bytes of a call that brokers buffer in the runs of a seed. In some, calls stream content."""
    rng = random.Random(f"buffers of {seed}")
    return rng.choice((0, 128)) if rng.random() < 0.3 else 1 << 16


def frames_of(seed: int) -> dict[str, Any]:
    """Return the options about frames in the runs of a seed. About half of them have frames."""
    rng = random.Random(f"frames of {seed}")
    return {"frames": rng.random() < 0.5, "frame_read_bytes": rng.choice((512, 4096, 1 << 20))}


def options_of(seed: int, **given: Any) -> Options:
    """Return the options of a seed, with some replaced by `given`. Raises InvalidInput for an unknown name."""
    rng = random.Random(f"options of {seed}")
    brokers = rng.choice((1, 3, 3, 4, 5))
    fsync = rng.choice((Fsync.NEVER, Fsync.NEVER, Fsync.COMMIT, Fsync.INTERVAL))
    zones, replication = rng.choice((1, 2, 3)), rng.randint(1, min(brokers, 3))
    # With given options, journals may be unable to meet these labels.
    asks = given.keys() <= {"append_streams"}
    durability = demands_of(seed, spread=zones > 1 and replication > 1) if asks else ""
    syncs_commits = fsync is Fsync.COMMIT or durability in _SYNCED
    possible = [fault for fault in FAULTS if fault != CRASH or syncs_commits]
    options = Options(
        seed,
        brokers=brokers,
        zones=zones,
        replication=replication,
        journals=rng.choice((1, 2, 3)),
        lease_seconds=rng.choice((3.0, 6.0, 10.0)),
        fsync=fsync,
        codec=rng.choice((Codec.NONE, Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY)),
        fragment_length=rng.choice((1024, 1024, 4096, 1 << 20)),
        congestion=rng.choice((0.0, 0.01, 0.1)),
        skew=rng.choice((0.0, 0.5, 5.0)),
        shuffle=rng.random() < 0.7,
        min_append_rate=rng.choice((0, 1 << 16)),
        stored_at_end=rng.random() < 0.5,
        # Few kinds of faults per run, sometimes none, so that runs differ.
        # Few runs allow machine crashes, so most of those should have some.
        faults=tuple(each for each in possible if rng.random() < rng.choice((0.15, 0.4)) + 0.3 * (each == CRASH)),
        nested=random.Random(f"names of {seed}").random() < 0.4,
        append_streams=shares_streams(seed),
        durability=durability,
    )
    if not given:
        options = replace(options, group_append_bytes=buffered_by(seed), **frames_of(seed))
        if options.frames and rng.random() < 0.5:
            options = replace(options, faults=options.faults + FRAME_FAULTS)
    unknown = set(given) - set(asdict(options))
    if unknown:
        raise InvalidInput(
            f"{', '.join(sorted(unknown))}: there is no such option; choose among {', '.join(asdict(options))}"
        )
    return replace(options, **given)
