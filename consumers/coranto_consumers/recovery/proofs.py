"""Proofs that a checkpoint and tables belong together: totals proven by audits, and queries over the tables.

A checkpoint is written back only with proof: an earlier audit has proven it, and every expectation shows that the
tables hold exactly the messages that it covers. Otherwise, the tables and the checkpoint are of different times, and it
is unknown which messages the tables hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from coranto.audit import Finding, Kind
from coranto.errors import CorruptData
from coranto.messages import Checkpoint
from coranto.recovery import RecoveryStep, StepKind
from coranto_consumers.audit.check import ConsumerCheck
from coranto_consumers.audit.expectations import Number, agree, number
from coranto_consumers.audit.memory import Known, KnownShard

_OLDER: Final = frozenset({Kind.CHECKPOINT_SET_BACK, Kind.CHECKPOINT_GONE, Kind.UNREAD_CONTENT_GONE})
"""Findings about a checkpoint that is older than one that an audit knows."""
_SUSPECTS: Final = 10
"""The maximum number of moved checkpoints whose combinations are compared with the tables."""


@dataclass(frozen=True, slots=True)
class Diagnosed:
    findings: list[Finding]
    known: Known
    sound: Mapping[str, KnownShard]


def restore_steps(check: ConsumerCheck, diagnosed: Diagnosed, damaged: frozenset[str]) -> list[RecoveryStep]:
    """Return steps that write proven checkpoints back, if the tables agree with them.

    A checkpoint that was set forward to the end of a message contradicts no journal, only the tables. So if the damaged
    checkpoints alone do not explain the tables, all checkpoints that moved since they were proven are suspects.
    """
    if not check.expectations or not _contradicts(diagnosed.findings, damaged):
        return []
    wrong = damaged
    if not _agrees(check, diagnosed, damaged):
        moved = sorted(name for name in diagnosed.sound if _has_moved(name, diagnosed))[:_SUSPECTS]
        subsets = [frozenset(each) for n in range(1, len(moved) + 1) for each in combinations(moved, n)]
        fitting = [damaged | each for each in subsets if _agrees(check, diagnosed, damaged | each)]
        if len(fitting) != 1:
            return []  # No combination agrees, or several do, so nothing is proven.
        (wrong,) = fitting
    steps = []
    for name in sorted(wrong):
        known = diagnosed.known.shards[name]
        try:
            checkpoint = known.proven_checkpoint()
        except CorruptData:
            return []
        if _is_ahead_of_journals(diagnosed.findings, name, checkpoint):
            return []
        offsets = offsets_of(checkpoint)
        steps.append(
            RecoveryStep(
                StepKind.RESTORE_CHECKPOINT,
                name,
                f"write back the checkpoint that an audit has proven ({', '.join(offsets)}) under a higher fence. "
                "The tables agree with it",
                facts={"offsets": offsets, "known_fence": evident_fence(diagnosed.findings, name)},
            )
        )
    return steps


def accept_steps(check: ConsumerCheck, diagnosed: Diagnosed, damaged: frozenset[str]) -> list[RecoveryStep]:
    """Return steps that accept older checkpoints as correct, if the tables agree with them.

    Then the whole database was restored from a backup, and nothing is lost as long as the journals have the content
    to read again.
    """
    findings = [each for each in diagnosed.findings if each.is_error]
    older = all(each.kind in _OLDER and each.subject.name in check.checkpoints for each in findings)
    if not damaged or not older or not check.expectations or not check.is_deep:
        return []
    steps = []
    for name in sorted(damaged):
        offsets = offsets_of(check.checkpoints[name])
        steps.append(
            RecoveryStep(
                StepKind.TAKE_CHECKPOINT,
                name,
                f"let it continue from {', '.join(offsets)} under a fence above all that audits know. The tables agree "
                "with that, so the database was restored from a backup as a whole",
                loses="messages that it has published to journals since then appear a second time",
                facts={"offsets": offsets, "known_fence": evident_fence(diagnosed.findings, name)},
            )
        )
    return steps


def _is_ahead_of_journals(findings: Iterable[Finding], shard: str, checkpoint: Checkpoint) -> bool:
    """Return True if a journal that lost content ends before the offset of a checkpoint."""
    return any(
        each.kind is Kind.CHECKPOINT_AHEAD
        and each.subject.name == shard
        and checkpoint.offsets.get(str(each.facts["journal"]), 0) > int(str(each.facts["head"]))
        for each in findings
    )


def _contradicts(findings: Iterable[Finding], damaged: Collection[str]) -> bool:
    return bool(damaged) or any(each.kind is Kind.EXPECTATION_FAILED for each in findings)


def _has_moved(shard: str, diagnosed: Diagnosed) -> bool:
    """Return True if a sound checkpoint has other offsets than the proven one."""
    known, now = diagnosed.known.shards.get(shard), diagnosed.sound[shard]
    if known is None:
        return False
    try:
        before = known.proven_checkpoint().offsets
    except CorruptData:
        return False
    return before != {journal: source.read_through for journal, source in now.sources.items()}


def _agrees(check: ConsumerCheck, diagnosed: Diagnosed, wrong: Collection[str]) -> bool:
    """Return True if the tables agree with the current checkpoints, and with the proven ones of `wrong` shards."""
    if not wrong:
        return False
    shards = {**diagnosed.sound, **{name: diagnosed.known.shards.get(name) for name in wrong}}
    for expectation, value in zip(check.expectations, check.values, strict=True):
        total: Number = diagnosed.known.allowances.get(str(expectation), 0)
        for shard in shards.values():
            counted = _counted(shard, expectation.measure.name) if shard is not None else None
            if counted is None:
                return False
            total += counted
        found = None if isinstance(value, Exception) else number(value)
        if found is None or not agree(found, total):
            return False
    return True


def _counted(shard: KnownShard, measure: str) -> Number | None:
    """Return the total of a shard's proven sources; None if it is not known."""
    proven = [source for source in shard.sources.values() if source.proven or source.gone]
    if shard.sources and not proven:
        return None
    if not all(source.totals_complete and measure in source.totals for source in proven):
        return None
    total: Number = sum(source.totals[measure] for source in proven)
    return total


def evident_fence(findings: Iterable[Finding], shard: str) -> int:
    """Return the highest known fence of a shard, if it is above the store's; otherwise 0."""
    known = [each.facts.get("known_fence") for each in findings if each.subject.name == shard]
    return max([0, *(int(str(fence)) for fence in known if fence)])


def offsets_of(checkpoint: Checkpoint) -> list[str]:
    return [f"{journal}={source.read_through}" for journal, source in sorted(checkpoint.sources.items())]
