"""Journal specs as trees in YAML, interchangeable with Gazette's.

A tree declares journals without repeating their common fields. A node whose name ends in `/` (or is empty) is a folder:
its children inherit the fields that they omit. Other nodes are journals::

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

For each label name, a child's labels replace its parent's. `revision` is the journal's current revision: absent or 0
creates the journal, -1 applies to any revision. `delete: true`, which is also inherited, removes the journal instead.
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
    FieldConversion,
    Fields,
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
    """Return the changes that a tree requests, complete and validated, in the tree's order.

    An empty text requests no changes. Raises InvalidInput with the line and, if there is one, the journal.
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
    """Return specs and their revisions as a tree in YAML, with common fields moved up to folders.

    `parse_tree` returns the same specs. Suspension stays with each journal. Without journals the text is empty.
    """
    nodes = [_Node.of_spec(spec, revision) for spec, revision in sorted(journals, key=lambda pair: pair[0].name)]
    if not nodes:
        return ""
    document = _gather(nodes, depth=0).hoisted().document()
    return dump_document(document)


# Fields that children inherit, in order of writing.
_SPEC_FIELDS: Mapping[str, FieldConversion] = {"replication": INTEGER}
_FRAGMENT_FIELDS: Mapping[str, FieldConversion] = {
    "length": INTEGER,
    "compression_codec": enum_kind(pb.CompressionCodec),
    "stores": TEXTS,
    "refresh_interval": DURATION,
    "retention": DURATION,
    "flush_interval": DURATION,
    "path_postfix_template": TEXT,
}
_LATER_SPEC_FIELDS: Mapping[str, FieldConversion] = {
    "flags": enum_kind(pb.JournalSpec.Flag),
    "max_append_rate": INTEGER,
}
_SUSPEND_FIELDS: Mapping[str, FieldConversion] = {"level": enum_kind(pb.JournalSpec.Suspend.Level), "offset": INTEGER}


# -------------------------------------------------------------------------------------------------------------- nodes


@dataclass(slots=True)
class _Node:
    """A folder or a journal, with its own fields. Zero values are omitted, as in YAML."""

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
        """Fill in the fields that descendants omit. Raises InvalidInput when the tree is not well formed."""
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
        """Return the requested change of this journal. Raises InvalidInput when the change is invalid."""
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
        """Move the common fields of children up to their folder, from the bottom of the tree to the top."""
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
        """Return the node as plain values for YAML."""
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
    """Return the smallest tree of folders for journals that are sorted by name and share `depth` path parts."""
    if len(journals) == 1:
        return journals[0]
    children: list[_Node] = []
    for part, group in groupby(journals, key=lambda journal: _part(journal.name, depth)):
        members = list(group)
        children.extend(members if part is None else [_gather(members, depth + 1)])
    if len(children) == 1:
        return children[0]  # A folder with only one folder in it needs no node.
    return _Node(name="".join(part + "/" for part in journals[0].name.split("/")[:depth]), children=children)


def _part(name: str, depth: int) -> str | None:
    """Return the name's folder at `depth`, or None when the name has no folder that deep."""
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
