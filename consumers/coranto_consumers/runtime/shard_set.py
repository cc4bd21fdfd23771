"""Shard specs in YAML, interchangeable with Gazette's. Common fields are given once, and then each shard::

    common:
      max_txn_duration: 1s
      labels:
      - name: app
        value: sums
    shards:
    - id: sums-000
      sources:
      - journal: flights/events/part-000
    - id: sums-001
      sources:
      - journal: flights/events/part-001
      revision: 1234

A shard inherits omitted fields from `common`. Its labels replace labels of `common` with the same
names. `revision` is the shard's current revision: if it is absent or 0, the shard is created; -1 applies the change at
any revision. `delete: true` removes the shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import yaml

from coranto import labels
from coranto.errors import InvalidInput
from coranto.specs.yaml_fields import (
    DURATION,
    INTEGER,
    TEXT,
    FieldConversion,
    Fields,
    difference,
    dump_document,
    entries_of,
    get_fields,
    items_of,
    line_error,
    line_of,
    put_fields,
    read_document,
    read_entries,
    read_flag,
    read_integer,
    read_labels,
    read_text,
    shared_fields,
    write_fields,
)
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.specs import validate_change

_FLAG = FieldConversion(read_flag, bool, bool, lambda message, name, value: setattr(message, name, bool(value)))

# In order of writing.
_FIELDS: dict[str, FieldConversion] = {
    "recovery_log_prefix": TEXT,
    "hint_prefix": TEXT,
    "hint_backups": INTEGER,
    "max_txn_duration": DURATION,
    "min_txn_duration": DURATION,
    "disable": _FLAG,
    "hot_standbys": INTEGER,
    "disable_wait_for_ack": _FLAG,
    "ring_buffer_size": INTEGER,
    "read_channel_size": INTEGER,
}
_SOURCE_FIELDS: dict[str, FieldConversion] = {"journal": TEXT, "min_offset": INTEGER}
_SHARED = ("sources", *_FIELDS, "labels")

Sources = tuple[tuple[str, int], ...]


def parse_shards(text: str) -> list[pc.ApplyRequest.Change]:
    """Return the changes of a shard set, complete and validated, in its order.

    An empty text has no changes. Raises InvalidInput, which names the line and, if possible, the shard.
    """
    found = read_document(text, _read_set)
    changes: list[pc.ApplyRequest.Change] = []
    lines: dict[str, int] = {}
    for shard in found or ():
        if shard.id in lines:
            raise line_error(shard.line, f"{shard.id} was already given in line {lines[shard.id]}")
        lines[shard.id] = shard.line
        changes.append(shard.change())
    return changes


def render_shards(shards: Iterable[tuple[pc.ShardSpec, int]]) -> str:
    """Return specs and their revisions as YAML, with shared fields moved to `common`. Without specs, return ""."""
    found = [_Shard.of_spec(spec, revision) for spec, revision in sorted(shards, key=lambda pair: pair[0].id)]
    if not found:
        return ""
    common = _Shard(fields=shared_fields([shard.fields for shard in found]), labels=found[0].labels)
    for shard in found[1:]:
        common.labels = labels.intersect(common.labels, shard.labels)
    if len({shard.sources for shard in found}) == 1:
        common.sources = found[0].sources
    for shard in found:
        shard.fields = difference(shard.fields, common.fields)
        shard.labels = labels.subtract(shard.labels, common.labels)
        shard.sources = () if common.sources else shard.sources
    parts = {"common": common.document(), "shards": [shard.document() for shard in found]}
    return dump_document({name: part for name, part in parts.items() if part})


@dataclass(slots=True)
class _Shard:
    """A shard, or the fields that shards have in common. Zero values are left out, as in YAML."""

    id: str = ""
    sources: Sources = ()
    fields: Fields = field(default_factory=dict)
    labels: pb.LabelSet = field(default_factory=pb.LabelSet)
    revision: int = 0
    delete: bool = False
    line: int = 0

    @classmethod
    def of_spec(cls, spec: pc.ShardSpec, revision: int) -> _Shard:
        sources = tuple((source.journal, source.min_offset) for source in spec.sources)
        return cls(spec.id, sources, get_fields(spec, _FIELDS), spec.labels, revision)

    def inherit(self, common: _Shard) -> _Shard:
        self.sources = self.sources or common.sources
        self.fields = {**common.fields, **self.fields}
        self.labels = labels.union(self.labels, common.labels)
        return self

    def change(self) -> pc.ApplyRequest.Change:
        """Return the change for this shard. Raises InvalidInput when it is not valid."""
        change = pc.ApplyRequest.Change(expect_mod_revision=self.revision)
        try:
            if self.delete:
                change.delete = self.id
            else:
                spec = change.upsert
                spec.id = self.id
                for journal, min_offset in sorted(self.sources):
                    spec.sources.add(journal=journal, min_offset=min_offset)
                put_fields(spec, _FIELDS, self.fields)
                spec.labels.CopyFrom(self.labels)
            validate_change(change)
        except InvalidInput as error:
            where = error.field.removeprefix("upsert.").replace("expect_mod_revision", "revision")
            raise line_error(self.line, f"{self.id}: {where}: {error.message}") from None
        return change

    def document(self) -> dict[str, object]:
        sources = [
            {"journal": journal, **({"min_offset": min_offset} if min_offset else {})}
            for journal, min_offset in self.sources
        ]
        parts: dict[str, object] = {
            "id": self.id,
            "sources": sources,
            **write_fields(_FIELDS, self.fields),
            "labels": [{"name": name, "value": value} for name, value in labels.as_pairs(self.labels)],
            "revision": self.revision,
        }
        return {name: part for name, part in parts.items() if part}


def _read_set(node: yaml.Node) -> list[_Shard]:
    entries = entries_of(node, ("common", "shards"))
    common = _Shard()
    if "common" in entries:
        common = _read_shard(entries["common"], _SHARED)
    shards = items_of(entries["shards"]) if "shards" in entries else []
    known = ("comment", "delete", "id", *_SHARED, "revision")
    return [_read_shard(shard, known).inherit(common) for shard in shards]


def _read_shard(node: yaml.Node, known: Iterable[str]) -> _Shard:
    entries = entries_of(node, known)
    return _Shard(
        id=read_text(entries["id"]) if "id" in entries else "",
        sources=tuple(map(_read_source, items_of(entries["sources"]))) if "sources" in entries else (),
        fields=read_entries(entries, _FIELDS),
        labels=read_labels(entries.get("labels")),
        revision=read_integer(entries["revision"]) if "revision" in entries else 0,
        delete="delete" in entries and read_flag(entries["delete"]),
        line=line_of(node),
    )


def _read_source(node: yaml.Node) -> tuple[str, int]:
    values = read_entries(entries_of(node, _SOURCE_FIELDS), _SOURCE_FIELDS)
    return str(values.get("journal", "")), int(values.get("min_offset", 0))  # type: ignore[arg-type]
