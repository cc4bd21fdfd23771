"""The current and the recorded state of one journal, which the parts of a judgement share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from coranto.audit.findings import Fact, Finding, Kind, Severity, Subject
from coranto.audit.gathered_journal import GatheredJournal, check_file_lengths, known
from coranto.audit.losses import Spans
from coranto.audit.remembered import JournalRecord, Key, KnownFragment
from coranto.audit.strays import strays_of, without_strays
from coranto.fragments.fragment import Fragment


class ComparedJournal:
    """The current and the recorded state of one journal, and the findings of their comparison so far."""

    def __init__(self, present: GatheredJournal, before: JournalRecord | None) -> None:
        self.strays = strays_of(present, before)
        self.vanished = {each.content_path for each in present.gone}
        """The files of fragments that brokers list, and that their stores do not have."""
        self.present = present = without_strays(present, self.strays)
        self.before = before
        self.findings: list[Finding] = []
        self.spec = present.info.spec
        self.subject = Subject.journal(present.journal)
        self.checked_objects = check_file_lengths(present.objects)
        remembered = before.fragments if before is not None else []
        self.bad = {each.key: each for each in remembered if each.bad}
        self.verified = {each.key: each.verified_at for each in remembered if not each.bad} | dict(present.verified)
        self.lost: Spans = []
        """The spans of lost content (`coranto.audit.losses`)."""
        self.gaps: Spans = list(before.gaps) if before is not None else []
        """The spans without content that were accepted as lost."""
        self.missed: list[KnownFragment] = []
        """The fragments that an earlier audit found lost and that are still missing."""
        self.replaced: set[Key] = set()
        """The known fragments whose offsets now have other content in the store."""
        head = present.head
        self.head = max(head.head, before.head if before is not None else 0)

    def find(self, kind: Kind, severity: Severity, message: str, facts: Mapping[str, Fact] | None = None) -> None:
        self.findings.append(Finding(kind, severity, self.subject, message, facts or {}))

    def is_bad(self, fragment: Fragment) -> bool:
        """Return True if this audit or an earlier one read this object, and its SHA-1 differed from its name."""
        key = known(fragment).key
        if key in self.present.bad or key in self.present.verified:
            return key in self.present.bad
        bad = self.bad.get(key)
        return bad is not None and bad.mod_time == fragment.mod_time


def shown_time(seconds: float) -> str:
    """Return a time as text for people."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
