"""The judgement of one journal: compares its current state with its record and its spec. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from coranto import labels
from coranto.audit import objects
from coranto.audit.compared import ComparedJournal, shown_time
from coranto.audit.content import uncovered
from coranto.audit.findings import Fact, Finding, Kind, Severity
from coranto.audit.gathered_journal import GatheredJournal, file_facts, known
from coranto.audit.health import health_of
from coranto.audit.losses import Expected, lost, merged, overlaps, shortest
from coranto.audit.remembered import JournalRecord, Key, KnownFragment, digest_of, digest_of_registers
from coranto.fragments.forks import first_offset
from coranto.wire import protocol_pb2 as pb

_SHOWN = 5


@dataclass(slots=True)
class Judged:
    """The findings about one journal, facts about it, and its new record (None: leave the old record)."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)
    record: JournalRecord | None = None


def judge(present: GatheredJournal, before: JournalRecord | None, *, fresh: bool = False) -> Judged:
    """Judge a journal by its current state and its record `before`.

    With `fresh`, the journal is accepted as it is: losses are neither reported nor recorded.
    """
    found = _Judgement(present, None if fresh else before)
    found.identity()
    found.content(fresh=fresh)
    found.heads()
    objects.report_misnamed(found)
    judged = Judged([*found.findings, *health_of(present)], found.facts())
    judged.record = found.record() if present.complete else None
    since = dict(before.since) if before is not None and not fresh else {}
    lasting: dict[str, float] = {}
    for position, each in enumerate(judged.findings):
        if each.is_error:
            lasting[each.kind] = since.get(each.kind, present.at)
            judged.findings[position] = replace(each, since=lasting[each.kind])
    if judged.record is not None:
        judged.record = replace(judged.record, since=lasting, accepted=before.accepted if before is not None else [])
    return judged


