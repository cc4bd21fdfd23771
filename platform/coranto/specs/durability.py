"""The durability of acknowledged appends: the actual durability, and the demand of a journal's labels. Does no I/O.

An acknowledged append is on every replica of its journal, and survives the end of their processes. `Durability` has the
number of these replicas, the number of their zones, and the number of replicas that have synced it to disk. A `Demand`
is the minimum durability of acknowledgements. A journal's labels may set it:

===========================  ======================================================================================
`coranto.dev/ack-replicas`   the minimum number of replicas
`coranto.dev/ack-zones`      the minimum number of their zones, 1 or 2: brokers spread a journal over two zones
`coranto.dev/ack-synced`     `true`: counts only replicas that have synced the append to disk
`coranto.dev/ack-unmet`      `refuse` (the default) or `accept`: what to do with appends while the demand is not met
`coranto.dev/fsync`          `never`, `interval` or `commit`: replaces the brokers' policy for this journal
===========================  ======================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from coranto.errors import InvalidInput
from coranto.labels import values_of
from coranto.wire import protocol_pb2 as pb

ACK_REPLICAS: Final = "coranto.dev/ack-replicas"
ACK_ZONES: Final = "coranto.dev/ack-zones"
ACK_SYNCED: Final = "coranto.dev/ack-synced"
ACK_UNMET: Final = "coranto.dev/ack-unmet"
FSYNC: Final = "coranto.dev/fsync"

LABELS: Final = frozenset({ACK_REPLICAS, ACK_ZONES, ACK_SYNCED, ACK_UNMET, FSYNC})
"""The labels that demand durability for a journal's appends."""

MAX_ZONES: Final = 2
"""The maximum number of zones that a journal may demand: the allocator uses no further zones."""

_ACK = "coranto.dev/ack-"


@dataclass(frozen=True, slots=True)
class Demand:
    """The minimum durability of content: a number of replicas and of zones. If `synced`, only synced replicas count.

    If `refuses`, appends are rejected while the demand cannot be met. Otherwise they are acknowledged, and counted.
    """

    replicas: int = 0
    zones: int = 0
    synced: bool = False
    refuses: bool = True

    def __str__(self) -> str:
        on = "on disk at" if self.synced else "at"
        return f"{on} {_count(max(self.replicas, 1), 'replica')} in {_count(max(self.zones, 1), 'zone')}"


NO_DEMAND: Final = Demand()


class Durability(NamedTuple):
    """The number of replicas that have some content, and of their zones.

    Replicas that are not synced may lose the content in a power failure. `stored` means that a fragment store has all
    of it.
    """

    replicas: int
    zones: int
    synced_replicas: int = 0
    synced_zones: int = 0
    stored: bool = False

    def __str__(self) -> str:
        if self.stored:
            return "in the fragment store"
        found = f"at {_count(self.replicas, 'replica')} in {_count(self.zones, 'zone')}"
        return f"{found}, on disk at {_count(self.synced_replicas, 'replica')} in {_count(self.synced_zones, 'zone')}"

    def meets(self, demand: Demand) -> bool:
        """Return True if the content has at least the demanded durability. Stored content meets every demand."""
        replicas, zones = (self.synced_replicas, self.synced_zones) if demand.synced else (self.replicas, self.zones)
        enough = replicas >= max(demand.replicas, demand.synced) and zones >= demand.zones
        return self.stored or enough


class ReplicaAnswer(NamedTuple):
    """A replica's acknowledgement. `held_from` is the first offset of its content, or None if it was not reported."""

    zone: str
    synced: bool
    held_from: int | None = None


def durability_of(answers: Sequence[ReplicaAnswer], since: int | None = None) -> Durability:
    """Return the durability of the acknowledged append or, with `since`, of all content from that offset on.

    A replica that does not report its first offset may lack earlier appends.
    """
    holders = [each for each in answers if since is None or (each.held_from is not None and each.held_from <= since)]
    synced = [each for each in holders if each.synced]
    return Durability(len(holders), _zones(holders), len(synced), _zones(synced))


