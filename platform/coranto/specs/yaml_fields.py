"""Fields of specs in YAML: reading with the line in errors, writing, and factoring out the fields that specs share.

Fields with zero values are omitted, as in a wire message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import yaml
from google.protobuf.duration_pb2 import Duration

from coranto import labels
from coranto.errors import InvalidInput
from coranto.specs.durations import format_duration, parse_duration
from coranto.wire import protocol_pb2 as pb

MAX_CHARACTERS: Final = 64 << 20
MAX_NODES: Final = 5_000_000
"""The maximum number of nodes of a document. A tree has about ten nodes per journal."""

DocumentT = TypeVar("DocumentT")

_MAX_FLOW_DEPTH: Final = 200
_MAX_INTEGER_CHARACTERS: Final = 100
_TOO_LARGE: Final = 1 << 63

Value = int | str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FieldConversion:
    """The conversions of a field's values: from YAML, to YAML, from a spec's message, and into one."""

    read: Callable[[yaml.Node], Value]
    write: Callable[[Any], object]
    get: Callable[[Any], Value]
    put: Callable[[Any, str, Any], None]


def line_error(line: int, problem: str) -> InvalidInput:
    return InvalidInput(f"line {line}: {problem}")


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def read_text(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise line_error(line_of(node), "a text is expected here")
    return "" if is_null(node) else str(node.value)


def read_integer(node: yaml.Node) -> int:
    text = read_text(node)
    if not text:
        return 0
    try:
        value = int(text.replace("_", ""), 0) if len(text) <= _MAX_INTEGER_CHARACTERS else _TOO_LARGE
    except ValueError:
        raise line_error(line_of(node), f"{text!r} is not a whole number") from None
    if not -_TOO_LARGE <= value < _TOO_LARGE:
        raise line_error(line_of(node), f"{text[:40]!r} does not fit into 64 bits")
    return value


def read_flag(node: yaml.Node) -> bool:
    if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:bool":
        raise line_error(line_of(node), "true or false is expected here")
    return node.value.lower() in ("true", "yes", "on")


def _read_texts(node: yaml.Node) -> tuple[str, ...]:
    return tuple(read_text(item) for item in items_of(node))


def _read_duration(node: yaml.Node) -> int:
    text = read_text(node)
    try:
        return parse_duration(text).ToNanoseconds() if text else 0
    except InvalidInput as err:
        raise line_error(line_of(node), err.message) from None


def _read_enum(enum: Any) -> Callable[[yaml.Node], int]:
    def read(node: yaml.Node) -> int:
        if isinstance(node, yaml.SequenceNode) and len(node.value) == 1:
            node = node.value[0]
        text = read_text(node)
        if text in enum.keys():  # noqa: SIM118  # the wrapper is not a mapping
            return int(enum.Value(text))
        if text.isdecimal() and int(text) in enum.values():
            return int(text)
        raise line_error(line_of(node), f"{text!r} is none of {', '.join(enum.keys())}")

    return read


def _put_plain(message: Any, name: str, value: Any) -> None:
    try:
        setattr(message, name, value)
    except ValueError:
        raise InvalidInput(f"{value} does not fit", field=name) from None


INTEGER = FieldConversion(read_integer, int, int, _put_plain)
TEXT = FieldConversion(read_text, str, str, _put_plain)
TEXTS = FieldConversion(_read_texts, list, tuple, lambda message, name, value: getattr(message, name).extend(value))
DURATION = FieldConversion(
    _read_duration,
    lambda nanoseconds: format_duration(_duration(nanoseconds)),
    lambda duration: int(duration.ToNanoseconds()),
    lambda message, name, value: getattr(message, name).FromNanoseconds(value),
)


def _duration(nanoseconds: int) -> Duration:
    result = Duration()
    result.FromNanoseconds(nanoseconds)
    return result


def enum_kind(enum: Any) -> FieldConversion:
    """Return the conversion of a wire enum's values, given by name or number."""
    return FieldConversion(_read_enum(enum), lambda value: enum.Name(value), int, _put_plain)


Fields = dict[str, Value]


def get_fields(message: Any, kinds: Mapping[str, FieldConversion]) -> Fields:
    """Return the message's fields that aren't zero."""
    values = {name: kind.get(getattr(message, name)) for name, kind in kinds.items()}
    return {name: value for name, value in values.items() if value}


def put_fields(message: Any, kinds: Mapping[str, FieldConversion], fields: Fields) -> None:
    for name, value in fields.items():
        if name in kinds:
            kinds[name].put(message, name, value)


def write_fields(kinds: Mapping[str, FieldConversion], fields: Fields) -> dict[str, object]:
    return {name: kind.write(fields[name]) for name, kind in kinds.items() if name in fields}


