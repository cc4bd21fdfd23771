"""Audits: compare what is stored with what brokers say and with what was there before, and report what differs.

`findings` and `report` are the values that every audit gives, and `check` is the interface of the parts that make
findings. `signing` signs reports. `content` compares one journal's fragments with the brokers' index.
"""

from coranto.audit.check import Check, run_checks
from coranto.audit.content import AuditStatus, FragmentAudit, JournalAudit, audit_journal, uncovered
from coranto.audit.findings import Fact, Finding, Kind, Severity, Subject, SubjectKind
from coranto.audit.report import Coverage, Depth, Report

__all__ = [
    "AuditStatus",
    "Check",
    "Coverage",
    "Depth",
    "Fact",
    "Finding",
    "FragmentAudit",
    "JournalAudit",
    "Kind",
    "Report",
    "Severity",
    "Subject",
    "SubjectKind",
    "audit_journal",
    "run_checks",
    "uncovered",
]
