"""`ConsumerCheck`: the audit of a consumer across its store and its journals.

It compares the store's checkpoints and fences with their journals: the sources, and the journals of acknowledgements.
The consumer may be running: the store is read in one snapshot, journals only grow, and the check waits for
acknowledgements in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coranto.audit import Coverage, Fact, Finding, Kind, Severity, Subject, SubjectKind
from coranto.audit.check import Result
from coranto.audit.sealing import Seal
from coranto.audit.witness import BrokerWitness
from coranto.client import JournalClient, JournalInfo
from coranto.errors import CorantoError, CorruptData
from coranto.messages.checkpoints import Checkpoint, Source, SourceReset
from coranto_consumers.audit.acknowledgements import TIMEOUT_S, AcknowledgementCheck, list_journals
from coranto_consumers.audit.evidence import Evidence, EvidenceSource, Row, StagedRows
from coranto_consumers.audit.expectations import Expectation, Measure, Number
from coranto_consumers.audit.memory import Known, KnownShard, Memory, record_of
from coranto_consumers.audit.sources import FramingOf, SourceAudit, SourceCheck, framing_of, released_segments
from coranto_consumers.audit.tables import compare_tables
from coranto_consumers.audit.witnessed import WitnessedMemory


@dataclass(slots=True)
class _Progress:
    """The findings and totals of a run so far."""

    result: Result = field(default_factory=Result)
    shards: dict[str, KnownShard] = field(default_factory=dict)
    """The state to remember of each sound shard."""
    totals: dict[str, Number] = field(default_factory=dict)
    totals_problems: list[str] = field(default_factory=list)
    resets: list[str] = field(default_factory=list)
    replayed_bytes: int = 0
    unproven: int = 0
    intents: int = 0

    def find(
        self, kind: Kind, subject: Subject, message: str, severity: Severity = Severity.ERROR, **facts: Any
    ) -> None:
        self.result.findings.append(Finding(kind, severity, subject, message, facts))


class ConsumerCheck:
    """Audits the shards of a consumer. A Spark consumer has one shard, with the application's name."""

    def __init__(
        self,
        consumer: str,
        client: JournalClient,
        evidence: EvidenceSource,
        shards: Sequence[str] = (),
        *,
        framing_of: FramingOf = framing_of,
        min_offsets: Mapping[str, Mapping[str, int]] | None = None,
        expectations: Sequence[Expectation] = (),
        memory: Memory | None = None,
        deep: bool = True,
        accept: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`shards` are full names in the store; the default is the consumer's name.

        `min_offsets` has the begin offsets in the specs, by shard and journal. A deep audit replays each source from
        the state that an earlier audit in `memory` proved, or from its beginning. With `accept`, the current state is
        remembered as correct, despite findings.
        """
        self.consumer = consumer
        self._consumer = Subject(SubjectKind.CONSUMER, consumer)
        self._client = client
        self._evidence = evidence
        self._shards = tuple(shards) or (consumer,)
        self._framing_of = framing_of
        self._min_offsets = min_offsets or {}
        self.expectations = tuple(expectations)
        self._measures: list[Measure] = list({each.measure.name: each.measure for each in expectations}.values())
        self._memory = memory
        if memory is not None and memory.url:
            self._memory = WitnessedMemory(memory, BrokerWitness(client, memory.url, f"audits of consumer {consumer}"))
        self._seal = Seal.of(client.config.auth)
        self.is_deep = deep
        self._accept = accept
        self._timeout_s = timeout_s
        self.known = Known()
        """The results of earlier audits. Set by `run`."""
        self.sound: Mapping[str, KnownShard] = {}
        """The current state of sound shards. Set by `run`."""
        self.checkpoints: Mapping[str, Checkpoint] = {}
        """The current checkpoints that are readable, by shard. Set by `run`."""
        self.staged: Mapping[str, Sequence[StagedRows]] = {}
        """The staged rows, by shard. Set by `run`."""
        self.values: Sequence[object] = ()
        """The results of the expectations' queries. Set by `run`."""

    @property
    def remembers(self) -> bool:
        return self._memory is not None

    @property
    def name(self) -> str:
        return "consumer"

    async def run(self) -> Result:
        """Run the audit. Raises SqlStoreError if the store cannot be read, and the client's errors."""
        progress = _Progress()
        known = self.known = await self._remember(progress)
        # Include the shards of earlier audits: their rows may be gone.
        self._shards = tuple(dict.fromkeys([*self._shards, *known.shards]))
        evidence = await self._read()
        before = [journal for shard in known.shards.values() for journal in shard.sources]
        journals = await list_journals(self._client, evidence.rows.values(), before)
        for shard in self._shards:
            await self._examine(progress, shard, evidence, known.shards.get(shard), journals)
        self.sound, self.values = progress.shards, evidence.values
        rows = {name: row for name, row in evidence.rows.items() if not row.damage and not row.retired}
        self.checkpoints = {name: row.checkpoint for name, row in rows.items()}
        self.staged = evidence.staged
        findings, allowances = compare_tables(
            self._consumer,
            self.expectations,
            evidence.values,
            progress.totals,
            progress.totals_problems,
            known.allowances,
            deep=self.is_deep,
            accept=self._accept,
            resets=progress.resets,
        )
        progress.result.findings += findings
        await self._memorise(progress, known, allowances)
        self._cover(progress, len(evidence.rows))
        return progress.result

    async def _read(self) -> Evidence:
        queries = [each.query for each in self.expectations]
        return await asyncio.to_thread(self._evidence.read, self._shards, queries)

    # -- A shard -------------------------------------------------------------------------------------------------------

    async def _examine(
        self,
        progress: _Progress,
        shard: str,
        evidence: Evidence,
        known: KnownShard | None,
        journals: Mapping[str, JournalInfo],
    ) -> None:
        subject = Subject(SubjectKind.SHARD, shard)
        before = len(progress.result.findings)
        row = evidence.rows.get(shard)
        self._check_fence(progress, subject, row, evidence, known)
        if row is None or row.damage or row.retired:
            progress.totals_problems.append(f"{shard} has no checkpoint")
            return
        offsets = {journal: source.read_through for journal, source in row.checkpoint.sources.items()}
        facts: dict[str, Fact] = {
            "fence": row.fence,
            "read_through": sum(offsets.values()),
            "offsets": [f"{journal}={offset}" for journal, offset in sorted(offsets.items())],
        }
        progress.result.subjects[shard] = facts
        released = released_segments(known.sources if known else (), offsets, journals)
        for journal in sorted(set(known.sources if known else ()) - set(offsets) - released):
            progress.find(
                Kind.CHECKPOINT_SET_BACK,
                subject,
                f"the checkpoint does not know {journal}, and an earlier audit saw it at "
                f"{known.sources[journal].read_through if known else 0}: the checkpoint was set back or replaced",
                journal=journal,
            )
        expected = dict(row.checkpoint.sources)
        if known is not None:
            expected.update((each, Source(known.sources[each].read_through)) for each in released)
        resets = {
            each.journal: each
            for each in row.checkpoint.identity.resets
            if each.journal in expected and each.fence > (known.fence if known else 0)
        }
        audits = await self._check_sources(subject, shard, expected, known, journals, resets)
        messages = 0
        for audit in audits.values():
            progress.result.findings += audit.findings
            progress.replayed_bytes += audit.replayed_bytes
            progress.unproven += audit.unproven
            messages += audit.messages
            for name, total in audit.totals.items():
                progress.totals[name] = progress.totals.get(name, 0) + total
            if audit.totals_problem:
                progress.totals_problems.append(audit.totals_problem)
            if audit.reset:
                progress.resets.append(audit.reset)
        if self.is_deep:
            facts["messages"] = messages
        check = AcknowledgementCheck(self._client, self._evidence, self._framing_of, self._timeout_s)
        findings, intents = await check.run(subject, shard, row, journals)
        progress.result.findings += findings
        progress.intents += intents
        errors = [each for each in progress.result.findings[before:] if each.is_error]
        if resets and self._measures and not self._accept:
            return  # The next audit reports the reset again, until the tables are accepted.
        if not errors or self._accept:
            sources = {journal: audit.known for journal, audit in audits.items() if audit.known is not None}
            proven = record_of(row.checkpoint) if self.is_deep else known.record if known is not None else ""
            progress.shards[shard] = KnownShard(row.fence, sources, proven)

    def _check_fence(
        self, progress: _Progress, subject: Subject, row: Row | None, evidence: Evidence, known: KnownShard | None
    ) -> None:
        staged = evidence.staged.get(subject.name, ())
        highest = max([each.fence for each in staged], default=0)
        evident = max(highest, known.fence if known else 0)
        if row is None:
            traces = [f"an earlier audit saw it under fence {known.fence}"] if known else []
            traces += [f"{each.rows} rows of fence {each.fence} are staged in {each.table}" for each in staged]
            was = (
                f"It was deleted: {'; '.join(traces)}"
                if traces
                else "It was deleted, never existed, or has another name"
            )
            progress.find(
                Kind.CHECKPOINT_GONE,
                subject,
                f"{self._evidence.name} has no checkpoint of it. {was}. If it is started now, it reads all of its "
                "sources again",
                known_fence=evident or None,
            )
            return
        if row.damage:
            progress.find(Kind.CHECKPOINT_UNREADABLE, subject, f"its checkpoint is not readable: {row.damage}")
        if evident > row.fence:
            progress.find(
                Kind.CHECKPOINT_GONE,
                subject,
                f"its fence is {row.fence} and was {evident}: its row was deleted and recreated, or the store was "
                "restored from a backup",
                fence=row.fence,
                known_fence=evident,
            )
        for each in staged:
            if each.fence < row.fence:
                progress.find(
                    Kind.ROWS_LEFT_STAGED,
                    subject,
                    f"{each.rows} rows are left in {each.table} under fence {each.fence}, and the fence is "
                    f"{row.fence}. Nothing will use them; the consumer's next start deletes them",
                    Severity.WARNING,
                    table=each.table,
                    fence=each.fence,
                    rows=each.rows,
                )

    async def _check_sources(
        self,
        subject: Subject,
        shard: str,
        sources: Mapping[str, Source],
        known: KnownShard | None,
        journals: Mapping[str, JournalInfo],
        resets: Mapping[str, SourceReset],
    ) -> dict[str, SourceAudit]:
        begins = self._min_offsets.get(shard, {})
        audits: dict[str, SourceAudit] = {}
        for journal, expected in sorted(sources.items()):
            check = SourceCheck(
                self._client,
                self._framing_of,
                subject,
                journal,
                expected,
                known.sources.get(journal) if known else None,
                self._measures,
                begins.get(journal, 0),
                self.is_deep,
                self._accept,
                resets.get(journal),
            )
            audits[journal] = await check.run(journals.get(journal))
        return audits

    # -- Memory and coverage -------------------------------------------------------------------------------------------

    async def load(self) -> Known:
        """Return the results of earlier audits. Raises CorruptData, and CorantoError if they cannot be read."""
        content = await self._memory.load(self.consumer) if self._memory is not None else None
        return Known() if content is None else Known.from_bytes(self._seal.unseal(content, self.consumer))

    async def keep(self, known: Known) -> None:
        """Replace the results of earlier audits. Raises CorantoError if they cannot be saved."""
        if self._memory is not None:
            await self._memory.save(self.consumer, self._seal.seal(known.to_bytes(), self.consumer))

    async def _remember(self, progress: _Progress) -> Known:
        if self._memory is None:
            return Known()
        try:
            known = await self.load()
            if known != Known():
                return known
        except CorruptData as error:
            progress.find(Kind.MEMORY_DAMAGED, self._consumer, str(error))
        except CorantoError as error:
            progress.find(Kind.MEMORY_UNREACHABLE, self._consumer, f"earlier audits are not known: {error}")
        else:
            progress.find(
                Kind.FIRST_AUDIT,
                self._consumer,
                "no earlier audit of it is known, so a checkpoint that was set back as a whole may not be noticed",
                Severity.INFO,
            )
        return Known()

    async def _memorise(self, progress: _Progress, known: Known, allowances: dict[str, Number]) -> None:
        kinds = {each.kind for each in progress.result.findings if each.is_error}
        if self._memory is None or (kinds & {Kind.MEMORY_DAMAGED, Kind.MEMORY_UNREACHABLE} and not self._accept):
            return
        if not self._accept and any(
            each.is_error and each.subject == self._consumer for each in progress.result.findings
        ):
            # A proven state includes message counts, so nothing is proven while the tables contradict them.
            return
        kept = {} if self._accept else known.shards
        try:
            await self.keep(Known({**kept, **progress.shards}, allowances))
        except CorantoError as error:
            progress.find(Kind.MEMORY_UNREACHABLE, self._consumer, f"this audit cannot be remembered: {error}")

    def _cover(self, progress: _Progress, shards: int) -> None:
        coverage = progress.result.coverage
        coverage.append(Coverage(self.name, "shards", shards, len(self._shards) - shards, "no checkpoint"))
        coverage.append(Coverage(self.name, "acknowledgements", progress.intents))
        if self.is_deep:
            coverage.append(Coverage(self.name, "replayed bytes", progress.replayed_bytes))
            coverage.append(
                Coverage(
                    self.name,
                    "producers' states",
                    0,
                    progress.unproven,
                    "content that decides about them is gone" if progress.unproven else "",
                )
            )
        else:
            coverage.append(Coverage(self.name, "sources", 0, shards, "only a deep audit replays sources"))