def shared_fields(parts: list[Fields]) -> Fields:
    return {name: value for name, value in parts[0].items() if all(part.get(name) == value for part in parts[1:])}


def difference(mine: Fields, theirs: Fields) -> Fields:
    return {name: value for name, value in mine.items() if theirs.get(name) != value}


def entries_of(node: yaml.Node, known: Iterable[str], within: tuple[yaml.Node, ...] = ()) -> dict[str, yaml.Node]:
    """Return the entries of a mapping. Keys must be known and unique. Own entries override inherited ones of `<<`."""
    if not isinstance(node, yaml.MappingNode):
        raise line_error(line_of(node), f"fields are expected here: {', '.join(known)}")
    own: dict[str, yaml.Node] = {}
    merged: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            for source in reversed(items_of(value) if isinstance(value, yaml.SequenceNode) else [value]):
                if any(source is outer for outer in (*within, node)):
                    raise line_error(line_of(key), "this node refers to itself")
                merged |= entries_of(source, known, (*within, node))
            continue
        name = read_text(key)
        if name not in known:
            raise line_error(line_of(key), f"there is no field {name!r} here; known are {', '.join(known)}")
        if name in own:
            raise line_error(line_of(key), f"the field {name!r} is given twice")
        own[name] = value
    return {name: value for name, value in (merged | own).items() if not is_null(value)}


def items_of(node: yaml.Node) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise line_error(line_of(node), "a list is expected here")
    return list(node.value)


def read_fields(node: yaml.Node | None, kinds: Mapping[str, FieldConversion]) -> Fields:
    entries = {} if node is None else entries_of(node, kinds)
    return read_entries(entries, kinds)


def read_entries(entries: Mapping[str, yaml.Node], kinds: Mapping[str, FieldConversion]) -> Fields:
    values = {name: kind.read(entries[name]) for name, kind in kinds.items() if name in entries}
    return {name: value for name, value in values.items() if value}


def read_labels(node: yaml.Node | None) -> pb.LabelSet:
    """Read labels in any order, and sort them."""
    if node is None:
        return pb.LabelSet()
    pairs = []
    for item in items_of(node):
        entries = entries_of(item, ("name", "value"))
        if "name" not in entries:
            raise line_error(line_of(item), "a label needs a name")
        pairs.append((read_text(entries["name"]), read_text(entries["value"]) if "value" in entries else ""))
    try:
        return labels.label_set(pairs)
    except InvalidInput as err:
        raise line_error(line_of(node), f"labels: {err.message}") from None


def read_document(text: str, read: Callable[[yaml.Node], DocumentT]) -> DocumentT | None:
    """Parse a document and return the result of `read`; None for an empty document.

    Raises InvalidInput, also for bad YAML. The limit MAX_NODES counts the nodes of an alias at each use: otherwise a
    short text could expand to an enormous number of nodes.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidInput(f"the document has {len(text)} characters; it may have {MAX_CHARACTERS}")
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as err:  # A character that YAML does not allow.
        line = text.count("\n", 0, err.position) + 1
        raise line_error(line, f"this is not YAML: it has the character {chr(err.character)!r}") from err
    try:
        document = loader.get_single_node()
        if document is not None:
            _count_nodes(document, {})
        return None if document is None or is_null(document) else read(document)
    except yaml.MarkedYAMLError as err:
        problem = f"this is not YAML: {err.problem or err.context}"
        if err.problem == "mapping values are not allowed here":
            problem += "; put a text that contains `: ` into quotes"
        raise (line_error(err.problem_mark.line + 1, problem) if err.problem_mark else InvalidInput(problem)) from err
    except yaml.YAMLError as err:
        raise InvalidInput(f"this is not YAML: {err}") from err
    except RecursionError:
        raise InvalidInput("the document is nested too deeply") from None
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """A loader that rejects deeply nested flow collections before it spends time on them."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        if self.flow_level >= _MAX_FLOW_DEPTH:
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(TokenClass)


def _count_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Count a node and its descendants, with aliases expanded. Raises InvalidInput for too many, and for a cycle."""
    found = known.get(id(node))
    if found is None:
        known[id(node)] = -1
        parts = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else ()
        found = 1
        for part in parts:
            for each in part if isinstance(part, tuple) else (part,):
                found += _count_nodes(each, known)
        if found > MAX_NODES:
            raise line_error(line_of(node), f"aliases expand this to more than {MAX_NODES} nodes")
        known[id(node)] = found
    if found < 0:
        raise line_error(line_of(node), "this node refers to itself")
    return found


def dump_document(document: object) -> str:
    """Return the YAML of plain values, in their order."""
    # The large width keeps long texts on one line.
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=False, allow_unicode=True, width=2**31 - 1)
