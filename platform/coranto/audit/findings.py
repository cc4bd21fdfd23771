"""Findings of an audit: faults, each of a kind with a stable name. Pure.

Programs use `kind` and `facts`, people read `message`. A message states the fault, its values and the next step, and
may change. The names of kinds and their facts are stable.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Fact: TypeAlias = str | int | float | bool | list[str] | list[int] | list[list[int]] | None
"""A machine-readable value of a finding. A span [begin, end) of offsets is a list of two integers."""


class Severity(enum.StrEnum):
    """The weight of a finding."""

    ERROR = "error"
    """Something is lost, inconsistent or cannot be examined. The audit fails."""
    WARNING = "warning"
    """Something is unusual or may fail soon. The audit passes."""
    INFO = "info"
    """Information that needs no action."""


class Kind(enum.StrEnum):
    """The kinds of findings. Their values are stable names."""

    # The selected journals.
    NOTHING_SELECTED = "nothing_selected"
    """The selector matches nothing, and the audit's options do not allow that."""
    JOURNAL_GONE = "journal_gone"
    """A journal that an earlier audit knew no longer exists."""
    JOURNAL_RECREATED = "journal_recreated"
    """A journal was deleted and created again."""

    # Content.
    CONTENT_LOST = "content_lost"
    """Content that an earlier audit saw is gone, and retention does not explain that."""
    CONTENT_MISSING = "content_missing"
    """No fragment covers a span between the journal's first offset and its head."""
    BEGINNING_UNEXPLAINED = "beginning_unexplained"
    """The journal begins above its first offset, and neither retention nor an earlier audit explains that."""
    FRAGMENT_MISSING = "fragment_missing"
    """The brokers' index names a fragment that its store does not have."""
    CONTENT_DIFFERS = "content_differs"
    """The content of a stored fragment differs from its name."""
    CONTENT_REPLACED = "content_replaced"
    """Offsets have another SHA-1 than at an earlier audit, or are stored with several SHA-1s."""
    CONTENT_UNREADABLE = "content_unreadable"
    """The content of a fragment cannot be read."""
    SPOOL_DIFFERS = "spool_differs"
    """The content of a replica's spool differs from the broker's report."""
    MESSAGES_TORN = "messages_torn"
    """Content of a journal is not a message of its content type, because an append ended within a message."""
    OBJECT_UNKNOWN = "object_unknown"
    """A store has a fragment that the brokers' index does not cover."""
    OBJECT_MISNAMED = "object_misnamed"
    """A store has a file in a journal's folder whose name is not a fragment's."""

    # Forks.
    FORK_UNHELD = "fork_unheld"
    """A fork shares fragments of a journal that does not keep them for it, or does not exist any more."""
    FORK_HOLD_STALE = "fork_hold_stale"
    """A journal keeps content for a fork that does not exist."""
    FORK_FORMING = "fork_forming"
    """A fork does not have all of its initial content yet."""

    # Heads, replicas and stores.
    HEAD_FELL = "head_fell"
    """A journal's head is lower than at an earlier audit."""
    CONSISTENCY_LOST = "consistency_lost"
    """The stores have content above the brokers' head, so the journal refuses appends (INDEX_HAS_GREATER_OFFSET)."""
    REGISTERS_LOST = "registers_lost"
    """Registers that an earlier audit knew are gone, or changed without an append."""
    NO_PRIMARY = "no_primary"
    """No broker is primary of the journal, or its primary does not answer."""
    REPLICAS_MISSING = "replicas_missing"
    """Fewer brokers hold the journal, or are in sync, than its replication asks for."""
    DEMAND_UNMET = "demand_unmet"
    """Appends cannot reach the durability that the journal's labels demand, or were acknowledged without it."""
    UNANSWERED = "unanswered"
    """No broker answered about the journal."""
    UNPERSISTED_TOO_OLD = "unpersisted_too_old"
    """Content waits for the fragment store for longer than the journal's flush interval allows."""
    STORE_UNREACHABLE = "store_unreachable"
    """A fragment store could not be listed or read by the audit."""
    STORE_UNHEALTHY = "store_unhealthy"
    """Brokers cannot use a fragment store."""
    STORE_ABSENT = "store_absent"
    """The journal's spec names no fragment store."""

    # Consumers.
    CHECKPOINT_GONE = "checkpoint_gone"
    """The store has no checkpoint of a consumer, or a new one in place of the one that an earlier audit knew."""
    CHECKPOINT_UNREADABLE = "checkpoint_unreadable"
    """A checkpoint cannot be decoded."""
    CHECKPOINT_RESET = "checkpoint_reset"
    """An operator has moved the consumer, which repeats or skips messages intentionally."""
    CHECKPOINT_SET_BACK = "checkpoint_set_back"
    """A checkpoint is behind the consumer's progress, according to journals or an earlier audit."""
    CHECKPOINT_AHEAD = "checkpoint_ahead"
    """A checkpoint has an offset that its journal does not have."""
    CHECKPOINT_DIFFERS = "checkpoint_differs"
    """A checkpoint differs from the result of replaying its journal up to its offset."""
    UNREAD_CONTENT_GONE = "unread_content_gone"
    """Content of a source is gone, and the consumer has not consumed it."""
    TRANSACTION_CUT_OFF = "transaction_cut_off"
    """The first messages of an open transaction are gone, so the consumer cannot deliver it if it commits."""
    ACKNOWLEDGEMENT_MISSING = "acknowledgement_missing"
    """An acknowledgement of a committed checkpoint is missing from its journal, or does not commit its messages."""
    ROWS_LEFT_STAGED = "rows_left_staged"
    """Rows are staged under an old fence. No transaction will ever use them."""
    EXPECTATION_FAILED = "expectation_failed"
    """A query over a consumer's tables contradicts its committed messages."""

    # The audit itself.
    FIRST_AUDIT = "first_audit"
    """No earlier audit is known, so losses before this one cannot be found."""
    MEMORY_DAMAGED = "memory_damaged"
    """Records of earlier audits cannot be read, contradict the brokers' note, or have a time in the future."""
    MEMORY_UNREACHABLE = "memory_unreachable"
    """The store with the records of earlier audits cannot be reached."""
    MEMORY_UNWITNESSED = "memory_unwitnessed"
    """Brokers do not know the records of earlier audits, so the deletion of newer ones cannot be detected."""
    CLOCK_DIFFERS = "clock_differs"
    """The audit's clock differs from the brokers' clock. The audit used the brokers' time."""
    NOT_EXAMINED = "not_examined"
    """A part of the audit was not examined."""


