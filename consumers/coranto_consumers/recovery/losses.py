"""Losses in the findings about a consumer, and the losses that can be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from coranto.audit import Fact, Finding, Kind
from coranto.recovery import Loss

CHECKPOINT: Final = frozenset(
    {
        Kind.CHECKPOINT_GONE,
        Kind.CHECKPOINT_UNREADABLE,
        Kind.CHECKPOINT_SET_BACK,
        Kind.CHECKPOINT_AHEAD,
        Kind.CHECKPOINT_DIFFERS,
    }
)
"""The kinds of findings about a checkpoint that is not the last one that the consumer wrote."""
LOSSES: Final = frozenset(
    {
        Kind.JOURNAL_GONE,
        Kind.JOURNAL_RECREATED,
        Kind.UNREAD_CONTENT_GONE,
        Kind.EXPECTATION_FAILED,
        Kind.ACKNOWLEDGEMENT_MISSING,
        *CHECKPOINT,
    }
)
_UNSETTLED: Final = frozenset({Kind.CHECKPOINT_GONE, Kind.CHECKPOINT_SET_BACK, Kind.ACKNOWLEDGEMENT_MISSING})


def can_be_accepted(finding: Finding) -> bool:
    """Return True for a loss that audits do not report any more after the current state was accepted.

    A consumer cannot continue from a checkpoint that is missing, unreadable, or beyond the end of its journal.
    """
    if finding.kind is Kind.CHECKPOINT_GONE:
        return "fence" in finding.facts
    return finding.kind not in (Kind.CHECKPOINT_UNREADABLE, Kind.CHECKPOINT_AHEAD)


def is_unsettled(finding: Finding) -> bool:
    """Return True if the checkpoint has to be written again under a higher fence before the loss can be accepted."""
    return finding.kind in _UNSETTLED and can_be_accepted(finding)


def loss_of(finding: Finding) -> Loss:
    """Return the loss in a finding about a consumer."""
    facts = finding.facts

    def text(name: str) -> str:
        return str(facts.get(name) or "")

    def number_of(*names: str) -> int:
        return next((int(str(facts[name])) for name in names if facts.get(name) is not None), 0)

    begins = {Kind.CHECKPOINT_SET_BACK: "read_through"}
    detail = ""
    if finding.kind is Kind.EXPECTATION_FAILED:  # Both numbers grow; their difference is constant.
        detail = f"{text('query')}: {Decimal(text('found')) - Decimal(text('expected'))}"
    elif finding.kind is Kind.CHECKPOINT_DIFFERS:
        detail = ", ".join(map(str, [*_listed(facts.get("producers")), *_listed(facts.get("offsets"))]))
    return Loss(
        finding.subject.name,
        finding.kind,
        finding.message,
        journal=text("journal"),
        begin=number_of(begins.get(finding.kind, "begin")),
        end=number_of("end", "known", "read_through"),
        table=text("table"),
        fence=number_of("known_fence", "fence"),
        clock=number_of("clock"),
        detail=detail,
    )


def _listed(fact: Fact) -> Sequence[object]:
    return fact if isinstance(fact, list) else ()
