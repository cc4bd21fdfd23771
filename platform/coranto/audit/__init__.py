"""Audits: compare stored content with brokers and with earlier audits, and report differences.

`audit_journals` audits all journals of a selector. `findings` and `report` have the data types of audits, and
`check` the interface of checks, which return findings. `signing` signs reports. `content` compares one journal's
fragments with the brokers' index.
"""

from coranto.audit.check import Check, run_checks
from coranto.audit.content import AuditStatus, FragmentAudit, JournalAudit, audit_journal, uncovered
from coranto.audit.findings import Fact, Finding, Kind, Severity, Subject, SubjectKind
from coranto.audit.journals import AuditOptions, JournalsCheck, audit_journals
from coranto.audit.report import Coverage, Depth, Report

__all__ = [
    "AuditOptions",
    "AuditStatus",
    "Check",
    "Coverage",
    "Depth",
    "Fact",
    "Finding",
    "FragmentAudit",
    "JournalAudit",
    "JournalsCheck",
    "Kind",
    "Report",
    "Severity",
    "Subject",
    "SubjectKind",
    "audit_journal",
    "audit_journals",
    "run_checks",
    "uncovered",
]