class SubjectKind(enum.StrEnum):
    """The kinds of things that findings are about."""

    SELECTOR = "selector"
    JOURNAL = "journal"
    STORE = "store"
    CONSUMER = "consumer"
    SHARD = "shard"
    TABLE = "table"
    STREAM = "stream"


@dataclass(frozen=True, slots=True, order=True)
class Subject:
    """The thing that a finding is about: a journal's name, a store's URL, a consumer's name and so on."""

    kind: SubjectKind
    name: str

    @classmethod
    def journal(cls, name: str) -> Subject:
        return cls(SubjectKind.JOURNAL, name)

    @classmethod
    def store(cls, url: str) -> Subject:
        return cls(SubjectKind.STORE, url)

    @classmethod
    def selector(cls, text: str) -> Subject:
        return cls(SubjectKind.SELECTOR, text)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. `facts` are for programs; their names are stable within a kind.

    `since` is the time when an audit first found it (Unix seconds), for findings that stay until they are repaired or
    accepted; 0 if unknown.
    """

    kind: Kind
    severity: Severity
    subject: Subject
    message: str
    facts: Mapping[str, Fact] = field(default_factory=dict)
    since: float = 0.0

    @property
    def is_error(self) -> bool:
        return self.severity is Severity.ERROR

    def __str__(self) -> str:
        return f"{self.subject.name}: {self.message}"


_ORDER = {severity: rank for rank, severity in enumerate(Severity)}


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by severity, the highest first, with one subject's findings together."""
    return sorted(findings, key=lambda each: (_ORDER[each.severity], each.subject, each.kind, each.message))
