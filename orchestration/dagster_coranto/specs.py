"""The plan for applying a tree of journal specs. Pure: it only compares."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from coranto.client.values import JournalInfo
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb
from dagster_coranto.groups import check_prefix


class ChangeKind(enum.Enum):
    """The change of one journal."""

    CREATED = "created"
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    DELETED = "deleted"
    ABSENT = "absent"
    """The tree deletes the journal, and it does not exist."""


@dataclass(frozen=True, slots=True)
class SpecChange:
    """One journal of the tree. For a changed journal, `differences` lists `field: old → new`."""

    journal: str
    change: ChangeKind
    spec: pb.JournalSpec | None
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """The change of each journal of a tree, and the request that applies them (empty when nothing changes)."""

    entries: tuple[SpecChange, ...]
    request: tuple[pb.ApplyRequest.Change, ...]

    def count(self, change: ChangeKind) -> int:
        return sum(entry.change is change for entry in self.entries)

    @property
    def version(self) -> str:
        """A digest of the wanted specs. It is the same for the same tree, whatever the journals were before."""
        digest = hashlib.sha256()
        for entry in sorted(self.entries, key=lambda entry: entry.journal):
            content = entry.spec.SerializeToString(deterministic=True) if entry.spec is not None else b""
            digest.update(f"{len(entry.journal)}:{entry.journal}:{len(content)}:".encode() + content)
        return digest.hexdigest()[:16]


def under_prefix(changes: Iterable[pb.ApplyRequest.Change], prefix: str) -> list[pb.ApplyRequest.Change]:
    """Return the same changes for journals with `prefix` in front of their names."""
    check_prefix(prefix)
    moved = []
    for change in changes:
        copy = pb.ApplyRequest.Change()
        copy.CopyFrom(change)
        if copy.HasField("upsert"):
            copy.upsert.name = prefix + copy.upsert.name
        if copy.delete:
            copy.delete = prefix + copy.delete
        moved.append(copy)
    return moved


def plan_specs(wanted: Iterable[pb.ApplyRequest.Change], listed: Sequence[JournalInfo]) -> SpecPlan:
    """Compare the changes of a tree with the existing journals.

    Journals outside the tree are not changed. The request holds only real changes. Each one requires that its journal
    is still at the revision it was compared with. A revision other than 0 in the tree replaces that condition. Raises
    InvalidInput when the tree names a journal twice.
    """
    there = {journal.name: journal for journal in listed}
    entries: dict[str, SpecChange] = {}
    request = []
    for change in wanted:
        name = change.delete or change.upsert.name
        if name in entries:
            raise InvalidInput(f"the tree names {name} twice", field="specs")
        found = there.get(name)
        spec = None if change.delete else change.upsert
        entries[name] = entry = _compare(name, spec, found)
        if entry.change in (ChangeKind.UNCHANGED, ChangeKind.ABSENT):
            continue
        revision = change.expect_mod_revision or (found.mod_revision if found is not None else 0)
        if spec is None:
            request.append(pb.ApplyRequest.Change(expect_mod_revision=revision, delete=name))
        else:
            request.append(pb.ApplyRequest.Change(expect_mod_revision=revision, upsert=spec))
    return SpecPlan(tuple(entries.values()), tuple(request))


def _compare(name: str, spec: pb.JournalSpec | None, found: JournalInfo | None) -> SpecChange:
    if spec is None:
        return SpecChange(name, ChangeKind.DELETED if found is not None else ChangeKind.ABSENT, None)
    if found is None:
        return SpecChange(name, ChangeKind.CREATED, spec)
    if found.spec == spec:
        return SpecChange(name, ChangeKind.UNCHANGED, spec)
    return SpecChange(name, ChangeKind.CHANGED, spec, tuple(differences(found.spec, spec)))


def differences(old: Message, new: Message, path: str = "") -> Iterator[str]:
    """Yield `field: old → new` for each field in which two messages of one type differ."""
    for field in old.DESCRIPTOR.fields:
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        where = f"{path}{field.name}"
        if field.message_type is not None and not field.is_repeated and field.message_type.file is old.DESCRIPTOR.file:
            yield from differences(before, after, f"{where}.")
        else:
            yield f"{where}: {_text(field, before)} → {_text(field, after)}"


def _text(field: Any, value: object) -> str:
    if field.enum_type is not None and isinstance(value, int):
        return str(field.enum_type.values_by_number[value].name)
    if isinstance(value, Message):
        return " ".join(str(value).split()) or "none"
    if field.is_repeated and isinstance(value, Iterable):
        return ", ".join(" ".join(str(item).split()) for item in value) or "none"
    return str(value) if value != "" else "none"