def unmet(demand: Demand, route: Sequence[tuple[str, bool]]) -> str:
    """Return the reason why a Route cannot meet a demand; empty if it can.

    `route` has the zone of each replica, and whether it reports syncs to its disk.
    """
    best = durability_of([ReplicaAnswer(zone, tells) for zone, tells in route])
    if best.meets(demand):
        return ""
    description = (
        f"the journal's labels demand that acknowledged appends are {demand}, but its replicas can have them {best}"
    )
    if demand.synced and best.synced_replicas < best.replicas:
        return f"{description}. Brokers of Gazette, and of earlier versions, do not report their disks: replace them"
    return f"{description}. Start brokers in other zones, or change the labels"


def demand_of(labels: pb.LabelSet) -> Demand:
    """Return the demand of a journal with these labels. Raises InvalidInput for an invalid label."""
    if not any(label.name.startswith(_ACK) for label in labels.labels):
        return NO_DEMAND
    return Demand(
        _number(labels, ACK_REPLICAS),
        _number(labels, ACK_ZONES),
        _choice(labels, ACK_SYNCED, ("false", "true")) == "true",
        _choice(labels, ACK_UNMET, ("refuse", "accept")) != "accept",
    )


def fsync_of(labels: pb.LabelSet) -> str:
    """Return the journal's own fsync policy; empty if it has none. Raises InvalidInput for an invalid label.

    A journal that demands synced replicas has the policy `commit`.
    """
    if not any(label.name in (FSYNC, ACK_SYNCED) for label in labels.labels):
        return ""
    return "commit" if demand_of(labels).synced else _choice(labels, FSYNC, ("never", "interval", "commit"))


def validate_durability(spec: pb.JournalSpec) -> None:
    """Check the labels of a spec that is to be applied. Raises InvalidInput."""
    demand, fsync = demand_of(spec.labels), _choice(spec.labels, FSYNC, ("never", "interval", "commit"))
    for name, wanted in ((ACK_REPLICAS, demand.replicas), (ACK_ZONES, demand.zones)):
        if wanted > spec.replication:
            raise InvalidInput(
                f"{name}={wanted} is more than the journal's replication of {spec.replication}; raise that, or demand "
                "less",
                field="labels",
            )
    if demand.zones > MAX_ZONES:
        raise InvalidInput(
            f"{ACK_ZONES}={demand.zones} is more than {MAX_ZONES}: brokers spread a journal over {MAX_ZONES} zones",
            field="labels",
        )
    if demand.synced and fsync in ("never", "interval"):
        raise InvalidInput(
            f"{ACK_SYNCED}=true contradicts {FSYNC}={fsync}; remove one of them, or use {FSYNC}=commit", field="labels"
        )


def _number(labels: pb.LabelSet, name: str) -> int:
    value = _single(labels, name)
    if value and not (value.isascii() and value.isdigit() and 1 <= int(value) <= 99):
        raise InvalidInput(f"{name}={value} is not a number from 1 to 99", field="labels")
    return int(value or 0)


def _choice(labels: pb.LabelSet, name: str, allowed: Sequence[str]) -> str:
    value = _single(labels, name)
    if value and value not in allowed:
        raise InvalidInput(f"{name}={value} is not one of {', '.join(allowed)}", field="labels")
    return value


def _single(labels: pb.LabelSet, name: str) -> str:
    """Return the value of a label, or "" if the set does not have it."""
    values = values_of(labels, name)
    if len(values) > 1 or values == ("",):
        raise InvalidInput(f"{name} has the values {', '.join(values) or 'nothing'}; give it one", field="labels")
    return values[0] if values else ""


def _zones(answers: Sequence[ReplicaAnswer]) -> int:
    return len({each.zone for each in answers})


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
