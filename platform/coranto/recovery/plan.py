"""Plans of recovery: the steps in order, and permanent losses. Does no I/O.

A plan is approved by its hash. The hash covers everything that determines a step or a loss, but no texts. So an
approval covers exactly the plan that was read, and stays valid until the damage changes.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Final

from coranto.audit import Fact

FORMAT: Final = 2


class StepKind(enum.StrEnum):
    """The kinds of steps, in order of execution."""

    RESTORE_FRAGMENT = "restore_fragment"
    """Put a good copy of a fragment into its store."""
    SET_ASIDE_FRAGMENT = "set_aside_fragment"
    """Move a damaged file without a good copy out of its journal's folder."""
    RESET_HEAD = "reset_head"
    """Let a journal continue at the end of its stored content."""
    RESTORE_CHECKPOINT = "restore_checkpoint"
    """Restore a consumer's checkpoint to one that an audit has proven."""
    TAKE_CHECKPOINT = "take_checkpoint"
    """Let a consumer continue from the checkpoint that its store has, under a higher fence."""
    APPEND_ACKNOWLEDGEMENTS = "append_acknowledgements"
    """Append the acknowledgements of a committed checkpoint."""
    DELETE_STAGED_ROWS = "delete_staged_rows"
    """Delete rows that no transaction will use."""
    UNASSIGN_SHARD = "unassign_shard"
    """Unassign a failed shard from its process, so that the shard restarts."""
    ACCEPT_LOSS = "accept_loss"
    """Record losses as accepted, so that later audits report only new ones."""


_ORDER: Final = {kind: rank for rank, kind in enumerate(StepKind)}


@dataclass(frozen=True, slots=True)
class RecoveryStep:
    """One step. `action` describes it, and `loses` the content that it gives up; empty if none.

    `facts` have everything that the step needs. A step must be safe to repeat.
    """

    kind: StepKind
    subject: str
    action: str
    loses: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, order=True)
class Loss:
    """Damage that no step repairs. `message` is for people, and the other fields describe the loss.

    `kind` comes from its finding. `begin` and `end` are offsets of `journal`, or of the subject if that is a
    journal. Content with the SHA-1 `sum` as `file` of `store` would restore it. `kept_at` names a place that still
    has the content, which only a person can put back. `detail` distinguishes this loss from others.
    """

    subject: str
    kind: str
    message: str = field(compare=False)
    journal: str = ""
    begin: int = 0
    end: int = 0
    store: str = ""
    file: str = ""
    sum: str = ""
    table: str = ""
    fence: int = 0
    clock: int = 0
    detail: str = ""
    kept_at: str = field(default="", compare=False)

    @property
    def identity(self) -> dict[str, str | int]:
        """All fields that describe the loss."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}


@dataclass(frozen=True, slots=True, order=True)
class Remark:
    """A problem that the plan does not handle: it repairs itself, or needs a person."""

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
    """A plan: steps in their order, losses, and remarks. Remarks need no approval."""

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
        """The hash to approve: 16 hexadecimal digits of the SHA-256 of all steps and losses, without texts."""
        content = {
            "format": FORMAT,
            "steps": [[step.kind, step.subject, dict(step.facts)] for step in self.steps],
            "losses": [loss.identity for loss in self.losses],
        }
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do and nothing to accept."""
        return not self.steps and not self.losses

    @property
    def gone(self) -> list[Loss]:
        """The permanent losses."""
        return [loss for loss in self.losses if not loss.kept_at]

    @property
    def kept(self) -> list[Loss]:
        """The losses that a person can undo, because some place still has the content."""
        return [loss for loss in self.losses if loss.kept_at]

    @property
    def summary(self) -> str:
        if self.is_empty:
            return "nothing to recover"
        steps, count = len(self.steps), len(self.gone)
        losses = f"{count} loss{'es' if count != 1 else ''} for good" if count else "nothing is lost for good"
        if self.kept:
            losses += f", and {len(self.kept)} that you can undo"
        if any(step.loses for step in self.steps):
            losses += ", and steps that give something up"
        return f"{steps} step{'s' if steps != 1 else ''}; {losses}"

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps({"hash": self.hash, **asdict(self)}, indent=indent)
