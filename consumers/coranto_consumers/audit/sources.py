"""The audit of one source of a shard: its offset, its content, and its producers' states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from coranto.audit import Finding, Kind, Severity, Subject
from coranto.client import JournalClient, JournalInfo
from coranto.errors import CorantoError, CorruptData, InvalidInput, OffsetJump
from coranto.labels import CONTENT_TYPE, JSON_LINES, value_of
from coranto.messages import Framing, JsonLines, Source
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.audit.expectations import Measure, Number
from coranto_consumers.audit.memory import KnownSource, proven_text
from coranto_consumers.audit.replay import Replay, Replayed
from coranto_consumers.audit.states import compare

FramingOf = Callable[[pb.JournalSpec], Framing[Any]]

_NAMED: Final = 3
"""Most producers that a message about differences names."""


def framing_of(spec: pb.JournalSpec) -> Framing[Any]:
    """Return the framing of a journal of JSON lines. Raises InvalidInput for another one."""
    content_type = value_of(spec.labels, CONTENT_TYPE, JSON_LINES)
    if content_type != JSON_LINES:
        raise InvalidInput(
            f"{spec.name} has {CONTENT_TYPE} {content_type}: name the application (--app module:App), or give "
            "`framing_of`, to say how its messages are framed",
            field="framing_of",
        )
    return JsonLines()


def is_fully_suspended(info: JournalInfo) -> bool:
    """Return True if a journal is fully suspended: no broker holds it, and it has no content."""
    return info.spec.suspend.level == pb.JournalSpec.Suspend.FULL


@dataclass(slots=True)
class SourceAudit:
    """The audit of one source."""

    findings: list[Finding] = field(default_factory=list)
    known: KnownSource | None = None
    """The facts to remember if the shard is sound."""
    replayed_bytes: int = 0
    unproven: int = 0
    messages: int = 0
    totals: dict[str, Number] = field(default_factory=dict)
    totals_problem: str = ""
    """The reason why `totals` are not those of all messages that the consumer has consumed; empty if they are."""


def segments_let_go(
    known: Collection[str], sources: Collection[str], journals: Mapping[str, JournalInfo]
) -> frozenset[str]:
    """Return the sources that an earlier audit knew, and that a checkpoint without them has rightly let go.

    These are segments that do not exist any more, of streams of which the checkpoint has other segments: a Spark
    consumer that has read them forgets them when the stream is truncated.
    """
    missing = set(known) - set(sources) - journals.keys()
    if not missing:
        return frozenset()
    from coranto.streams.model.stream import stream_of  # That imports much, and is rarely needed.

    streams = {stream_of(journal) for journal in sources} - {""}
    return frozenset(journal for journal in missing if stream_of(journal) in streams)


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """Audits one source. Without `deep`, content is not read."""

    client: JournalClient
    framing_of: FramingOf
    shard: Subject
    journal: str
    expected: Source
    known: KnownSource | None
    measures: Sequence[Measure]
    min_offset: int = 0
    deep: bool = True

    async def run(self, info: JournalInfo | None) -> SourceAudit:
        """Audit. `info` is the journal as it is listed, None if it does not exist. Never raises CorantoError."""
        audit = SourceAudit()
        if info is None:
            self._without_journal(audit)
            return audit
        try:
            await self._examine(audit, info)
        except CorantoError as error:
            self._find(audit, Kind.UNANSWERED, f"{self.journal} cannot be examined: {error}")
        return audit

    def _find(
        self, audit: SourceAudit, kind: Kind, message: str, severity: Severity = Severity.ERROR, **facts: Any
    ) -> None:
        audit.findings.append(Finding(kind, severity, self.shard, message, {"journal": self.journal, **facts}))

    def _without_journal(self, audit: SourceAudit) -> None:
        audit.totals_problem = f"{self.journal} does not exist"
        known = self.known
        if known is not None and known.gone:
            audit.known = known
            if known.totals_complete:
                audit.totals_problem, audit.totals, audit.messages = "", dict(known.totals), known.messages
            return
        through = self.expected.read_through
        self._find(
            audit,
            Kind.JOURNAL_GONE,
            f"the source {self.journal} was read through {through} and does not exist. If it was deleted on purpose, "
            "accept that (coranto consumer audit --accept)",
            read_through=through,
        )
        audit.known = KnownSource(
            through,
            0,
            messages=known.messages if known else 0,
            totals=dict(known.totals) if known else {},
            totals_complete=known is not None and known.totals_complete,
            gone=True,
        )

    async def _examine(self, audit: SourceAudit, info: JournalInfo) -> None:
        through, known = self.expected.read_through, self.known
        head, first = await self._extent(info)
        recreated = known is not None and known.create_revision not in (0, info.create_revision)
        if recreated:
            self._find(
                audit,
                Kind.JOURNAL_RECREATED,
                f"the source {self.journal} was deleted and created again. Content behind {through} may be another "
                "one than the consumer goes on with",
                head=head,
                read_through=through,
            )
        if through > head:
            self._find(
                audit,
                Kind.CHECKPOINT_AHEAD,
                f"the checkpoint has read {self.journal} through {through}, and the journal ends at {head}: the "
                "checkpoint was set forward, or the journal lost content or was created again",
                read_through=through,
                head=head,
            )
        if known is not None and through < known.read_through:
            self._find(
                audit,
                Kind.CHECKPOINT_SET_BACK,
                f"the checkpoint has read {self.journal} through {through}, and an earlier audit saw "
                f"{known.read_through}: it was set back, or the store was restored from a backup. What the consumer "
                "reads again counts twice, unless the tables were set back together with it",
                read_through=through,
                known=known.read_through,
            )
        if self.min_offset <= through < first:
            self._find(
                audit,
                Kind.UNREAD_CONTENT_GONE,
                f"content [{through}, {first}) of {self.journal} is gone, and the consumer has read only through "
                f"{through}: these messages are lost for it",
                begin=through,
                end=first,
            )
        audit.known = KnownSource(through, info.create_revision)
        if known is not None and not recreated and through >= known.read_through:
            # A cheap audit proves nothing, and forgets nothing.
            audit.known = KnownSource(
                through,
                info.create_revision,
                known.proven,
                known.messages,
                known.totals,
                known.totals_complete,
            )
        if self.deep and through <= head:
            await self._replay(audit, info, first, usable=None if recreated else known)
        elif self.measures:
            audit.totals_problem = f"{self.journal} was not replayed"

    async def _extent(self, info: JournalInfo) -> tuple[int, int]:
        """Return the journal's head and the offset at which its content begins."""
        if is_fully_suspended(info):
            return info.spec.suspend.offset, info.spec.suspend.offset
        head = await self.client.head(self.journal)
        begins = [each.fragment.begin for each in await self.client.fragments(self.journal)]
        return head, min(begins, default=head)

    async def _replay(self, audit: SourceAudit, info: JournalInfo, first: int, *, usable: KnownSource | None) -> None:
        expected = self.expected
        base = self._base(audit, usable, first)
        origin = self.min_offset
        if base is not None:
            start, complete = base, True
        else:
            start = Source(min(max(origin, first), expected.read_through))
            complete = start.read_through <= origin or expected.read_through <= origin
        had_totals = usable is not None and base is not None
        try:
            replayed = await Replay(
                self.client,
                self.framing_of(info.spec),
                self.journal,
                start,
                expected,
                self.measures,
                messages=usable.messages if usable is not None and had_totals else 0,
                totals=dict(usable.totals) if usable is not None and had_totals else None,
            ).run()
        except (OffsetJump, CorruptData, InvalidInput) as error:
            audit.totals_problem = f"{self.journal} cannot be replayed"
            self._find(audit, Kind.NOT_EXAMINED, f"{self.journal} cannot be replayed: {error}")
            return
        self._judge(audit, replayed, complete=complete, first=first)
        audit.replayed_bytes = expected.read_through - replayed.begin
        audit.messages, audit.totals = replayed.messages, replayed.totals
        if replayed.gaps:
            audit.totals_problem = f"content of {self.journal} is gone at {_spans(replayed.gaps)}"
        elif base is None and not complete:
            audit.totals_problem = f"content of {self.journal} below {first} is gone, and no earlier audit counted it"
        elif had_totals and usable is not None and not usable.totals_complete:
            audit.totals_problem = f"content of {self.journal} was gone when it was first audited"
        if not audit.findings or all(each.severity is not Severity.ERROR for each in audit.findings):
            audit.known = KnownSource(
                expected.read_through,
                info.create_revision,
                proven_text(self.journal, expected),
                replayed.messages,
                dict(replayed.totals),
                not audit.totals_problem,
            )

    def _base(self, audit: SourceAudit, usable: KnownSource | None, first: int) -> Source | None:
        """Return a proven state to begin from: one below the checkpoint, with all measures."""
        if usable is None:
            return None
        try:
            base = usable.proven_source(self.journal)
        except (CorruptData, ValueError):
            self._find(
                audit,
                Kind.MEMORY_DAMAGED,
                f"what an earlier audit proved of {self.journal} is not readable; it is replayed from its beginning",
                Severity.WARNING,
            )
            return None
        if base is None or base.read_through > self.expected.read_through or base.read_through < first:
            return None
        if any(measure.name not in usable.totals for measure in self.measures):
            return None
        return base

    def _judge(self, audit: SourceAudit, replayed: Replayed, *, complete: bool, first: int) -> None:
        through = self.expected.read_through
        if replayed.torn:
            self._find(
                audit,
                Kind.MESSAGES_TORN,
                f"{replayed.torn_count} pieces of {self.journal} below the checkpoint are cut off messages, which the "
                f"consumer has passed over or kept as misfits: {replayed.torn[0]}",
                Severity.WARNING,
                offsets=[error.offset for error in replayed.torn],
            )
        if replayed.corrupt:
            self._find(
                audit,
                Kind.CHECKPOINT_DIFFERS,
                f"{replayed.corrupt_count} messages of {self.journal} below the checkpoint cannot be read, so the "
                f"consumer cannot have consumed them: {replayed.corrupt[0]}",
                offsets=[error.offset for error in replayed.corrupt],
            )
        if replayed.reached != through and (complete or replayed.reached > replayed.begin):
            self._find(
                audit,
                Kind.CHECKPOINT_DIFFERS,
                f"the checkpoint has read {self.journal} through {through}, where no message ends; the last one before "
                f"ends at {replayed.reached}",
                read_through=through,
                message_end=replayed.reached,
            )
        compared = compare(self.expected, replayed, complete=complete, first_offset=first)
        if compared.differences:
            named = "; ".join(map(str, compared.differences[:_NAMED]))
            more = f"; and {len(compared.differences) - _NAMED} more" if len(compared.differences) > _NAMED else ""
            self._find(
                audit,
                Kind.CHECKPOINT_DIFFERS,
                f"the checkpoint contradicts {self.journal} up to {through}: its offset or its producers' "
                f"states were changed. {named}{more}",
                read_through=through,
                producers=[each.producer.hex() for each in compared.differences],
            )
        for producer, begin in compared.beginnings_gone.items():
            self._find(
                audit,
                Kind.TRANSACTION_CUT_OFF,
                f"producer {producer.hex()} has an open transaction in {self.journal} that began at {begin}, and "
                f"content below {first} is gone: if it is acknowledged, the consumer fails",
                Severity.WARNING,
                producer=producer.hex(),
                begin=begin,
            )
        audit.unproven = compared.unproven


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"[{begin}, {end})" for begin, end in spans[:_NAMED]) + (" …" if len(spans) > _NAMED else "")
