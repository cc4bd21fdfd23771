"""Signed audit reports (`coranto.security.documents`). A signature reveals every change."""

from __future__ import annotations

from typing import Final

from coranto.audit.report import Report
from coranto.security.documents import DocumentKind, sign_document, verify_document
from coranto.security.tokens import Keys

REPORT: Final = DocumentKind("coranto-audit", "report", "coranto audit --sign")


def sign_report(report: Report, keys: Keys) -> str:
    """Return the report, signed with the first key."""
    return sign_document(REPORT, report.to_json().encode(), keys)


def verify_report(signed: str, keys: Keys) -> Report:
    """Verify a signed report, and return it.

    Raises Unauthenticated if none of the keys signed it or if it was changed, and InvalidInput for any other text.
    """
    return Report.from_json(verify_document(REPORT, signed, keys))
