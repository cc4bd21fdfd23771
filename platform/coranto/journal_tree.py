"""Journal specs as trees in YAML, interchangeable with Gazette's.

A tree declares journals without repeating what they share. A node whose name ends in `/` (or is empty) is a folder:
whatever fields it has, its children inherit where they leave them out. Other nodes are journals::

    name: flights/
    replication: 1
    labels:
    - name: content-type
      value: application/x-ndjson
    fragment:
      length: 4194304
      compression_codec: GZIP
      stores: ["file:///fragments/"]
      refresh_interval: 5m0s
    children:
    - name: flights/events/part-000
    - name: flights/events/part-001
      revision: 1234

A child's labels replace those of its parent name by name. `revision` is the journal's present one: absent or 0
creates it, -1 applies whatever it is. `delete: true`, also inherited, removes the journal instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import yaml

from coranto import labels
from coranto.durations import format_duration, parse_duration
from coranto.errors import InvalidInput
from coranto.specs import validate
from coranto.wire import protocol_pb2 as pb

_MAX_DEPTH = 64


def parse_tree(text: str) -> list[pb.ApplyRequest.Change]:
    """The changes that a tree asks for, complete and validated, in the tree's order.

    An empty text asks for none. Raises InvalidInput, which names the line and, where there is one, the journal.
    """
    root = _read(text)
    changes: list[pb.ApplyRequest.Change] = []
    lines: dict[str, int] = {}
    for journal in root.inherit().journals() if root is not None else ():
        if journal.name in lines:
            raise _error(journal.line, f"{journal.name} was already given in line {lines[journal.name]}")
        lines[journal.name] = journal.line
        changes.append(journal.change())
    return changes


def render_tree(journals: Iterable[tuple[pb.JournalSpec, int]]) -> str:
    """The tree of specs and their revisions as YAML, with everything shared moved up to folders.

    `parse_tree` gives the same specs back. Suspension stays with each journal. No journals at all are the empty text.
    """
    nodes = [_Node.of_spec(spec, revision) for spec, revision in sorted(journals, key=lambda pair: pair[0].name)]
    if not nodes:
        return ""
    document = _gather(nodes, depth=0).hoisted().document()
    # Without a limit to width, long texts would be broken over lines.
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=False, allow_unicode=True, width=2**31 - 1)


# ------------------------------------------------------------------------------------------------------------- fields

_Value = int | str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """How values of a field are read from YAML, written to it, and moved between it and a spec's message."""

    read: Callable[[yaml.Node], _Value]
    write: Callable[[Any], object]
    get: Callable[[Any], _Value]
    put: Callable[[Any, str, Any], None]


