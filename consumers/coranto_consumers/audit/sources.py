"""The audit of one source of a shard: its offset, its content, and its producers' states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from coranto.audit import Finding, Kind, Severity, Subject, uncovered
from coranto.client import JournalClient, JournalInfo
from coranto.errors import CorantoError, CorruptData, InvalidInput, OffsetJump
from coranto.journal_ids import held_through, is_same, same_journal, shared_through
from coranto.labels import CONTENT_TYPE, CONTINUE, DATA_LOSS, JSON_LINES, value_of
from coranto.messages import Framing, JsonLines, Source
from coranto.messages.checkpoints import SourceReset
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.audit.expectations import Measure, Number
from coranto_consumers.audit.judging import judge
from coranto_consumers.audit.memory import KnownSource, proven_text
from coranto_consumers.audit.replay import Replay, Replayed

FramingOf = Callable[[pb.JournalSpec], Framing[Any]]

_NAMED: Final = 3
"""The maximum number of spans in a message."""


def framing_of(spec: pb.JournalSpec) -> Framing[Any]:
    """Return the framing of a journal of JSON lines. Raises InvalidInput for another content type."""
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
    """The state to remember if the shard is sound."""
    replayed_bytes: int = 0
    unproven: int = 0
    messages: int = 0
    totals: dict[str, Number] = field(default_factory=dict)
    totals_problem: str = ""
    """The reason why `totals` do not cover all messages that the consumer has consumed; empty if they do."""
    reset: str = ""
    """The reset since the last audit, which repeats or omits messages on purpose. Empty without one."""

    @property
    def has_errors(self) -> bool:
        return any(each.is_error for each in self.findings)

    def take(self, other: SourceAudit) -> None:
        """Copy all fields of another audit."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))


@dataclass(frozen=True, slots=True)
class SourceExtent:
    """A journal's head, the begin offset of its content, and its id (empty if unknown)."""

    head: int
    first: int
    journal_id: str = ""


