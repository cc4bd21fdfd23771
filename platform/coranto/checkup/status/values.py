"""The data types of a cluster's status. Times are Unix seconds, sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from coranto.checkup.results import Condition, Examination


@dataclass(frozen=True, slots=True)
class BrokerState:
    """One broker. `name` is `zone#id`; empty if it does not answer."""

    endpoint: str
    name: str = ""
    version: str = ""
    """Empty if it does not answer, or reports none (Gazette's)."""
    clock_difference: float | None = None
    """Its clock minus this machine's, in seconds; None if unknown."""
    journals: int = 0
    """The journals that it is primary of."""
    problem: str = ""
    """The reason why it does not answer."""


@dataclass(frozen=True, slots=True)
class JournalProblem:
    """Journals with the same kind of problem (`coranto.audit.findings.Kind`)."""

    kind: str
    condition: Condition
    count: int
    examples: tuple[str, ...]
    """The first journals, in order of their names."""
    found: str
    """The finding about the first one."""


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """A consumer or shard, and its lag."""

    name: str
    home: str
    """The consumer's process, or the store of its checkpoint, without secrets."""
    behind: int | None
    """Bytes behind the heads of its journals; None if unknown."""
    journals: int = 0
    most_behind: str = ""
    """The journal with the most unread content."""
    unknown: int = 0
    """The number of journals whose heads are unknown, which `behind` omits."""
    problem: str = ""
    """The reason why it does not work."""


@dataclass(frozen=True, slots=True)
class AuditState:
    """The last audit that recorded its results in a store. `at` is None if there is none."""

    store: str
    at: float | None


class JournalPlace(NamedTuple):
    """The facts of a journal that a later snapshot is compared with."""

    create_revision: int
    mod_revision: int
    primary: str
    """`zone#id`; empty without a primary."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The facts of a cluster that a later snapshot is compared with."""

    at: float
    cluster: str
    """etcd's id of its cluster, in hexadecimal."""
    revision: int
    raft_term: int
    brokers: Mapping[str, str]
    """Versions of the brokers that answered, by name."""
    journals: Mapping[str, JournalPlace]
    problems: tuple[str, ...] = ()
    """The subjects of problems."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """etcd's revisions when brokers started, by name. Empty if etcd was not named."""


@dataclass(frozen=True, slots=True)
class StatusChange:
    """A difference between two snapshots."""

    since: float
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The state of a cluster at one time."""

    at: float
    seconds: float
    """The time that gathering took."""
    snapshot: ClusterSnapshot | None
    """None if no broker listed the journals."""
    brokers: tuple[BrokerState, ...]
    examinations: tuple[Examination, ...]
    """The results about brokers, etcd, stores, journals and consumers."""
    journals: int
    suspended: int
    journal_problems: tuple[JournalProblem, ...]
    consumers: tuple[ConsumerState, ...]
    """The most unread content first."""
    audits: tuple[AuditState, ...]
    changes: tuple[StatusChange, ...] = ()
    """The latest first."""
    compared_with: float | None = None
    """The time of the snapshot that this one was compared with; None without such a snapshot."""

    def of(self, condition: Condition) -> list[Examination]:
        """Return the examinations with a condition."""
        return [each for each in self.examinations if each.condition is condition]

    @property
    def is_healthy(self) -> bool:
        """True if there is no problem. Warnings and lag do not count."""
        return not self.of(Condition.PROBLEM)
