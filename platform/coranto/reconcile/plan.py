"""Plans, which turn current specs into the specs of a document. Pure.

A change without a revision creates its spec. A change with revision -1 creates or updates it, whatever its revision is.
Any other revision must be the current one. A change that is in effect already is skipped, whatever its revision, so
that a document can be applied again after an interruption.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coranto import labels
from coranto.errors import InvalidInput
from coranto.reconcile.differences import differences
from coranto.reconcile.kinds import PresentSpec, SpecChange, SpecKind
from coranto.specs.validation import ANY_REVISION
from coranto.wire import protocol_pb2 as pb


class SpecAction(enum.Enum):
    """The action that a step takes."""

    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"
    NONE = "unchanged"
    """The spec is as wanted."""
    GONE = "absent"
    """The spec is to be deleted, and does not exist."""


_IDLE = (SpecAction.NONE, SpecAction.GONE)


@dataclass(frozen=True, slots=True)
class SpecStep:
    """One spec of a plan.

    `change` expects the revision that the spec was compared at. `spec` is the wanted spec; for a deletion the present
    spec, or None if there is none. `differences` lists `field: old → new` for an update. A step with `pruned` deletes a
    spec that the document does not name.
    """

    name: str
    action: SpecAction
    change: SpecChange
    spec: Any
    differences: tuple[str, ...] = ()
    pruned: bool = False

    @property
    def due(self) -> bool:
        return self.action not in _IDLE


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """The steps from current specs to wanted ones: first in the document's order, then pruning.

    `conflicts` gives a reason for each change that cannot be applied. `digest` depends only on the document.
    """

    kind: SpecKind
    steps: tuple[SpecStep, ...]
    conflicts: tuple[str, ...]
    digest: str

    @property
    def due(self) -> tuple[SpecStep, ...]:
        """The steps that change something."""
        return tuple(step for step in self.steps if step.due)

    def count(self, action: SpecAction) -> int:
        return sum(step.action is action for step in self.steps)

    def transactions(self, size: int) -> list[tuple[SpecStep, ...]]:
        """Return the due steps as transactions of at most `size` changes, in order of application.

        Deletions come last, so that an interruption leaves too many specs rather than too few. Only specs that block
        the creation of a new one are deleted first.
        """
        gone = [step for step in self.due if step.action is SpecAction.DELETE]
        others = [step for step in self.due if step.action is not SpecAction.DELETE]
        created = [step.spec for step in others if step.action is SpecAction.CREATE]
        way = self.kind.blocking_deletions([step.spec for step in gone], created)
        first = [step for step in gone if step.name in way]
        rest = [*others, *(step for step in gone if step.name not in way)]
        if self.kind.deletes_in_transaction:
            return _chunks([*first, *rest], size)
        return [*_chunks(first, size), *_chunks(rest, size)]


def _chunks(steps: Sequence[SpecStep], size: int) -> list[tuple[SpecStep, ...]]:
    return [tuple(steps[begin : begin + size]) for begin in range(0, len(steps), size)]


def make_plan(
    kind: SpecKind,
    wanted: Iterable[SpecChange],
    present: Mapping[str, PresentSpec],
    *,
    prune: pb.LabelSelector | None = None,
) -> SpecPlan:
    """Compare the changes of a document with the present specs.

    Specs outside the document do not change, except that specs selected by `prune` are deleted. Pruning skips journals
    that programs manage, such as streams, forks and ledgers of publications. Raises InvalidInput if a spec is named
    twice, and for a `prune` that selects everything or comes with an empty document.
    """
    steps: dict[str, SpecStep] = {}
    conflicts = []
    digest = hashlib.sha256()
    contents = {}
    for change in wanted:
        name = change.delete or kind.name_of(change.upsert)
        if name in steps:
            raise InvalidInput(f"{name} is given twice", field="specs")
        contents[name] = b"" if change.delete else change.upsert.SerializeToString(deterministic=True)
        found = present.get(name)
        steps[name] = step = _step(kind, name, change, found)
        if step.due and (problem := _conflict(name, change.expect_mod_revision, found)):
            conflicts.append(problem)
    for name, content in sorted(contents.items()):
        digest.update(f"{len(name)}:{name}:{len(content)}:".encode() + content)
    pruned = _pruned(kind, prune, steps.keys(), present) if prune is not None else []
    return SpecPlan(kind, (*steps.values(), *pruned), tuple(conflicts), digest.hexdigest()[:16])


def _step(kind: SpecKind, name: str, change: SpecChange, found: PresentSpec | None) -> SpecStep:
    at: Any = kind.change()
    at.CopyFrom(change)
    at.expect_mod_revision = found.revision if found is not None else 0
    if change.delete:
        return (
            SpecStep(name, SpecAction.DELETE, at, found.spec)
            if found is not None
            else SpecStep(name, SpecAction.GONE, at, None)
        )
    if found is None:
        return SpecStep(name, SpecAction.CREATE, at, at.upsert)
    at.upsert.CopyFrom(kind.keep(change.upsert, found.spec))
    if at.upsert == found.spec:
        return SpecStep(name, SpecAction.NONE, at, at.upsert)
    return SpecStep(name, SpecAction.UPDATE, at, at.upsert, tuple(differences(found.spec, at.upsert)))


def _conflict(name: str, expected: int, found: PresentSpec | None) -> str:
    """Return the reason why a change cannot be applied, or ""."""
    actual = found.revision if found is not None else 0
    if expected in (ANY_REVISION, actual):
        return ""
    if expected == 0:
        return f"{name} exists already, at revision {actual}: give that as its `revision` to update it, or -1 for any"
    return f"{name} is at revision {actual or 'none'}, not {expected}"


def _pruned(
    kind: SpecKind, prune: pb.LabelSelector, named: Collection[str], present: Mapping[str, PresentSpec]
) -> list[SpecStep]:
    if not prune.include.labels:
        raise InvalidInput(
            f"a selector that includes everything would delete all {kind.plural} that the document does not name; "
            "say which ones the document is about, such as name:prefix=shop/",
            field="prune",
        )
    if not named:
        raise InvalidInput(f"an empty document would delete all selected {kind.plural}", field="prune")
    matches = labels.matcher(prune)
    steps = []
    for name, found in present.items():
        if name in named or not matches(kind.labels_of(found.spec)) or not kind.prunable(found.spec):
            continue
        change = kind.change(delete=name, expect_mod_revision=found.revision)
        steps.append(SpecStep(name, SpecAction.DELETE, change, found.spec, pruned=True))
    return steps
