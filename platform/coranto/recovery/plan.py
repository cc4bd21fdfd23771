"""Plans of recovery: what will be done to what, in which order, and what is gone for good. Pure.

A plan is approved by its hash. The hash covers every step and every loss, so an approval is of exactly what was read:
when the damage changes, the plan has another hash and waits for another approval.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from coranto.audit import Fact

FORMAT: Final = 1


class StepKind(enum.StrEnum):
    """The kinds of steps, in the order in which they are taken."""

    RESTORE_FRAGMENT = "restore_fragment"
    """Put a good copy of a fragment into its store."""
    SET_ASIDE_FRAGMENT = "set_aside_fragment"
    """Move a damaged file of which there is no good copy out of its journal's folder."""
    RESET_HEAD = "reset_head"
    """Let a journal continue at the end of its stored content."""
    RESTORE_CHECKPOINT = "restore_checkpoint"
    """Restore a consumer's checkpoint to one that an audit has proven."""
    APPEND_ACKNOWLEDGEMENTS = "append_acknowledgements"
    """Append the acknowledgements of a committed checkpoint."""
    DELETE_STAGED_ROWS = "delete_staged_rows"
    """Delete rows that no transaction will use."""
    UNASSIGN_SHARD = "unassign_shard"
    """Take a failed shard from its process, so that it starts anew."""
    ACCEPT_LOSS = "accept_loss"
    """Remember losses as accepted, so that later audits report what is new."""


_ORDER: Final = {kind: rank for rank, kind in enumerate(StepKind)}


@dataclass(frozen=True, slots=True)
class RecoveryStep:
    """One step. `action` tells what will be done, and `loses` what that gives up; empty if nothing.

    `facts` have what the step needs to act. A step must be safe to repeat.
    """

    kind: StepKind
    subject: str
    action: str
    loses: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, order=True)
class Loss:
    """Something that is gone for good, whatever is done."""

    subject: str
    message: str


@dataclass(frozen=True, slots=True, order=True)
class Remark:
    """Something that the plan leaves alone: it mends itself, or needs a person."""

    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of one doctor."""

    steps: Sequence[RecoveryStep] = ()
    losses: Sequence[Loss] = ()
    remarks: Sequence[Remark] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: steps in their order, losses, and remarks. Remarks are not part of what is approved."""

    steps: tuple[RecoveryStep, ...]
    losses: tuple[Loss, ...]
    remarks: tuple[Remark, ...]

    @classmethod
    def of(cls, diagnoses: Iterable[Diagnosis]) -> Plan:
        found = list(diagnoses)
        steps = sorted(
            (step for each in found for step in each.steps),
            key=lambda step: (_ORDER[step.kind], step.subject, json.dumps(dict(step.facts), sort_keys=True)),
        )
        losses = sorted({loss for each in found for loss in each.losses})
        return cls(tuple(steps), tuple(losses), tuple(sorted({mark for each in found for mark in each.remarks})))

    @property
    def hash(self) -> str:
        """The hash to approve: 16 hexadecimal digits of the SHA-256 of all steps and losses."""
        content = {
            "format": FORMAT,
            "steps": [asdict(step) for step in self.steps],
            "losses": [asdict(loss) for loss in self.losses],
        }
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do and nothing to accept."""
        return not self.steps and not self.losses

    @property
    def summary(self) -> str:
        if self.is_empty:
            return "nothing to recover"
        steps, count = len(self.steps), len(self.losses)
        losses = f"{count} loss{'es' if count != 1 else ''} for good" if count else "nothing is lost for good"
        if any(step.loses for step in self.steps):
            losses += ", and steps that give something up"
        return f"{steps} step{'s' if steps != 1 else ''}; {losses}"

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps({"hash": self.hash, **asdict(self)}, indent=indent)
