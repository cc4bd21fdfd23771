"""What others chose, names of objects and words of stores, and secrets, in what Dagster shows."""

from __future__ import annotations

import base64
import traceback

import dagster as dg
from markdown_it import MarkdownIt

from coranto.audit import AuditStatus, FragmentAudit, JournalAudit
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from dagster_coranto import JournalResource
from dagster_coranto.checks import FragmentFindings, as_result
from dagster_coranto.metadata import verbatim

HOSTILE = (
    "![x](https://evil.example/pixel.png) [click](javascript:alert(1)) <img src=x onerror=alert(1)>"
    " https://evil.example \n\n# Title\n```\n````\n"
)
KEY = base64.b64encode(b"k" * 32).decode()


def test_findings_show_hostile_names_as_they_are() -> None:
    """The check quotes names of objects, and what stores answer. Whoever writes to a store chooses both."""
    fragment = Fragment("a/journal", 0, 10, ZERO_SUM, Codec.NONE)
    audit = JournalAudit("a/journal", 0, 10, (FragmentAudit(fragment, AuditStatus.UNREADABLE, HOSTILE),), ())
    result = as_result([FragmentFindings(audit, (), ())], dg.AssetCheckSeverity.ERROR)
    found = result.metadata["findings"]
    assert isinstance(found, dg.MarkdownMetadataValue)
    shown = MarkdownIt("commonmark", {"linkify": True}).parse(found.md_str or "")
    assert [token.type for token in shown] == ["fence"], "nothing but one block of plain text"
    assert "javascript:alert(1)" in shown[0].content


def test_lines_stay_lines() -> None:
    shown = MarkdownIt("commonmark").parse(verbatim(["- one", "- two `` three"]).md_str or "")
    assert [token.content for token in shown] == ["- one\n- two `` three\n"]


def test_secrets_of_a_resource_are_in_no_representation() -> None:
    resource = JournalResource(endpoint="127.0.0.1:1", auth_token="header.secret-claims.signature", auth_keys=KEY)
    shown = f"{resource!r} {resource}"
    try:
        raise ValueError(f"cannot use {resource}")
    except ValueError:
        shown += traceback.format_exc()
    assert "secret-claims" not in shown
    assert KEY not in shown
    assert "127.0.0.1:1" in shown