class _Judgement(ComparedJournal):
    """A judgement in progress."""

    unexplained = False

    # -- Identity ------------------------------------------------------------------------------------------------------

    def identity(self) -> None:
        before, info = self.before, self.present.info
        if before is None:
            self.find(
                Kind.FIRST_AUDIT,
                Severity.INFO,
                "no earlier audit of this journal is known, so only losses from now on can be found",
            )
            return
        if before.create_revision == info.create_revision and before.cluster in ("", self.present.cluster):
            return
        moved = before.cluster not in ("", self.present.cluster)
        self.find(
            Kind.JOURNAL_RECREATED,
            Severity.ERROR,
            f"it was deleted and created again since {shown_time(before.at)}: its create revision was "
            f"{before.create_revision} and is {info.create_revision}"
            + (f", and the cluster was {before.cluster} and is {self.present.cluster}" if moved else "")
            + f". It ended at {before.head} then. Content that was not stored is in deleted/ of the brokers' data "
            "directories for a week; accept the journal as it is (coranto audit --accept) when it is right",
            {
                "create_revision_before": before.create_revision,
                "create_revision": info.create_revision,
                "head_before": before.head,
                "head": self.present.head.head,
            },
        )

    # -- Content -------------------------------------------------------------------------------------------------------

    def content(self, *, fresh: bool) -> None:
        if not self.present.head.known or self.present.problem:
            return  # `health_of` reports that.
        stored = [each for each in self.checked_objects.stored if not self.is_bad(each)]
        if self.present.unlisted:
            stored = [each for each in self.present.index if each.backing_store]  # A store could not be listed.
        stored_spans = [(each.begin, each.end) for each in stored]
        spans = stored_spans + [(each.begin, each.end) for each in self.present.live]
        beginning = min((begin for begin, _ in spans), default=self.head)
        expected = self._expected(beginning)
        stored_end = max((end for _, end in stored_spans), default=0)
        self.lost = [] if fresh else lost(expected, spans, stored_end, self.present.at)
        # New content at offsets that were assigned twice does not restore the lost content.
        self.missed = self._still_missed()
        self.lost = merged([*self.lost, *((each.begin, each.end) for each in self.missed)])
        gaps = [(beginning, self.head)] if fresh else self.gaps
        # A gap that was accepted, and then filled, is not accepted a second time.
        self.gaps = [piece for begin, end in gaps for piece in uncovered(spans, begin, end)]
        self.lost = [piece for begin, end in self.lost for piece in uncovered(list(self.gaps), begin, end)]
        self._report_lost(expected)
        if self._is_pruned:
            # Its consumer removes content that it no longer needs, anywhere in the log. So this is reported once, and
            # then accepted.
            self.gaps, self.lost, self.missed = merged([*self.gaps, *self.lost]), [], []
        elif self.before is None and not fresh and expected.first == beginning > first_offset(self.spec):
            self._unexplained(beginning, keeps=not expected.retention_seconds, stored=bool(stored_spans))
        objects.report_missing(self, spans)
        if not self.present.unlisted:
            objects.report_unstored(self, stored_spans)
        objects.report_replaced(self)

    @property
    def _is_pruned(self) -> bool:
        """True for a recovery log: consumers remove fragments that no hints name any more."""
        label = pb.Label(name=labels.CONTENT_TYPE, value=labels.RECOVERY_LOG)
        return label in self.spec.labels.labels

    def _still_missed(self) -> list[KnownFragment]:
        keys = self.present.keys | self.present.found_again
        return [
            each
            for each in (self.before.fragments if self.before is not None else [])
            if each.lost_since and each.key not in keys
        ]

    def _expected(self, beginning: int) -> Expected:
        before = self.before
        index = [known(each) for each in self.present.gone]
        if before is None:
            retention = shortest(self.present.retention_seconds)
            # Fragments in the index existed, even if this is the first audit.
            first = min([beginning, *(each.begin for each in index)])
            return Expected(first, self.head, index, 0.0, retention)
        retention = shortest(before.retention_seconds, self.present.retention_seconds)
        if before.retention_seconds <= 0 and self.present.retention_seconds <= 0:
            retention = 0.0
        return Expected(before.first, self.head, [*before.fragments, *index], before.at, retention)

    def _report_lost(self, expected: Expected) -> None:
        if not self.lost:
            return
        size = sum(end - begin for begin, end in self.lost)
        # A fragment may be in the record and in the brokers' index.
        seen = [*{each.key: each for each in expected.known if overlaps((each.begin, each.end), self.lost)}.values()]
        changed = self._is_changed
        facts: dict[str, Fact] = {
            "spans": [[begin, end] for begin, end in self.lost],
            "bytes": size,
            **file_facts(self.present.journal, seen),
            "retention_seconds": expected.retention_seconds,
            "spec_changed": changed,
        }
        was = ""
        if self.before is not None and seen:
            since = min((each.lost_since for each in seen if each.lost_since), default=0.0)
            was = f", missing since {shown_time(since)}" if since else f", there at {shown_time(self.before.at)}"
        rule = (
            f"retention ({expected.retention_seconds:g} s) does not allow that yet"
            if expected.retention_seconds
            else "its retention keeps everything"
        )
        hint = (
            " Its spec was changed since: a retention that was shortened for a while would explain it."
            if changed and was
            else ""
        )
        kind = Kind.CONTENT_LOST if was else Kind.CONTENT_MISSING
        advice = (
            "Restore the fragments from a copy of the store, or start the brokers that had them; if they are gone for "
            "good, accept the loss (coranto audit --accept)"
        )
        if not self.present.objects and any(url.startswith("file:") for url in self.spec.fragment.stores):
            advice = f"If brokers have their files in another folder, name it ($CORANTO_FILE_ROOT). {advice}"
        if self._is_pruned:
            advice = (
                "It is a recovery log: `coranto shards prune` removes what no hints name. This is reported only once"
            )
        self.find(
            kind,
            Severity.WARNING if self._is_pruned else Severity.ERROR,
            f"{size} bytes of content are gone, in {_shown(self.lost)}{was}, and {rule}.{hint} {advice}",
            facts,
        )

    def _unexplained(self, beginning: int, *, keeps: bool, stored: bool) -> None:
        """Report an unexplained beginning. Retention always keeps the fragment with the highest end."""
        if not keeps and (stored or not self.spec.fragment.stores):
            return
        self.unexplained = True
        why = "although its retention keeps everything" if keeps else "and nothing is stored"
        self.find(
            Kind.BEGINNING_UNEXPLAINED,
            Severity.ERROR,
            f"it begins at {beginning} {why}, and no earlier audit knows why: [{first_offset(self.spec)}, {beginning}) "
            "may be lost. If that "
            "content was removed on purpose, accept the journal as it is (coranto audit --accept)",
            {"begin": beginning},
        )

    @property
    def _is_changed(self) -> bool:
        """True if the spec changed between the last audit that had all content and the first one that missed some."""
        before, info = self.before, self.present.info
        if before is None or before.create_revision != info.create_revision:
            return False
        missed = any(each.lost_since for each in before.fragments)
        return before.lost_at_change if missed else before.mod_revision != info.mod_revision

    # -- Head and registers --------------------------------------------------------------------------------------------

    def heads(self) -> None:
        before, head = self.before, self.present.head
        if before is None or not head.known:
            return
        if head.head < before.head:
            self.find(
                Kind.HEAD_FELL,
                Severity.ERROR,
                f"its head is {head.head}, and was {before.head} at {shown_time(before.at)}: brokers have lost content "
                "that was acknowledged. Start the brokers that had it, with their data directories; if they are gone "
                "for good, `coranto journals reset-head` lets the journal continue",
                {"head_before": before.head, "head": head.head},
            )
        if head.registers is None or before.registers is None:
            return
        registers = digest_of_registers(head.registers)
        if registers != before.registers and (head.head == before.head or (before.registers and not registers)):
            unmoved = head.head == before.head
            self.find(
                Kind.REGISTERS_LOST,
                Severity.ERROR if unmoved else Severity.WARNING,
                f"its registers {'changed without an append' if unmoved else 'are empty and were not'} since "
                f"{shown_time(before.at)}: brokers may have lost them. Fences that writers keep in registers do not "
                "hold until they are set again",
                {"head": head.head, "empty": not registers},
            )

    # -- The new record ------------------------------------------------------------------------------------------------

    def record(self) -> JournalRecord:
        present, before, head = self.present, self.before, self.present.head
        fragments: dict[Key, KnownFragment] = {}
        conflicts = self._newcomers()
        for each in (*self.checked_objects.stored, *present.live):
            now = known(each)
            kept = self.bad.get(now.key) if self.is_bad(each) else None
            if now.key in present.bad:
                kept = now._replace(bad=present.bad[now.key])
            if now.key in conflicts or (now.stored and now.begin > self.head):
                continue  # A stray, or an object whose offsets a known one has. Do not record it.
            fragments[now.key] = kept or now._replace(verified_at=self.verified.get(now.key, 0.0))
        missed = {each.key for each in self.missed} | {each.key for each, _ in present.reassigned}
        for old in [*(before.fragments if before is not None else []), *map(known, present.gone)]:
            is_lost = old.key in missed or old.key in self.replaced or overlaps((old.begin, old.end), self.lost)
            if old.key not in fragments and is_lost and old.key not in present.found_again:
                fragments[old.key] = old._replace(lost_since=old.lost_since or present.at)
        beginning = min((each.begin for each in fragments.values()), default=self.head)
        # Later audits also report an unexplained beginning, until it is accepted.
        first = 0 if self.unexplained else min([beginning, *(begin for begin, _ in self.lost)])
        unchanged = before is not None and any(each.kind is Kind.JOURNAL_RECREATED for each in self.findings)
        registers = digest_of_registers(head.registers) if head.registers is not None else None
        if before is not None and any(each.kind is Kind.REGISTERS_LOST and each.is_error for each in self.findings):
            registers = before.registers
        return JournalRecord(
            present.journal,
            before.cluster if unchanged and before is not None else present.cluster,
            before.create_revision if unchanged and before is not None else present.info.create_revision,
            present.info.mod_revision,
            present.at,
            self.head,
            max(head.persisted_head, before.persisted_head if before is not None else 0),
            present.retention_seconds,
            [(label.name, label.value) for label in self.spec.labels.labels],
            registers,
            first,
            sorted(fragments.values()),
            gaps=self.gaps,
            lost_at_change=bool(self.lost) and self._is_changed,
        )

    def _newcomers(self) -> set[Key]:
        """Return the keys of new objects that have the offsets of a known object, which is present or missed."""
        keys = self.present.keys
        remembered = self.before.fragments if self.before is not None else []
        old = {each.key for each in remembered}
        missed = {each.key for each in remembered if each.lost_since} | self.replaced
        taken = {(begin, end) for begin, end, _ in (old & keys) | missed}
        return {key for key in keys - old if key[:2] in taken}

    def facts(self) -> dict[str, Fact]:
        head, present = self.present.head, self.present
        stored = [known(each) for each in self.checked_objects.stored]
        return {
            "create_revision": present.info.create_revision,
            "first": min((each.begin for each in (*self.checked_objects.stored, *present.live)), default=head.head),
            "persisted_head": max((each.end for each in stored), default=0),
            "head": head.head,
            "fragments": len(stored),
            "stored_bytes": sum(each.end - each.begin for each in stored),
            "live_bytes": sum(each.length for each in present.live),
            "last_append_time": head.last_append_time,
            "retention_seconds": present.retention_seconds,
            "digest": digest_of(stored),
            "replicas": head.replicas,
            "suspended": pb.JournalSpec.Suspend.Level.Name(present.info.spec.suspend.level),
        }


def _shown(spans: Iterable[tuple[int, int]]) -> str:
    found = [f"[{begin}, {end})" for begin, end in spans]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