def released_segments(
    known: Collection[str], sources: Collection[str], journals: Mapping[str, JournalInfo]
) -> frozenset[str]:
    """Return the `known` sources that the checkpoint has dropped legitimately.

    These are deleted segments of streams with other segments in the checkpoint: when a stream is truncated, a Spark
    consumer drops the segments that it has read.
    """
    missing = set(known) - set(sources) - journals.keys()
    if not missing:
        return frozenset()
    from coranto.streams.model.stream import stream_of  # Imported here: slow, and rarely needed.

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
    accept: bool = False
    """True: remember the current state as correct."""
    reset: SourceReset | None = None
    """The reset of this source since the last audit."""

    async def run(self, info: JournalInfo | None) -> SourceAudit:
        """Run the audit. `info` is the journal; None if it does not exist. Never raises CorantoError."""
        if self.reset is not None:
            # Earlier audits proved the position before the reset, so replay from the journal's beginning.
            audit = await replace(self, known=None, reset=None).run(info)
            self._find(audit, Kind.CHECKPOINT_RESET, f"{self.reset} on purpose", Severity.INFO)
            audit.reset = str(self.reset)
            return audit
        audit = SourceAudit()
        if info is None:
            self._ended(
                audit,
                Kind.JOURNAL_GONE,
                f"the source {self.journal} was read through {self.expected.read_through} and does not exist. If that "
                "is not on purpose, create it again with its name and its stores, recover it (`coranto recover plan "
                f"{self.journal}`), and audit again",
            )
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

    def _ended(self, audit: SourceAudit, kind: Kind, message: str, **facts: Any) -> None:
        """Report a source whose journal does not exist any more, unless its loss was accepted."""
        known, through, journal_id = self.known, self.expected.read_through, self.expected.journal_id
        messages, totals, counted = 0, dict[str, Number](), False
        if known is not None:
            messages, totals = known.messages, dict(known.totals)
            counted = known.totals_complete and all(each.name in totals for each in self.measures)
            counted = counted and (known.gone or known.proves(self.journal, through))
            journal_id = journal_id or known.journal_id
        if counted:
            audit.messages, audit.totals = messages, totals
        else:
            audit.totals_problem = f"the journal {self.journal} that was read does not exist"
        if known is not None and known.gone and known.journal_id in ("", journal_id):
            audit.known = known
            return
        self._find(audit, kind, message, read_through=through, **facts)
        audit.known = KnownSource(
            through,
            0,
            messages=messages,
            totals=totals,
            totals_complete=known is not None and known.totals_complete,
            gone=True,
            journal_id=journal_id,
        )

    async def _examine(self, audit: SourceAudit, info: JournalInfo) -> None:
        through, known = self.expected.read_through, self.known
        extent = await self._extent(info)
        if shared_through(self.expected.expected_id, extent.journal_id) is None:
            self._ended(
                audit,
                Kind.JOURNAL_RECREATED,
                f"the source {self.journal} was deleted and created again, and the consumer has read the earlier one "
                f"through {through}, so it stops. If the present journal has the same content up to there, for example "
                "because it was recovered, let it continue: `coranto consumer accept-journals "
                f"{self.shard.name} {self.journal}`. Otherwise unread content of the earlier one is lost. To begin "
                f"with the present one, give a shard the label {DATA_LOSS}={CONTINUE}, or a Spark consumer "
                "fail_on_data_loss=False",
                head=extent.head,
            )
            return
        if known is None or known.gone or self._is_same(known, info, extent):
            await self._compare(audit, info, extent, known)
            return
        trial = SourceAudit()
        replayed = await self._compare(trial, info, extent, None)
        again = f"the source {self.journal} was deleted and created again"
        if replayed is not None and not trial.has_errors and self._has_content_of(known, replayed):
            again += ", with the content that the checkpoint has read"
            self._find(trial, Kind.JOURNAL_RECREATED, again, Severity.WARNING, head=extent.head, read_through=through)
            audit.take(trial)
            return
        if self.accept:
            audit.take(trial)
            audit.findings.clear()
        else:
            audit.totals_problem = f"{self.journal} is another journal than the one that was read"
        text = f"{again}. Content behind {through} may differ from the consumer's expectation"
        self._find(audit, Kind.JOURNAL_RECREATED, text, head=extent.head, read_through=through)

    @staticmethod
    def _is_same(known: KnownSource, info: JournalInfo, extent: SourceExtent) -> bool:
        """Return True unless the last audit saw another journal of this name. The head may have fallen since."""
        return known.create_revision == 0 or same_journal(
            known.create_revision, known.journal_id, 0, info.create_revision, extent.journal_id
        )

    def _has_content_of(self, known: KnownSource, replayed: Replayed) -> bool:
        """Return True if a replay from the journal's beginning has all acknowledgements of the proven state."""
        try:
            proven = known.proven_source(self.journal)
        except CorruptData:
            return False
        if proven is None or not proven.producers or replayed.begin > self.min_offset or replayed.gaps:
            return False
        found = replayed.source.producers
        return all(
            producer in found and found[producer].last_ack >= state.last_ack
            for producer, state in proven.producers.items()
        )

    async def _compare(
        self, audit: SourceAudit, info: JournalInfo, extent: SourceExtent, known: KnownSource | None
    ) -> Replayed | None:
        """Compare the checkpoint with the journal, and with earlier audits. Return the replay, if there was one.

        If `known` is of an earlier journal whose loss was accepted, that journal's messages count, too.
        """
        through, first = self.expected.read_through, extent.first
        usable = known if known is not None and not known.gone else None
        fell = not is_same(self.expected.expected_id, through, extent.journal_id)
        if through > extent.head or fell:
            why = "the checkpoint was set forward, or the journal lost content or was created again"
            if fell:
                held = held_through(self.expected.expected_id, through, extent.journal_id)
                why = f"the journal has lost its content from {held} on, and continued there (its head was reset)"
            self._find(
                audit,
                Kind.CHECKPOINT_AHEAD,
                f"the checkpoint has read {self.journal} through {through}, and the journal ends at {extent.head}: "
                f"{why}",
                read_through=through,
                head=extent.head,
            )
        if usable is not None and through < usable.read_through:
            self._find(
                audit,
                Kind.CHECKPOINT_SET_BACK,
                f"the checkpoint has read {self.journal} through {through}, and an earlier audit saw "
                f"{usable.read_through}: it was set back, or the store was restored from a backup. Messages that "
                "the consumer reads again count twice, unless the tables were set back together with it",
                read_through=through,
                known=usable.read_through,
            )
        lost = usable.lost if usable is not None else []
        if self.min_offset <= through < first:
            for begin, end in uncovered(lost, through, first):
                self._find(
                    audit,
                    Kind.UNREAD_CONTENT_GONE,
                    f"content [{begin}, {end}) of {self.journal} is gone, and the consumer has read only through "
                    f"{through}: these messages are lost for it",
                    begin=begin,
                    end=end,
                )
            if self.accept:
                lost = [*(span for span in lost if span[0] > first), (through, first)]
        now = KnownSource(
            through, info.create_revision, journal_id=extent.journal_id or self.expected.journal_id, lost=lost
        )
        audit.known = now
        if usable is not None and through >= usable.read_through:
            # A cheap audit keeps the proven state.
            audit.known = replace(
                now,
                proven=usable.proven,
                messages=usable.messages,
                totals=usable.totals,
                totals_complete=usable.totals_complete,
            )
        if self.deep and through <= extent.head:
            return await self._replay(audit, info, first, now, usable, known if usable is None else None)
        if self.measures:
            audit.totals_problem = f"{self.journal} was not replayed"
        return None

    async def _extent(self, info: JournalInfo) -> SourceExtent:
        if is_fully_suspended(info):
            return SourceExtent(info.spec.suspend.offset, info.spec.suspend.offset)
        found = await self.client.reported_head(self.journal)
        begins = [each.fragment.begin for each in await self.client.fragments(self.journal)]
        return SourceExtent(found.head, min(begins, default=found.head), found.journal_id)

    async def _replay(
        self,
        audit: SourceAudit,
        info: JournalInfo,
        first: int,
        now: KnownSource,
        usable: KnownSource | None,
        ended: KnownSource | None,
    ) -> Replayed | None:
        expected, origin = self.expected, self.min_offset
        base = self._base(audit, usable, first)
        if base is not None:
            start, complete = base, True
        else:
            start = Source(min(max(origin, first), expected.read_through))
            complete = start.read_through <= origin or expected.read_through <= origin
        counted = usable if base is not None else ended
        try:
            replayed = await Replay(
                self.client,
                self.framing_of(info.spec),
                self.journal,
                start,
                expected,
                self.measures,
                messages=counted.messages if counted is not None else 0,
                totals=dict(counted.totals) if counted is not None else None,
            ).run()
        except (OffsetJump, CorruptData, InvalidInput) as error:
            audit.totals_problem = f"{self.journal} cannot be replayed"
            self._find(audit, Kind.NOT_EXAMINED, f"{self.journal} cannot be replayed: {error}")
            return None
        findings, audit.unproven = judge(self.shard, self.journal, expected, replayed, complete=complete, first=first)
        audit.findings += findings
        audit.replayed_bytes = expected.read_through - replayed.begin
        audit.messages, audit.totals = replayed.messages, replayed.totals
        if self.accept:
            audit.totals_problem = ""  # Differences of the tables are accepted.
        elif replayed.gaps:
            audit.totals_problem = f"content of {self.journal} is gone at {_spans(replayed.gaps)}"
        elif base is None and not complete:
            audit.totals_problem = f"content of {self.journal} below {first} is gone, and no earlier audit counted it"
        elif counted is not None and not counted.totals_complete:
            audit.totals_problem = f"content of {self.journal} was gone when it was first audited"
        if self.accept or not audit.has_errors:
            audit.known = replace(
                now,
                proven=proven_text(self.journal, expected),
                messages=replayed.messages,
                totals=dict(replayed.totals),
                totals_complete=not audit.totals_problem,
            )
        return replayed

    def _base(self, audit: SourceAudit, usable: KnownSource | None, first: int) -> Source | None:
        """Return the proven state to replay from, or None. It has all measures, and is not after the checkpoint."""
        if usable is None:
            return None
        try:
            base = usable.proven_source(self.journal)
        except CorruptData:
            self._find(
                audit,
                Kind.MEMORY_DAMAGED,
                f"an earlier audit's proof of {self.journal} is not readable; it is replayed from its beginning",
                Severity.WARNING,
            )
            return None
        if base is None or any(measure.name not in usable.totals for measure in self.measures):
            return None
        through = self.expected.read_through
        if base.read_through < min(first, through) and not uncovered(usable.lost, base.read_through, first):
            return replace(base, read_through=min(first, through))  # The loss of the rest was accepted.
        return base if min(first, through) <= base.read_through <= through else None


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"[{begin}, {end})" for begin, end in spans[:_NAMED]) + (" …" if len(spans) > _NAMED else "")