def _error(line: int, problem: str) -> InvalidInput:
    return InvalidInput(f"line {line}: {problem}")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _read_text(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _error(_line(node), "a text is expected here")
    return "" if _is_null(node) else str(node.value)


def _read_integer(node: yaml.Node) -> int:
    text = _read_text(node)
    if not text:
        return 0
    try:
        return int(text.replace("_", ""), 0)
    except ValueError:
        raise _error(_line(node), f"{text!r} is not a whole number") from None


def _read_flag(node: yaml.Node) -> bool:
    if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:bool":
        raise _error(_line(node), "true or false is expected here")
    return node.value.lower() in ("true", "yes", "on")


def _read_texts(node: yaml.Node) -> tuple[str, ...]:
    return tuple(_read_text(item) for item in _items(node))


def _read_duration(node: yaml.Node) -> int:
    text = _read_text(node)
    try:
        return parse_duration(text).ToNanoseconds() if text else 0
    except InvalidInput as err:
        raise _error(_line(node), err.message) from None


def _read_enum(enum: Any) -> Callable[[yaml.Node], int]:
    def read(node: yaml.Node) -> int:
        if isinstance(node, yaml.SequenceNode) and len(node.value) == 1:
            node = node.value[0]
        text = _read_text(node)
        if text in enum.keys():  # noqa: SIM118  # the wrapper is no mapping
            return int(enum.Value(text))
        if text.isdecimal() and int(text) in enum.values():
            return int(text)
        raise _error(_line(node), f"{text!r} is none of {', '.join(enum.keys())}")

    return read


def _put_plain(message: Any, name: str, value: Any) -> None:
    setattr(message, name, value)


_INTEGER = _Kind(_read_integer, int, int, _put_plain)
_TEXT = _Kind(_read_text, str, str, _put_plain)
_TEXTS = _Kind(_read_texts, list, tuple, lambda message, name, value: getattr(message, name).extend(value))
_DURATION = _Kind(
    _read_duration,
    lambda nanoseconds: format_duration(_duration(nanoseconds)),
    lambda duration: int(duration.ToNanoseconds()),
    lambda message, name, value: getattr(message, name).FromNanoseconds(value),
)


def _duration(nanoseconds: int) -> Any:
    result = pb.JournalSpec.Fragment().retention
    result.FromNanoseconds(nanoseconds)
    return result


def _enum(enum: Any) -> _Kind:
    return _Kind(_read_enum(enum), lambda value: enum.Name(value), int, _put_plain)


# Fields that children inherit, in the order in which they are written.
_SPEC_FIELDS: Mapping[str, _Kind] = {"replication": _INTEGER}
_FRAGMENT_FIELDS: Mapping[str, _Kind] = {
    "length": _INTEGER,
    "compression_codec": _enum(pb.CompressionCodec),
    "stores": _TEXTS,
    "refresh_interval": _DURATION,
    "retention": _DURATION,
    "flush_interval": _DURATION,
    "path_postfix_template": _TEXT,
}
_LATER_SPEC_FIELDS: Mapping[str, _Kind] = {"flags": _enum(pb.JournalSpec.Flag), "max_append_rate": _INTEGER}
_SUSPEND_FIELDS: Mapping[str, _Kind] = {"level": _enum(pb.JournalSpec.Suspend.Level), "offset": _INTEGER}

_Fields = dict[str, _Value]


def _get_fields(message: Any, kinds: Mapping[str, _Kind]) -> _Fields:
    """The fields that aren't zero."""
    values = {name: kind.get(getattr(message, name)) for name, kind in kinds.items()}
    return {name: value for name, value in values.items() if value}


def _put_fields(message: Any, kinds: Mapping[str, _Kind], fields: _Fields) -> None:
    for name, value in fields.items():
        if name in kinds:
            kinds[name].put(message, name, value)


def _write_fields(kinds: Mapping[str, _Kind], fields: _Fields) -> dict[str, object]:
    return {name: kind.write(fields[name]) for name, kind in kinds.items() if name in fields}


# -------------------------------------------------------------------------------------------------------------- nodes


@dataclass(slots=True)
class _Node:
    """A folder or a journal, with the fields it has itself; zero values are left out, as in YAML."""

    name: str = ""
    spec: _Fields = field(default_factory=dict)
    fragment: _Fields = field(default_factory=dict)
    labels: pb.LabelSet = field(default_factory=pb.LabelSet)
    suspend: _Fields = field(default_factory=dict)
    revision: int = 0
    delete: bool | None = None
    children: list[_Node] = field(default_factory=list)
    line: int = 0

    @classmethod
    def of_spec(cls, spec: pb.JournalSpec, revision: int) -> _Node:
        return cls(
            name=spec.name,
            spec=_get_fields(spec, {**_SPEC_FIELDS, **_LATER_SPEC_FIELDS}),
            fragment=_get_fields(spec.fragment, _FRAGMENT_FIELDS),
            labels=spec.labels,
            suspend=_get_fields(spec.suspend, _SUSPEND_FIELDS),
            revision=revision,
        )

    @property
    def is_folder(self) -> bool:
        return not self.name or self.name.endswith("/")

    def inherit(self) -> _Node:
        """Give the nodes below what they leave out. Raises InvalidInput when the tree isn't well formed."""
        if not self.is_folder:
            if self.children:
                raise _error(self.line, f"{self.name} has children, so its name must end in '/'")
            return self
        if self.revision or self.suspend:
            raise _error(self.line, f"the folder {self.name!r} has a revision or suspend, which only journals have")
        if not self.children:
            raise _error(self.line, f"the folder {self.name!r} has no children; a journal's name doesn't end in '/'")
        for child in self.children:
            if not child.name.startswith(self.name):
                raise _error(child.line, f"the name {child.name!r} doesn't begin with its folder's, {self.name!r}")
            child.spec = {**self.spec, **child.spec}
            child.fragment = {**self.fragment, **child.fragment}
            child.labels = labels.union(child.labels, self.labels)
            child.delete = self.delete if child.delete is None else child.delete
            child.inherit()
        return self

    def journals(self) -> Iterator[_Node]:
        if not self.is_folder:
            yield self
        for child in self.children:
            yield from child.journals()

    def change(self) -> pb.ApplyRequest.Change:
        """What is asked for this journal. Raises InvalidInput when that is not acceptable."""
        change = pb.ApplyRequest.Change(expect_mod_revision=self.revision)
        if self.delete:
            change.delete = self.name
        else:
            spec = change.upsert
            spec.name = self.name
            _put_fields(spec, {**_SPEC_FIELDS, **_LATER_SPEC_FIELDS}, self.spec)
            spec.labels.CopyFrom(self.labels)
            _put_fields(spec.fragment, _FRAGMENT_FIELDS, self.fragment)
            if self.suspend:
                _put_fields(spec.suspend, _SUSPEND_FIELDS, self.suspend)
        try:
            validate(change)
        except InvalidInput as err:
            where = err.field.removeprefix("ApplyRequest.Change").removeprefix(".").removeprefix("upsert.")
            where = where.replace("expect_mod_revision", "revision")
            raise _error(self.line, f"{self.name}: {where}: {err.message}" if where else err.message) from None
        return change

    def hoisted(self) -> _Node:
        """Move what all children share up to their folder, from the bottom of the tree to its top."""
        if not self.children:
            return self
        children = [child.hoisted() for child in self.children]
        self.spec = _shared([child.spec for child in children])
        self.fragment = _shared([child.fragment for child in children])
        self.labels = children[0].labels
        for child in children[1:]:
            self.labels = labels.intersect(self.labels, child.labels)
        for child in children:
            child.spec = _difference(child.spec, self.spec)
            child.fragment = _difference(child.fragment, self.fragment)
            child.labels = labels.subtract(child.labels, self.labels)
        return self

    def document(self) -> dict[str, object]:
        """The node as YAML has it."""
        parts: dict[str, object] = {
            "name": self.name,
            **_write_fields(_SPEC_FIELDS, self.spec),
            "labels": [{"name": name, "value": value} for name, value in labels.as_pairs(self.labels)],
            "fragment": _write_fields(_FRAGMENT_FIELDS, self.fragment),
            **_write_fields(_LATER_SPEC_FIELDS, self.spec),
            "suspend": _write_fields(_SUSPEND_FIELDS, self.suspend),
            "revision": self.revision,
            "children": [child.document() for child in self.children],
        }
        return {name: part for name, part in parts.items() if part}


def _shared(parts: list[_Fields]) -> _Fields:
    return {name: value for name, value in parts[0].items() if all(part.get(name) == value for part in parts[1:])}


def _difference(mine: _Fields, theirs: _Fields) -> _Fields:
    return {name: value for name, value in mine.items() if theirs.get(name) != value}


def _gather(journals: list[_Node], depth: int) -> _Node:
    """The smallest tree of folders over journals sorted by name, which share their first `depth` path parts."""
    if len(journals) == 1:
        return journals[0]
    children: list[_Node] = []
    for part, group in groupby(journals, key=lambda journal: _part(journal.name, depth)):
        members = list(group)
        children.extend(members if part is None else [_gather(members, depth + 1)])
    if len(children) == 1:
        return children[0]  # A folder in which there is nothing but one folder needs no node.
    return _Node(name="".join(part + "/" for part in journals[0].name.split("/")[:depth]), children=children)


def _part(name: str, depth: int) -> str | None:
    """The folder that a name has at `depth`; none when its last part is there already."""
    parts = name.split("/")
    return parts[depth] if depth < len(parts) - 1 else None


# ------------------------------------------------------------------------------------------------------------ reading


def _read(text: str) -> _Node | None:
    loader = yaml.SafeLoader(text)
    try:
        document = loader.get_single_node()
        return None if document is None or _is_null(document) else _read_node(document, depth=0)
    except yaml.MarkedYAMLError as err:
        problem = f"this is not YAML: {err.problem or err.context}"
        raise (_error(err.problem_mark.line + 1, problem) if err.problem_mark else InvalidInput(problem)) from err
    except yaml.YAMLError as err:
        raise InvalidInput(f"this is not YAML: {err}") from err
    finally:
        loader.dispose()


def _entries(node: yaml.Node, known: Iterable[str], within: tuple[yaml.Node, ...] = ()) -> dict[str, yaml.Node]:
    """The entries of a mapping, whose keys must be known and given once; those of `<<` come behind its own."""
    if not isinstance(node, yaml.MappingNode):
        raise _error(_line(node), f"fields are expected here: {', '.join(known)}")
    own: dict[str, yaml.Node] = {}
    merged: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            for source in reversed(_items(value) if isinstance(value, yaml.SequenceNode) else [value]):
                if any(source is outer for outer in (*within, node)):
                    raise _error(_line(key), "this node refers to itself")
                merged |= _entries(source, known, (*within, node))
            continue
        name = _read_text(key)
        if name not in known:
            raise _error(_line(key), f"there is no field {name!r} here; known are {', '.join(known)}")
        if name in own:
            raise _error(_line(key), f"the field {name!r} is given twice")
        own[name] = value
    return {name: value for name, value in (merged | own).items() if not _is_null(value)}


def _items(node: yaml.Node) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise _error(_line(node), "a list is expected here")
    return list(node.value)


def _read_fields(node: yaml.Node | None, kinds: Mapping[str, _Kind]) -> _Fields:
    entries = {} if node is None else _entries(node, kinds)
    return _read_entries(entries, kinds)


def _read_entries(entries: Mapping[str, yaml.Node], kinds: Mapping[str, _Kind]) -> _Fields:
    values = {name: kind.read(entries[name]) for name, kind in kinds.items() if name in entries}
    return {name: value for name, value in values.items() if value}


_NODE_FIELDS = (
    *("comment", "delete", "name", *_SPEC_FIELDS, "labels", "fragment", *_LATER_SPEC_FIELDS),
    *("suspend", "revision", "children"),
)


def _read_node(node: yaml.Node, depth: int) -> _Node:
    if depth > _MAX_DEPTH:
        raise _error(_line(node), f"the tree is deeper than {_MAX_DEPTH} nodes")
    entries = _entries(node, _NODE_FIELDS)
    return _Node(
        name=_read_text(entries["name"]) if "name" in entries else "",
        spec=_read_entries(entries, {**_SPEC_FIELDS, **_LATER_SPEC_FIELDS}),
        fragment=_read_fields(entries.get("fragment"), _FRAGMENT_FIELDS),
        labels=_read_labels(entries.get("labels")),
        suspend=_read_fields(entries.get("suspend"), _SUSPEND_FIELDS),
        revision=_read_integer(entries["revision"]) if "revision" in entries else 0,
        delete=_read_flag(entries["delete"]) if "delete" in entries else None,
        children=[_read_node(child, depth + 1) for child in _items(entries["children"])]
        if "children" in entries
        else [],
        line=_line(node),
    )


def _read_labels(node: yaml.Node | None) -> pb.LabelSet:
    """Labels in any order; they are sorted here."""
    if node is None:
        return pb.LabelSet()
    pairs = []
    for item in _items(node):
        entries = _entries(item, ("name", "value"))
        if "name" not in entries:
            raise _error(_line(item), "a label needs a name")
        pairs.append((_read_text(entries["name"]), _read_text(entries["value"]) if "value" in entries else ""))
    try:
        return labels.label_set(pairs)
    except InvalidInput as err:
        raise _error(_line(node), f"labels: {err.message}") from None
