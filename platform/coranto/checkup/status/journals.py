"""Judge all journals of a cluster by a listing and the heads that their primaries reported. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

from coranto.audit.findings import Finding, Kind, Severity, Subject
from coranto.audit.gathered_journal import GatheredJournal
from coranto.audit.health import health_of
from coranto.checkup.results import Condition, Examination
from coranto.checkup.status.values import JournalPlace, JournalProblem
from coranto.client import JournalInfo
from coranto.client.heads import JournalHead
from coranto.specs.validation import effective_replication
from coranto.wire import protocol_pb2 as pb

_EXAMPLES: Final = 3
_CONDITIONS: Final = {Severity.ERROR: Condition.PROBLEM, Severity.WARNING: Condition.WARNING}


def primary_of(info: JournalInfo) -> str:
    """Return the `zone#id` of a journal's primary; empty if it has none."""
    return "" if info.primary < 0 else _name(info.route.members[info.primary])


def _name(member: pb.ProcessSpec.ID) -> str:
    return f"{member.zone}#{member.suffix}"


def places_of(journals: Iterable[JournalInfo]) -> dict[str, JournalPlace]:
    """Return the facts that later snapshots are compared with."""
    return {info.name: JournalPlace(info.create_revision, info.mod_revision, primary_of(info)) for info in journals}


def judge(
    journals: Iterable[JournalInfo], heads: Mapping[str, JournalHead], silent: Set[str], at: float
) -> list[JournalProblem]:
    """Return the problems of journals, by kind, the worst first. `silent` are the brokers that do not answer."""
    groups: dict[tuple[Condition, Kind], list[Finding]] = {}
    for info in journals:
        for each in _findings(info, heads.get(info.name), silent, at):
            if condition := _CONDITIONS.get(each.severity):
                groups.setdefault((condition, each.kind), []).append(each)
    return [
        JournalProblem(
            kind.value,
            condition,
            len(findings),
            tuple(each.subject.name for each in findings[:_EXAMPLES]),
            findings[0].message,
        )
        for (condition, kind), findings in sorted(
            groups.items(), key=lambda item: (item[0][0] is not Condition.PROBLEM, -len(item[1]), item[0][1])
        )
    ]


def head_by_route(info: JournalInfo) -> JournalHead:
    """Return a journal's head with the facts of its listing, for a primary that reports no heads (Gazette's)."""
    return JournalHead(
        info.name,
        pb.OK,
        replication=effective_replication(info.spec),
        replicas=len(info.route.members),
        in_sync=True,
        broker=primary_of(info),
        is_primary=True,
    )


def silent_brokers(journals: Iterable[JournalInfo], answered: Set[str], endpoints: Set[str]) -> set[str]:
    """Return the names of brokers in the journals' routes that answered neither by name nor at their endpoint."""
    return {
        _name(member)
        for info in journals
        for member, endpoint in zip(info.route.members, info.route.endpoints, strict=False)
        if _name(member) not in answered and endpoint not in endpoints
    }


def examinations_of(problems: Sequence[JournalProblem]) -> Iterator[Examination]:
    """Yield one result for each kind of problem."""
    for each in problems:
        more = f" and {each.count - len(each.examples):,} more" if each.count > len(each.examples) else ""
        yield Examination(
            f"journals with {each.kind}",
            each.condition,
            f"{each.count:,}: {', '.join(each.examples)}{more}. {each.examples[0]}: {each.found}",
            f"see `coranto journals list --selector name={each.examples[0]}`, and the brokers' logs",
        )


def _findings(info: JournalInfo, head: JournalHead | None, silent: Set[str], at: float) -> Iterable[Finding]:
    if head is not None:
        return health_of(GatheredJournal(info, head, at))
    if info.is_asleep:
        return ()
    primary = primary_of(info)
    if not primary:
        text = "no broker is its primary, so it takes no appends. Start its brokers, or add others with room for it"
    elif primary in silent:
        text = f"its primary {primary} does not answer, so it takes no appends until another broker leads it"
    else:
        text = f"its primary {primary} does not report its head"
    return [Finding(Kind.NO_PRIMARY, Severity.ERROR, Subject.journal(info.name), text)]
