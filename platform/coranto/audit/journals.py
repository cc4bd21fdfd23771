"""The audit of journals: gathers their current state, compares it with the records of earlier audits, and writes new
records.

Commands, Python programs and orchestrators call `audit_journals`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coranto import labels
from coranto.audit import deep
from coranto.audit.check import Check, Result, run_checks
from coranto.audit.clocks import CLOCK_SECONDS, difference
from coranto.audit.compared import shown_time
from coranto.audit.findings import Fact, Finding, Kind, Severity, Subject
from coranto.audit.forks import fork_findings
from coranto.audit.gathered_journal import GatheredJournal, file_facts
from coranto.audit.gathering import CONCURRENCY, gather
from coranto.audit.judgement import Judged, judge
from coranto.audit.memory import AuditMemory
from coranto.audit.record_places import RecordPlaces
from coranto.audit.remembered import JournalRecord, accepted
from coranto.audit.report import Coverage, Depth, Report
from coranto.client import JournalClient
from coranto.effects import Clock, SystemClock
from coranto.errors import InvalidInput
from coranto.fragments.stores import StoreRegistry
from coranto.labels import label_set, parse_selector
from coranto.telemetry import ProgressReport

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DEFAULT_BUDGET: Final = 1 << 30
"""The default number of bytes of stored content that a deep audit reads."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The options of an audit.

    `depth` DEEP reads stored content up to `budget` bytes (None: everything), and all spools. `memory` is the URL of
    the store with the records of earlier audits; by default each journal's first store has them. With `allow_empty`, a
    selector without a match is valid. `accept` is the reason for accepting the journals as they are: losses are
    reported a last time, and later audits ignore them.
    """

    depth: Depth = Depth.CHEAP
    budget: int | None = DEFAULT_BUDGET
    memory: str = ""
    allow_empty: bool = False
    accept: str = ""

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget <= 0:
            raise InvalidInput(
                f"an audit cannot read {self.budget} bytes; give at least 1, or None for all", field="budget"
            )


def budget_of(text: str, field: str) -> int | None:
    """Return the bytes of a budget such as 500000, 64M or 2GiB; None for `all`. Raises InvalidInput about `field`."""
    if text.strip().lower() == "all":
        return None
    found = re.fullmatch(r"\s*([0-9]+)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if found is None or not int(found[1]):
        raise InvalidInput(f"{text!r} is not a size: write a number of bytes, or 64M, or all", field=field)
    return int(found[1]) * _UNITS[found[2].upper()]


async def audit_journals(
    client: JournalClient,
    stores: StoreRegistry,
    selector: str = "",
    options: AuditOptions = AuditOptions(),
    *,
    checks: Sequence[Check] = (),
    clock: Clock | None = None,
    progress: ProgressReport | None = None,
) -> Report:
    """Audit the journals that a selector matches, and run other `checks` in the same report.

    A cancelled audit changes no journal; it may have stored some of its records.

    Raises the client's errors if brokers do not answer at all, and InvalidInput for a selector or URL that is not
    valid. Everything else that cannot be examined is a finding.
    """
    journals = JournalsCheck(client, stores, selector, options, clock=clock, progress=progress)
    return await run_checks(selector or "all journals", [journals, *checks], depth=options.depth, clock=clock)


class JournalsCheck:
    """The check of journals, as a part of any audit. It appends nothing to journals, and writes only its records.

    A cancelled `run` may have stored some of the records.
    """

    name = "journals"

    def __init__(
        self,
        client: JournalClient,
        stores: StoreRegistry,
        selector: str,
        options: AuditOptions,
        *,
        clock: Clock | None = None,
        memory: AuditMemory | None = None,
        at_replicas: bool = True,
        progress: ProgressReport | None = None,
    ) -> None:
        """`memory` is used for all journals, instead of the one in `options`.

        With `at_replicas`, a deep audit reads the spool of each replica at its own endpoint. Otherwise any one
        replica serves its spool.
        """
        self._client = client
        self._stores = stores
        self._selector = selector
        self._options = options
        self._clock: Clock = clock or SystemClock()
        self._given = memory
        self._progress = progress
        self._peers = client.config if at_replicas else None

    async def run(self) -> Result:
        gathered = await gather(self._client, self._stores, self._selector, self._clock, self._progress)
        subject = Subject.selector(self._selector or "all journals")
        result = Result(difference(subject.name, gathered.ahead), cluster=gathered.cluster)
        journals, clock = gathered.journals, gathered.clock
        if not journals and not self._options.allow_empty:
            result.findings.append(
                Finding(
                    Kind.NOTHING_SELECTED,
                    Severity.ERROR,
                    subject,
                    "no journal matches, so nothing was examined. Check the selector and the token's scope; declare "
                    "that it may be empty (allow_empty, or --allow-empty of coranto audit) if it may",
                )
            )
        places = RecordPlaces(self._client, self._stores, self._options.memory, self._given)
        await places.load(journals, gathered.stores)
        # Without journals, these are only places that may have records.
        weight = Severity.ERROR if journals or self._options.memory else Severity.WARNING
        result.findings += places.findings(weight)
        result.findings += _dated_ahead(places.records, clock.now())
        records = {name: record.dated_until(clock.now()) for name, record in places.records.items()}
        result.findings += self._gone(journals, records, gathered.cluster)
        result.findings += fork_findings(
            (present.info.spec for present in journals), (info.spec for info in gathered.others)
        )
        if self._options.depth is Depth.DEEP:
            journals = await self._deepen(journals, records, clock, result)
        judged = await self._judge(journals, records)
        for present in journals:
            each = judged[present.journal]
            result.findings += each.findings
            result.subjects[present.journal] = each.facts
        accepted_places = places.covered(gathered.others) if self._options.accept else set()
        await self._save(journals, records, judged, places, accepted_places, clock, result)
        known = sum(1 for present in journals if present.complete)
        result.coverage.insert(
            0,
            Coverage(
                self.name,
                "journals",
                known,
                len(journals) - known,
                "" if known == len(journals) else "brokers or stores did not answer completely; see the findings",
            ),
        )
        return result

    # -- The judgement -------------------------------------------------------------------------------------------------

    async def _judge(
        self, journals: Sequence[GatheredJournal], records: Mapping[str, JournalRecord]
    ) -> dict[str, Judged]:
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(present: GatheredJournal) -> Judged:
            async with gate:
                record = records.get(present.journal)
                found_again = await deep.found_again(self._client, present, record)
                return judge(replace(present, found_again=found_again), record)

        found = await asyncio.gather(*(one(present) for present in journals))
        return {present.journal: each for present, each in zip(journals, found, strict=True)}

    async def _deepen(
        self, journals: list[GatheredJournal], records: Mapping[str, JournalRecord], clock: Clock, result: Result
    ) -> list[GatheredJournal]:
        """Read content, and return the journals with the results."""
        stored = await deep.read_stored(self._stores, journals, records, self._options.budget, clock, self._progress)
        spools = await deep.read_spools(self._peers, self._client, journals)
        result.findings += [*stored.findings, *spools.findings]
        left = "the budget of this audit was used up; the next ones continue" if stored.left_bytes else ""
        result.coverage.append(Coverage("stored content", "bytes", stored.read_bytes, stored.left_bytes, left))
        result.coverage.append(Coverage("spools", "bytes", spools.spool_bytes))
        return [
            replace(
                present,
                verified=stored.verified.get(present.journal, {}),
                bad=stored.bad.get(present.journal, {}),
                reassigned=await deep.fragments_with_new_content(self._client, present, records.get(present.journal)),
            )
            for present in journals
        ]

    # -- The memory ----------------------------------------------------------------------------------------------------

    def _gone(
        self, journals: Sequence[GatheredJournal], records: Mapping[str, JournalRecord], cluster: str
    ) -> list[Finding]:
        """Return a finding for each recorded journal that the selector matches and that is gone."""
        matches = labels.matcher(parse_selector(self._selector))
        there = {present.journal for present in journals}
        found = []
        for name, record in sorted(records.items()):
            known = labels.with_meta(name, label_set(record.labels))
            if name in there or record.cluster != cluster or not matches(known):
                continue
            facts: dict[str, Fact] = {
                "create_revision": record.create_revision,
                "head": record.head,
                **file_facts(name, (each for each in record.fragments if not each.stored)),
            }
            found.append(
                Finding(
                    Kind.JOURNAL_GONE,
                    Severity.ERROR,
                    Subject.journal(name),
                    f"it existed at the last audit and is gone now, or is no longer selected; it ended at "
                    f"{record.head}. Content that was not stored is in deleted/ of the brokers' data directories for a "
                    "week. If it was deleted on purpose, accept that (coranto audit --accept)",
                    facts,
                )
            )
        return found

    async def _save(
        self,
        journals: Sequence[GatheredJournal],
        records: Mapping[str, JournalRecord],
        judged: Mapping[str, Judged],
        places: RecordPlaces,
        accepted_places: set[str],
        clock: Clock,
        result: Result,
    ) -> None:
        now = clock.now()
        reason = self._options.accept
        new: dict[str, dict[str, JournalRecord]] = {}
        for present in journals:
            record = judged[present.journal].record
            if record is None:
                continue  # The current state is incomplete, so the earlier record stays.
            if reason:
                losses = [str(each.kind) for each in judged[present.journal].findings if each.is_error]
                plain = judge(present, None, fresh=True).record or record
                verified = {each.key: each for each in record.fragments if not each.lost_since}
                plain = replace(plain, fragments=[verified.get(each.key, each) for each in plain.fragments])
                record = accepted(records.get(present.journal, plain), plain, reason, losses, now)
            before = records.get(present.journal)
            record = replace(record, sequence=before.sequence + 1 if before is not None else 1)
            new.setdefault(places.place_of(present), {})[present.journal] = record
        gone = {each.subject.name for each in result.findings if each.kind is Kind.JOURNAL_GONE} if reason else set()
        result.findings += await places.save(new, gone, now, accepted_places)


def _dated_ahead(records: Mapping[str, JournalRecord], now: float) -> list[Finding]:
    """Return a finding for each record that is dated in the future. Later records have higher sequences."""
    return [
        Finding(
            Kind.MEMORY_DAMAGED,
            Severity.WARNING,
            Subject.journal(name),
            f"its record of earlier audits is dated {shown_time(record.at)}, in the future: the clock of that audit "
            "was wrong, or another program made the record. The next complete audit replaces it",
            {"at": record.at},
        )
        for name, record in sorted(records.items())
        if record.at > now + CLOCK_SECONDS
    ]
