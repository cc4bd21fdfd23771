"""Check that the acknowledgements of a committed checkpoint are in their journals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final

from coranto.audit import Fact, Finding, Kind, Severity, Subject
from coranto.client import JournalClient, JournalInfo
from coranto.errors import CorantoError
from coranto.labels import NAME, label_selector
from coranto.messages import Framing, JsonLines
from coranto.names import strip_metadata
from coranto_consumers.audit.evidence import EvidenceSource, Row
from coranto_consumers.audit.intents import Fate, Intent, find_fates, framing_of_intent, parse_intents
from coranto_consumers.audit.sources import FramingOf, is_fully_suspended

TIMEOUT_S: Final = 5.0
"""Seconds to wait for acknowledgements in flight before they are reported as missing."""
_RECHECK_SECONDS: Final = 0.25


async def list_journals(
    client: JournalClient, rows: Iterable[Row], others: Iterable[str] = ()
) -> dict[str, JournalInfo]:
    """Return the journals of checkpoints, and `others`, by name. Journals that do not exist are omitted."""
    names = {name for row in rows for name in (*row.checkpoint.sources, *row.checkpoint.ack_intents)} | set(others)
    if not names:
        return {}
    # Names may carry metadata behind a semicolon, which brokers strip.
    plain = sorted({strip_metadata(name) for name in names})
    listing = await client.list(label_selector(include=[(NAME, name) for name in plain]))
    by_name = {info.name: info for info in listing.journals}
    return {name: by_name[bare] for name in names if (bare := strip_metadata(name)) in by_name}


class AcknowledgementCheck:
    """Finds acknowledgements that are missing from their journals. The consumer may be running."""

    def __init__(
        self, client: JournalClient, evidence: EvidenceSource, framing_of: FramingOf, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Wait for acknowledgements in flight for up to `timeout_s` seconds."""
        self._client = client
        self._evidence = evidence
        self._framing_of = framing_of
        self._timeout_s = timeout_s

    async def run(
        self, subject: Subject, shard: str, row: Row, journals: Mapping[str, JournalInfo]
    ) -> tuple[list[Finding], int]:
        """Return the findings and the number of acknowledgements. `journals` are the journals of the row, by name."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        while True:
            # Only the last attempt reads whole journals: clock skew may hide an acknowledgement in an old fragment.
            last = clock() >= deadline
            findings = await self._unmet_intents(subject, row, journals, whole=last)
            if not findings:
                break
            again = (await asyncio.to_thread(self._evidence.read, [shard], [])).rows.get(shard)
            if again is not None and not again.damage and again.payload != row.payload:
                # A checkpoint commits only after the acknowledgements of the previous one were appended.
                findings = []
                row, journals = again, await list_journals(self._client, [again])
                if last:
                    break
                continue
            if last:
                break
            await asyncio.sleep(_RECHECK_SECONDS)
        return findings, sum(1 for content in row.checkpoint.ack_intents.values() if content)

    async def _unmet_intents(
        self, subject: Subject, row: Row, journals: Mapping[str, JournalInfo], *, whole: bool
    ) -> list[Finding]:
        findings: list[Finding] = []
        for journal, content in sorted(row.checkpoint.ack_intents.items()):
            if not content:
                continue
            info = journals.get(journal)
            if info is None:
                message = f"the journal {journal} that its last transaction published to does not exist"
                findings.append(Finding(Kind.JOURNAL_GONE, Severity.WARNING, subject, message, {"journal": journal}))
                continue
            try:
                framing = framing_of_intent(self._framings(info), journal, content)
                intents = parse_intents(framing, journal, content)
                fates = await find_fates(
                    self._client, framing, journal, intents, has_content=not is_fully_suspended(info), whole=whole
                )
            except CorantoError as error:
                message = f"the acknowledgement for {journal} cannot be examined: {error}"
                findings.append(Finding(Kind.NOT_EXAMINED, Severity.ERROR, subject, message, {"journal": journal}))
                continue
            findings += [
                found for intent, fate in fates.items() if (found := _unmet(subject, intent, fate)) is not None
            ]
        return findings

    def _framings(self, info: JournalInfo) -> list[Framing[Any]]:
        """Return the framings to try for a journal: the application's framing, then JSON lines."""
        try:
            return [self._framing_of(info.spec), JsonLines()]
        except CorantoError:
            return [JsonLines()]


def _unmet(subject: Subject, intent: Intent, fate: Fate) -> Finding | None:
    facts: dict[str, Fact] = {
        "journal": intent.journal,
        "producer": intent.producer.hex(),
        "clock": intent.clock,
        "appended": fate is not Fate.MISSING,
    }
    match fate:
        case Fate.COMMITTED | Fate.UNPROVEN:
            return None
        case Fate.SUPERSEDED:
            return Finding(
                Kind.CHECKPOINT_SET_BACK,
                Severity.ERROR,
                subject,
                f"{intent.journal} has later acknowledgements by the writer of producer {intent.producer.hex()} than "
                "its checkpoint knows: the checkpoint was set back, or the store was restored from a backup",
                facts,
            )
        case _:
            return Finding(
                Kind.ACKNOWLEDGEMENT_MISSING,
                Severity.ERROR,
                subject,
                f"the acknowledgement of producer {intent.producer.hex()} for {intent.journal}: {fate.value}. "
                "The consumer's next start appends it again",
                facts,
            )
