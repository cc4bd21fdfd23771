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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import yaml

from coranto import labels
from coranto.errors import InvalidInput
from coranto.specs.validation import validate
from coranto.specs.yaml_fields import (
    DURATION,
    INTEGER,
    TEXT,
    TEXTS,
    Fields,
    Kind,
    difference,
    dump_document,
    entries_of,
    enum_kind,
    get_fields,
    items_of,
    line_error,
    line_of,
    put_fields,
    read_document,
    read_entries,
    read_fields,
    read_flag,
    read_integer,
    read_labels,
    read_text,
    shared_fields,
    write_fields,
)
from coranto.wire import protocol_pb2 as pb

_MAX_DEPTH = 64


def parse_tree(text: str) -> list[pb.ApplyRequest.Change]:
    """The changes that a tree asks for, complete and validated, in the tree's order.

    An empty text asks for none. Raises InvalidInput, which names the line and, where there is one, the journal.
    """
    root = read_document(text, lambda node: _read_node(node, depth=0))
    changes: list[pb.ApplyRequest.Change] = []
    lines: dict[str, int] = {}
    for journal in root.inherit().journals() if root is not None else ():
        if journal.name in lines:
            raise line_error(journal.line, f"{journal.name} was already given in line {lines[journal.name]}")
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
    return dump_document(document)


# Fields that children inherit, in the order in which they are written.
_SPEC_FIELDS: Mapping[str, Kind] = {"replication": INTEGER}
_FRAGMENT_FIELDS: Mapping[str, Kind] = {
    "length": INTEGER,
    "compression_codec": enum_kind(pb.CompressionCodec),
    "stores": TEXTS,
    "refresh_interval": DURATION,
    "retention": DURATION,
    "flush_interval": DURATION,
    "path_postfix_template": TEXT,
}
_LATER_SPEC_FIELDS: Mapping[str, Kind] = {"flags": enum_kind(pb.JournalSpec.Flag), "max_append_rate": INTEGER}
_SUSPEND_FIELDS: Mapping[str, Kind] = {"level": enum_kind(pb.JournalSpec.Suspend.Level), "offset": INTEGER}


# -------------------------------------------------------------------------------------------------------------- nodes


@dataclass(slots=True)
class _Node:
    """A folder or a journal, with the fields it has itself; zero values are left out, as in YAML."""

    name: str = ""
    spec: Fields = field(default_factory=dict)
    fragment: Fields = field(default_factory=dict)
    labels: pb.LabelSet = field(default_factory=pb.LabelSet)
    suspend: Fields = field(default_factory=dict)
    revision: int = 0
    delete: bool | None = None
    children: list[_Node] = field(default_factory=list)
    line: int = 0

    @classmethod
    def of_spec(cls, spec: pb.JournalSpec, revision: int) -> _Node:
        return cls(
            name=spec.name,
            spec=get_fields(spec, {**_SPEC_FIELDS, **_LATER_SPEC_FIELDS}),
            fragment=get_fields(spec.fragment, _FRAGMENT_FIELDS),
            labels=spec.labels,
            suspend=get_fields(spec.suspend, _SUSPEND_FIELDS),
            revision=revision,
        )

    @property
    def is_folder(self) -> bool:
        return not self.name or self.name.endswith("/")

    def inherit(self) -> _Node:
        """Give the nodes below what they leave out. Raises InvalidInput when the tree isn't well formed."""
        if not self.is_folder:
            if self.children:
                raise line_error(self.line, f"{self.name} has children, so its name must end in '/'")
            return self
        if self.revision or self.suspend:
            raise line_error(self.line, f"the folder {self.name!r} has a revision or suspend, which only journals have")
        if not self.children:
            raise line_error(
                self.line, f"the folder {self.name!r} has no children; a journal's name doesn't end in '/'"
            )
        for child in self.children:
            if not child.name.startswith(self.name):
                raise line_error(child.line, f"the name {child.name!r} doesn't begin with its folder's, {self.name!r}")
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
        try:
            if self.delete:
                change.delete = self.name
            else:
                spec = change.upsert
                spec.name = self.name
                put_fields(spec, {**_SPEC_FIELDS, **_LATER_SPEC_FIELDS}, self.spec)
                spec.labels.CopyFrom(self.labels)
                put_fields(spec.fragment, _FRAGMENT_FIELDS, self.fragment)
                if self.suspend:
                    put_fields(spec.suspend, _SUSPEND_FIELDS, self.suspend)
            validate(change)
        except InvalidInput as err:
            where = err.field.removeprefix("ApplyRequest.Change").removeprefix(".").removeprefix("upsert.")
            where = where.replace("expect_mod_revision", "revision")
            if self.delete and where == "revision":
                problem = "to delete it, give the revision that it is at, or -1 for any"
                raise line_error(self.line, f"{self.name}: revision: {self.revision}: {problem}") from None
            raise line_error(self.line, f"{self.name}: {where}: {err.message}" if where else err.message) from None
        return change

    def hoisted(self) -> _Node:
        """Move what all children share up to their folder, from the bottom of the tree to its top."""
        if not self.children:
            return self
        children = [child.hoisted() for child in self.children]
        self.spec = shared_fields([child.spec for child in children])
        self.fragment = shared_fields([child.fragment for child in children])
        self.labels = children[0].labels
        for child in children[1:]:
            self.labels = labels.intersect(self.labels, child.labels)
        for child in children:
            child.spec = difference(child.spec, self.spec)
            child.fragment = difference(child.fragment, self.fragment)
            child.labels = labels.subtract(child.labels, self.labels)
        return self

    def document(self) -> dict[str, object]:
        """The node as YAML has it."""
        parts: dict[str, object] = {
            "name": self.name,
            **write_fields(_SPEC_FIELDS, self.spec),
            "labels": [{"name": name, "value": value} for name, value in labels.as_pairs(self.labels)],
            "fragment": write_fields(_FRAGMENT_FIELDS, self.fragment),
            **write_fields(_LATER_SPEC_FIELDS, self.spec),
            "suspend": write_fields(_SUSPEND_FIELDS, self.suspend),
            "revision": self.revision,
            "children": [child.document() for child in self.children],
        }
        return {name: part for name, part in parts.items() if part}


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


_NODE_FIELDS = (
    *("comment", "delete", "name", *_SPEC_FIELDS, "labels", "fragment", *_LATER_SPEC_FIELDS),
    *("suspend", "revision", "children"),
)


def _read_node(node: yaml.Node, depth: int) -> _Node:
    if depth > _MAX_DEPTH:
        raise line_error(line_of(node), f"the tree is deeper than {_MAX_DEPTH} nodes")
    entries = entries_of(node, _NODE_FIELDS)
    return _Node(
        name=read_text(entries["name"]) if "name" in entries else "",
        spec=read_entries(entries, {**_SPEC_FIELDS, **_LATER_SPEC_FIELDS}),
        fragment=read_fields(entries.get("fragment"), _FRAGMENT_FIELDS),
        labels=read_labels(entries.get("labels")),
        suspend=read_fields(entries.get("suspend"), _SUSPEND_FIELDS),
        revision=read_integer(entries["revision"]) if "revision" in entries else 0,
        delete=read_flag(entries["delete"]) if "delete" in entries else None,
        children=[_read_node(child, depth + 1) for child in items_of(entries["children"])]
        if "children" in entries
        else [],
        line=line_of(node),
    )
