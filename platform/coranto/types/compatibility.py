"""The rules for the compatibility of a new version of a message type with earlier ones.

A reader that has one version reads messages of another version if

* the framing and the place of the UUID are the same,
* each field of both has the same type, or a wider one for the reader (`kinds.widens`: TINYINT to SMALLINT to INT to
  BIGINT, up to INT also to DOUBLE, FLOAT to DOUBLE, DECIMAL to one with no fewer digits on either side of the point),
  and the same nullability, or is nullable for the reader,
* fields that only the reader has are nullable. Fields that only the messages have are ignored,
* the same holds within STRUCT, ARRAY and MAP. Keys of a MAP do not change,
* rows of CSV: both have the same columns, in the same order, because a row does not name them,
* protobuf messages: `protobuf.wire_changes` finds no problem.

`Compatibility` defines which versions must read which messages.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coranto.types import protobuf
from coranto.types.definitions import CsvForm, FixedForm, FramingForm, MessageType
from coranto.types.kinds import (
    ArrayKind,
    Kind,
    MapKind,
    StructKind,
    TypeField,
    format_fields,
    format_kind,
    widens,
)


class Compatibility(enum.StrEnum):
    """The promise of a new version of a type."""

    BACKWARD = "BACKWARD"
    """Readers that have the new version can read messages of earlier versions."""
    FORWARD = "FORWARD"
    """Readers that have an earlier version can read messages of the new version."""
    FULL = "FULL"
    """Both."""
    NONE = "NONE"
    """No promise: readers that have this version or a later one need not read messages of earlier versions."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """A field that breaks the promise of a new version: its place, the problem, and the remedy."""

    place: str
    """Such as `lines[].item`, or the name of a part that is not a field: `framing`."""
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.place} {self.problem}: {self.advice}"


@dataclass(frozen=True, slots=True)
class _Roles:
    """The names of the reader's and the messages' version, for texts. `is_new` is True if the reader's is the new."""

    reader: str
    written: str
    is_new: bool

    def advise(self, new_reads: str, old_reads: str) -> str:
        return new_reads if self.is_new else old_reads


def problems_of(
    new: MessageType, earlier: MessageType, promise: Compatibility, version: int
) -> tuple[FieldProblem, ...]:
    """Return all breaches of a new version's promise to an earlier version, whose number is `version`."""
    there, here = f"version {version}", "the new version"
    found: list[FieldProblem] = []
    if promise in (Compatibility.BACKWARD, Compatibility.FULL):
        found += _unreadable(new, earlier, _Roles(here, there, True))
    if promise in (Compatibility.FORWARD, Compatibility.FULL):
        found += _unreadable(earlier, new, _Roles(there, here, False))
    return tuple(found)


def _unreadable(reader: MessageType, written: MessageType, roles: _Roles) -> Iterator[FieldProblem]:
    other = f"is {_form_text(reader.form)} in {roles.reader}, and {_form_text(written.form)} in {roles.written}"
    keep = "keep it, or give these messages a type of another name"
    if reader.form.name != written.form.name or _message_of(reader.form) != _message_of(written.form):
        yield FieldProblem("framing", other, keep)
        return
    if not isinstance(reader.form, FixedForm) and reader.form != written.form:
        yield FieldProblem("framing", other, keep)
        return
    if isinstance(reader.form, FixedForm) and isinstance(written.form, FixedForm):
        if reader.form.uuid_field != written.form.uuid_field:
            yield FieldProblem("framing", other, keep)
        yield from _on_the_wire(reader.form, written.form, roles)
    if isinstance(reader.form, CsvForm):
        columns = [field.name for field in reader.fields], [field.name for field in written.fields]
        if columns[0] != columns[1]:
            yield FieldProblem(
                "fields",
                f"are the columns {', '.join(columns[0])} in {roles.reader}, and {', '.join(columns[1])} in "
                f"{roles.written}, and rows of CSV do not name them",
                "keep the columns and their order, or give these messages a type of another name",
            )
            return
    yield from _unreadable_fields(reader.fields, written.fields, "", roles)


def _form_text(form: FramingForm) -> str:
    place = {key: value for key, value in form.to_plain().items() if key != "descriptorSet"}
    return " ".join([form.name, *(f"{key}={value}" for key, value in place.items())])


def _message_of(form: FramingForm) -> str:
    return form.message if isinstance(form, FixedForm) else ""


def _on_the_wire(reader: FixedForm, written: FixedForm, roles: _Roles) -> Iterator[FieldProblem]:
    if not reader.message or reader.descriptors == written.descriptors:
        return
    classes = [protobuf.message_class(each.descriptors, each.message) for each in (reader, written)]
    for place, problem in protobuf.wire_changes(*classes):
        yield FieldProblem(
            place,
            f"of the protobuf message in {roles.reader} {problem} ({roles.written})",
            "keep numbers, names, types and oneofs of fields, and give new fields a number that was never used",
        )


def _unreadable_fields(
    reader: Sequence[TypeField], written: Sequence[TypeField], place: str, roles: _Roles
) -> Iterator[FieldProblem]:
    present = {field.name: field for field in written}
    for field in reader:
        where = f"{place}.{field.name}" if place else field.name
        other = present.get(field.name)
        if other is not None:
            if other.nullable and not field.nullable:
                yield FieldProblem(
                    where,
                    f"is NOT NULL in {roles.reader}, and nullable in {roles.written}",
                    roles.advise("leave it nullable", "leave it NOT NULL"),
                )
            yield from _unreadable_kind(field.kind, other.kind, where, roles)
        elif not field.nullable:
            yield FieldProblem(
                where,
                f"is NOT NULL in {roles.reader}, and messages of {roles.written} lack it",
                roles.advise("make it nullable", "keep it"),
            )


def _unreadable_kind(reader: Kind, written: Kind, place: str, roles: _Roles) -> Iterator[FieldProblem]:
    match reader, written:
        case StructKind(mine), StructKind(theirs):
            yield from _unreadable_fields(mine, theirs, place, roles)
        case ArrayKind(mine), ArrayKind(theirs):
            yield from _unreadable_kind(mine, theirs, f"{place}[]", roles)
        case MapKind(key, mine), MapKind(other_key, theirs) if key == other_key:
            yield from _unreadable_kind(mine, theirs, f"{place}{{}}", roles)
        case _ if reader != written and not widens(written, reader):
            old = written if roles.is_new else reader
            yield FieldProblem(
                place,
                f"is {format_kind(reader)} in {roles.reader}, which does not hold {format_kind(written)} of "
                f"{roles.written}",
                f"keep {format_kind(old)}, or add a field of another name",
            )


def changes_between(earlier: MessageType, later: MessageType) -> tuple[str, ...]:
    """Return descriptions of the differences between two versions, for people."""
    found = []
    if _form_text(earlier.form) != _form_text(later.form):
        found.append(f"framing {_form_text(later.form)} instead of {_form_text(earlier.form)}")
    elif earlier.form != later.form:
        found.append("other descriptors")
    before, after = ({field.name: field for field in each.fields} for each in (earlier, later))
    found += [f"dropped {format_fields([field])}" for name, field in before.items() if name not in after]
    for name, field in after.items():
        if name not in before:
            found.append(f"added {format_fields([field])}")
        elif before[name] != field:
            found.append(f"{format_fields([before[name]])} became {format_fields([field])}")
    if not found and earlier.fields != later.fields:
        found.append("another order of fields")
    if earlier.description != later.description:
        found.append("another description")
    return tuple(found)
