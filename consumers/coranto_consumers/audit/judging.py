"""Findings from the comparison of a source in a checkpoint with its replay."""

from __future__ import annotations

from typing import Any, Final

from coranto.audit import Finding, Kind, Severity, Subject
from coranto.messages import Source
from coranto_consumers.audit.replay import Replayed
from coranto_consumers.audit.states import compare

_NAMED: Final = 3
"""The maximum number of differing producers in a message."""


def judge(
    shard: Subject, journal: str, expected: Source, replayed: Replayed, *, complete: bool, first: int
) -> tuple[list[Finding], int]:
    """Return the findings, and the number of producers that could not be compared.

    `complete` is True if the replay covers all content that the consumer has read. `first` is the begin offset of the
    journal's content.
    """
    through = expected.read_through
    findings: list[Finding] = []

    def find(kind: Kind, message: str, severity: Severity = Severity.ERROR, **facts: Any) -> None:
        findings.append(Finding(kind, severity, shard, message, {"journal": journal, **facts}))

    for count, errors, what in (
        (replayed.torn_count, replayed.torn, "torn messages"),
        (replayed.corrupt_count, replayed.corrupt, "not messages"),
    ):
        if errors:
            find(
                Kind.MESSAGES_TORN,
                f"{count} pieces of {journal} below the checkpoint are {what}, which the consumer has skipped or "
                f"kept as misfits: {errors[0]}",
                Severity.WARNING,
                offsets=[error.offset for error in errors],
            )
    if replayed.reached != through and (complete or replayed.reached > replayed.begin):
        find(
            Kind.CHECKPOINT_DIFFERS,
            f"the checkpoint has read {journal} through {through}, where no message ends; the last one before "
            f"ends at {replayed.reached}",
            read_through=through,
            message_end=replayed.reached,
        )
    compared = compare(expected, replayed, complete=complete, first_offset=first)
    if compared.differences:
        named = "; ".join(map(str, compared.differences[:_NAMED]))
        more = f"; and {len(compared.differences) - _NAMED} more" if len(compared.differences) > _NAMED else ""
        find(
            Kind.CHECKPOINT_DIFFERS,
            f"the checkpoint contradicts {journal} up to {through}: its offset or its producers' "
            f"states were changed. {named}{more}",
            read_through=through,
            producers=[each.producer.hex() for each in compared.differences],
        )
    for producer, begin in compared.beginnings_gone.items():
        find(
            Kind.TRANSACTION_CUT_OFF,
            f"producer {producer.hex()} has an open transaction in {journal} that began at {begin}, and "
            f"content below {first} is gone: if it is acknowledged, the consumer fails",
            Severity.WARNING,
            producer=producer.hex(),
            begin=begin,
        )
    return findings, compared.unproven
