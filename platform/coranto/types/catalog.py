"""The catalog of message types: the state of a registry's records, and the next record.

A registry is a journal of lines of JSON. A record registers one version:

    {"registry": 1, "type": "shop.Order", "version": 2, "compatibility": "BACKWARD", "time": 1.7e9, "definition": {…}}

`registry` is the format of records. `Catalog` folds the lines, in their order:

* The versions of a type are numbered from 1 without gaps. A record with another number is ignored: its writer has lost
  a race, or retried an append.
* A line that is not a record is *stray*. It cannot be a version, so it is skipped and reported.
* A record whose definition this program does not understand *excludes* the type from this version on, because the
  latest version is then unknown. Other types, and earlier versions by number, remain available.
* A record of a later format ends the fold with an error: it may mean anything.

A new version is checked against the last version that was registered with NONE and all versions after it, because a
journal keeps messages of all of them. A definition that equals one of these versions is not registered again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coranto.errors import CorruptData, CorruptMessage, IncompatibleType, InvalidInput, MessageTypeNotFound
from coranto.messages.framing import JsonLines
from coranto.types.compatibility import Compatibility, FieldProblem, problems_of
from coranto.types.definitions import MessageType, validate_type_name
from coranto.types.references import TypeReference, parse_reference, require_content_type, type_named_by
from coranto.wire import protocol_pb2 as pb

FORMAT: Final = 1
MAX_RECORD_BYTES: Final = 4 << 20
"""The maximum length of a record in bytes. A longer line is not a record."""
MAX_STRAYS: Final = 100
"""The maximum number of stray lines to keep."""
_RECORD: Final = "registry"
_LAST_TIME: Final = 1e12


@dataclass(frozen=True, slots=True)
class TypeVersion:
    """A registered version of a message type, with its time of registration (Unix seconds) and its promise."""

    number: int
    definition: MessageType
    compatibility: Compatibility
    time: float

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def reference(self) -> TypeReference:
        """The reference to exactly this version."""
        return TypeReference(self.name, self.number)

    def __str__(self) -> str:
        return str(self.reference)

    def to_line(self) -> bytes:
        """Return the record of the version. Raises InvalidInput if it is too long."""
        line = json.dumps(
            {
                _RECORD: FORMAT,
                "type": self.name,
                "version": self.number,
                "compatibility": self.compatibility.value,
                "time": self.time,
                "definition": self.definition.to_plain(),
            },
            separators=(",", ":"),
        ).encode()
        if len(line) > MAX_RECORD_BYTES:
            raise InvalidInput(
                f"the record of {self.name} has {len(line)} bytes, and may have {MAX_RECORD_BYTES}: remove fields, or "
                "descriptors that it does not need"
            )
        return line + b"\n"


@dataclass(frozen=True, slots=True)
class StrayLine:
    """A line of a registry that is not a record."""

    offset: int
    problem: str


@dataclass(frozen=True, slots=True)
class _Excluded:
    version: int
    offset: int
    problem: str


class Catalog:
    """The types that are registered by the fed lines of a registry."""

    def __init__(self, journal: str) -> None:
        self.journal = journal
        self.strays: list[StrayLine] = []
        """The first stray lines."""
        self.stray_count = 0
        self._versions: dict[str, list[TypeVersion]] = {}
        self._excluded: dict[str, _Excluded] = {}
        self._fed = 0
        self._end = ""
        self._decoder = JsonLines(None, tolerant=True, max_line_bytes=MAX_RECORD_BYTES).decoder(journal, 0)

    @property
    def offset(self) -> int:
        """The end offset of the fed content."""
        return self._fed

    @property
    def is_whole(self) -> bool:
        """True if the content that was fed ends with a whole line."""
        return self._decoder.finish() is None

    def feed(self, content: bytes) -> None:
        """Add content that follows the content of the previous call.

        Raises CorruptData at a record of a later format, and at every later call, because the rest is unknown.
        """
        if self._end:
            raise CorruptData(self._end)
        self._fed += len(content)
        while True:
            try:
                for envelope in self._decoder.feed(content):
                    self._take(envelope.content, envelope.begin)
                return
            except CorruptMessage as error:
                self._stray(error.offset, f"a line of more than {MAX_RECORD_BYTES} bytes")
                content = b""

    def _take(self, line: bytes, offset: int) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return self._stray(offset, "not JSON")
        if not isinstance(record, dict) or _RECORD not in record:
            return self._stray(offset, "no record of a registry")
        if record[_RECORD] != FORMAT:
            self._end = (
                f"registry {self.journal} at offset {offset}: a record of the format {str(record[_RECORD])[:40]}, and "
                f"this version of Coranto knows the format {FORMAT}: use a later version of Coranto"
            )
            raise CorruptData(self._end)
        name, number = record.get("type"), record.get("version")
        try:
            validate_type_name(name if isinstance(name, str) else "")
        except InvalidInput as error:
            return self._stray(offset, error.message)
        assert isinstance(name, str)
        if name in self._excluded or type(number) is not int or number != self._next(name):
            return self._stray(offset, f"version {str(number)[:20]} of {name}, where {self._next(name)} is next")
        try:
            found = TypeVersion(number, _definition(record, name), _promise(record), _time(record))
        except (InvalidInput, RecursionError) as error:
            self._excluded[name] = _Excluded(number, offset, str(error))
            return None
        self._versions.setdefault(name, []).append(found)
        return None

    def _stray(self, offset: int, problem: str) -> None:
        self.stray_count += 1
        if len(self.strays) < MAX_STRAYS:
            self.strays.append(StrayLine(offset, problem))

    def _next(self, name: str) -> int:
        return len(self._versions.get(name, ())) + 1

    # -- Queries ---------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all types, sorted."""
        return tuple(sorted(self._versions.keys() | self._excluded.keys()))

    def problem_of(self, name: str) -> str:
        """Return the problem that excludes a type; empty if the type is not excluded."""
        found = self._excluded.get(name)
        return "" if found is None else self._excluded_text(name, found)

    def history(self, name: str) -> tuple[TypeVersion, ...]:
        """Return the known versions of a type, in order. Raises MessageTypeNotFound."""
        if name not in self._versions and name not in self._excluded:
            raise MessageTypeNotFound(self.journal, name, self.names)
        return tuple(self._versions.get(name, ()))

    def find(self, reference: TypeReference) -> TypeVersion:
        """Return the version of a reference.

        Raises MessageTypeNotFound if there is none, and CorruptData for an excluded version.
        """
        versions = self.history(reference.name)
        excluded = self._excluded.get(reference.name)
        if excluded is not None and (reference.version is None or reference.version >= excluded.version):
            raise CorruptData(self._excluded_text(reference.name, excluded))
        if reference.version is None:
            return versions[-1]
        if reference.version > len(versions):
            raise MessageTypeNotFound(self.journal, str(reference), [str(each) for each in versions])
        return versions[reference.version - 1]

    def find_for(self, journals: Mapping[str, pb.LabelSet], reference: str = "") -> TypeVersion:
        """Return the type of a reference, or by default the type that all journals name. `journals` has their labels.

        Raises the errors of `find`, and InvalidInput if the journals name no type or several types, or have a
        `content-type` other than the type's.
        """
        found = self.find(parse_reference(reference or type_named_by(journals)))
        for journal, labels in journals.items():
            require_content_type(journal, labels, found.definition)
        return found

    def _excluded_text(self, name: str, excluded: _Excluded) -> str:
        earlier = ", or an earlier version of the type by its number" if excluded.version > 1 else ""
        return (
            f"registry {self.journal} at offset {excluded.offset}: version {excluded.version} of {name} cannot be "
            f"understood: {excluded.problem}. Use a later version of Coranto{earlier}; if none wrote this record, give "
            "the type another name"
        )

    # -- Registering -----------------------------------------------------------------------------------------------

    def promise_of(self, name: str) -> Compatibility:
        """Return the default promise of a type's next version: the last promise that was not NONE, or BACKWARD."""
        kept = [each.compatibility for each in self._versions.get(name, ()) if each.compatibility != Compatibility.NONE]
        return kept[-1] if kept else Compatibility.BACKWARD

    def next_version(self, definition: MessageType, promise: Compatibility | None, now: float) -> TypeVersion | None:
        """Return the version that a definition would get at the time `now`, or None if a version already has it.

        Raises IncompatibleType if the definition breaks its promise, and CorruptData if the type is excluded.
        """
        name = definition.name
        if (excluded := self._excluded.get(name)) is not None:
            raise CorruptData(self._excluded_text(name, excluded))
        if self.version_of(definition) is not None:
            return None
        chosen = promise or self.promise_of(name)
        if chosen is not Compatibility.NONE and (found := self.problems(definition, chosen)):
            raise IncompatibleType(name, chosen.value, [str(each) for each in found])
        return TypeVersion(self._next(name), definition, chosen, now)

    def version_of(self, definition: MessageType) -> TypeVersion | None:
        """Return the last version with exactly this definition, or None. Versions before the last NONE are ignored."""
        known = _since_cut(self._versions.get(definition.name, ()))
        same = [each for each in known if each.definition == definition]
        return same[-1] if same else None

    def problems(self, definition: MessageType, promise: Compatibility) -> tuple[FieldProblem, ...]:
        """Return the breaches of a promise to the versions that it covers, latest version first."""
        found: list[FieldProblem] = []
        for each in reversed(_since_cut(self._versions.get(definition.name, ()))):
            reported = {problem.place for problem in found}
            problems = problems_of(definition, each.definition, promise, each.number)
            found += [problem for problem in problems if problem.place not in reported]
        return tuple(found)


def _since_cut(versions: Sequence[TypeVersion]) -> Sequence[TypeVersion]:
    """Return the last version that was registered with NONE and all later ones; all versions if there is none."""
    cuts = [at for at, each in enumerate(versions) if each.compatibility is Compatibility.NONE]
    return versions[cuts[-1] :] if cuts else versions


def _definition(record: dict[str, Any], name: str) -> MessageType:
    found = MessageType.of_plain(record.get("definition"))
    if found.name != name:
        raise InvalidInput(f"its definition is of {found.name}")
    return found


def _promise(record: dict[str, Any]) -> Compatibility:
    reported = record.get("compatibility")
    if reported not in list(Compatibility):
        raise InvalidInput(f"its compatibility is {str(reported)[:40]!r}")
    return Compatibility(reported)


def _time(record: dict[str, Any]) -> float:
    time = record.get("time")
    if not isinstance(time, int | float) or not abs(time) <= _LAST_TIME:
        raise InvalidInput(f"its time is {str(time)[:40]!r}")
    return float(time)
