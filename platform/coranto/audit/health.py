"""The current health of one journal: its brokers, replicas, stores and unstored content. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from coranto.audit.findings import Fact, Finding, Kind, Severity, Subject
from coranto.audit.gathered_journal import GatheredJournal
from coranto.errors import status_error
from coranto.wire import protocol_pb2 as pb

FLUSH_GRACE_SECONDS: Final = 180.0
"""The time that completing and uploading a fragment may take after the flush interval."""


def health_of(present: GatheredJournal) -> Iterator[Finding]:
    """Yield the problems of a journal's brokers, replicas, stores and unstored content."""
    subject, head, spec = Subject.journal(present.journal), present.head, present.info.spec

    def found(kind: Kind, severity: Severity, message: str, facts: Mapping[str, Fact] | None = None) -> Finding:
        return Finding(kind, severity, subject, message, facts or {})

    for url, reason in present.unlisted:
        yield found(
            Kind.STORE_UNREACHABLE,
            Severity.ERROR,
            f"this audit could not list its fragment store {url}, so it relies on the brokers' index alone: {reason}",
            {"store": url},
        )
    if not spec.fragment.stores:
        yield found(
            Kind.STORE_ABSENT,
            Severity.WARNING,
            "its spec names no fragment store, so its content is on brokers' disks alone",
        )
    if not head.known:
        yield found(
            Kind.UNANSWERED,
            Severity.ERROR,
            f"no broker reports its head: {head.problem or pb.Status.Name(head.status)}. Its content was not examined",
            {"status": pb.Status.Name(head.status)},
        )
        return
    if present.problem:
        yield found(
            Kind.UNANSWERED, Severity.ERROR, f"brokers do not list its fragments: {present.problem}", {"status": ""}
        )
    if head.status == pb.SUSPENDED or not head.broker:
        return  # No broker holds it, or its head comes from a call without the fields below.
    if not head.is_primary:
        yield found(
            Kind.NO_PRIMARY,
            Severity.ERROR,
            f"its primary does not answer; {head.broker}, a replica, reported its head. It takes no appends now",
        )
    if head.replicas < head.replication:
        yield found(
            Kind.REPLICAS_MISSING,
            Severity.ERROR,
            f"only {head.replicas} brokers hold it, but its replication is {head.replication}: start the missing "
            "brokers, or add others in another zone",
            {"replicas": head.replicas, "replication": head.replication},
        )
    elif not head.in_sync:
        yield found(
            Kind.REPLICAS_MISSING,
            Severity.WARNING,
            f"its {head.replicas} replicas have not agreed since the last change of its brokers; if this lasts, look "
            "into the primary's log",
            {"replicas": head.replicas, "replication": head.replication},
        )
    if head.is_primary and head.append_status == pb.INDEX_HAS_GREATER_OFFSET:
        yield found(
            Kind.CONSISTENCY_LOST,
            Severity.ERROR,
            f"it refuses appends: {status_error(pb.INDEX_HAS_GREATER_OFFSET, 'its last empty append')}",
            {"head": head.head, "persisted_head": head.persisted_head},
        )
    if head.demand_unmet and not head.suspended:
        refuses = head.append_status == pb.INSUFFICIENT_JOURNAL_BROKERS
        yield found(
            Kind.DEMAND_UNMET,
            Severity.ERROR if refuses else Severity.WARNING,
            f"it {'refuses appends' if refuses else 'acknowledges appends below its demand'}: {head.demand_unmet}",
            {"refuses": refuses, "acknowledged": head.acknowledged_below_demand},
        )
    elif head.acknowledged_below_demand:
        yield found(
            Kind.DEMAND_UNMET,
            Severity.WARNING,
            f"its primary has acknowledged {head.acknowledged_below_demand} appends below its labels' demand. The "
            "demand is met now; content that is stored survives every broker",
            {"refuses": False, "acknowledged": head.acknowledged_below_demand},
        )
    if head.store_problem or head.append_status == pb.FRAGMENT_STORE_UNHEALTHY:
        store = spec.fragment.stores[0] if spec.fragment.stores else ""
        reason = head.store_problem or "its last empty append was answered FRAGMENT_STORE_UNHEALTHY"
        yield found(
            Kind.STORE_UNHEALTHY,
            Severity.ERROR,
            f"brokers cannot use its fragment store {store}: {reason}",
            {"store": store},
        )
    flush = spec.fragment.flush_interval.ToNanoseconds() / 1e9
    age = present.at - head.unpersisted_since if head.unpersisted_since else 0.0
    if flush > 0 and spec.fragment.stores and age > flush + FLUSH_GRACE_SECONDS:
        yield found(
            Kind.UNPERSISTED_TOO_OLD,
            Severity.ERROR,
            f"{head.unpersisted_bytes} bytes wait to be stored, the oldest for {age:.0f} s, and its flush interval is "
            f"{flush:g} s. Check its store's health and the primary's log",
            {"age_seconds": age, "flush_seconds": flush, "bytes": head.unpersisted_bytes},
        )
