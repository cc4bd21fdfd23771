"""The YAML file of an ingest: its source, and the stream for its rows.

name: orders
stream: shop/orders
source:
  files: {url: "file:///data/orders/", format: json}
key: customer
poison: dead letters
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import yaml

from coranto.errors import InvalidInput
from coranto.ingest.files.options import read_files
from coranto.ingest.kafka.options import read_kafka
from coranto.ingest.option_fields import checked, choice, expanded, integer, required, seconds, text, texts
from coranto.ingest.postgres.options import PostgresOptions, read_postgres
from coranto.ingest.webhook.options import read_webhook
from coranto.specs.yaml_fields import entries_of, line_error, line_of, read_document, read_text
from coranto.streams.model.batch_content import validate_batch_writer
from coranto.streams.model.stream import validate_stream

_STORES: Final = ("file:///",)
MAX_BATCH_BYTES: Final = 64 << 20
_FIELDS: Final = ("name", "stream", "source", "key", "poison", "batch", "create", "type", "registry", "register")
_EMPTY: Final = f"the file is empty; it needs the fields {', '.join(_FIELDS[:3])}"
SOURCES: Final[Mapping[str, Callable[[yaml.Node], Any]]] = {
    "kafka": read_kafka,
    "files": read_files,
    "postgres": read_postgres,
    "webhook": read_webhook,
}
"""The kinds of sources, and the functions that read their options."""


@dataclass(frozen=True, slots=True)
class NewStream:
    """The settings of a stream that is created if it does not exist."""

    segments: int = 1
    replication: int = 1
    stores: tuple[str, ...] = _STORES


class IngestNames(NamedTuple):
    """The name of an ingest, its stream, and the kind of its source."""

    name: str
    stream: str
    kind: str


@dataclass(frozen=True, slots=True)
class IngestSpec:
    """The definition of an ingest, read from its file."""

    name: str
    stream: str
    kind: str
    options: Any
    """The options of the source. Their class depends on the kind."""
    key: str = ""
    """The field with the routing key; empty for the source's own key."""
    keeps_poison: bool = False
    """True if rows that cannot be events go to the stream's dead letters."""
    batch_bytes: int = 4 << 20
    batch_seconds: float = 1.0
    create: NewStream | None = None
    type: str = ""
    registry: str = ""
    registers: bool = False
    """True if the source's schema is registered as the type, and each change of the schema as a version."""


def read_spec(content: str, environment: Mapping[str, str] | None = None) -> IngestSpec:
    """Read a file's text. `${NAME}` in texts of options stands for a variable of the environment.

    Raises InvalidInput, with the line.
    """
    known = os.environ if environment is None else environment
    found = read_document(content, lambda node: _read(expanded(node, known)))
    if found is None:
        raise InvalidInput(_EMPTY)
    return found


def read_names(content: str, environment: Mapping[str, str] | None = None) -> IngestNames:
    """Read the names of an ingest. Variables of other fields may be missing. Raises InvalidInput, with the line."""
    known = os.environ if environment is None else environment

    def read(node: yaml.Node) -> IngestNames:
        entries = entries_of(node, _FIELDS)
        required(node, entries, *_FIELDS[:3])
        name, stream = (expanded(entries[each], known) for each in _FIELDS[:2])
        return IngestNames(checked(name, validate_batch_writer), checked(stream, validate_stream), _source(entries)[0])

    found = read_document(content, read)
    if found is None:
        raise InvalidInput(_EMPTY)
    return found


def _read(node: yaml.Node) -> IngestSpec:
    entries = entries_of(node, _FIELDS)
    required(node, entries, *_FIELDS[:3])
    kind, node = _source(entries)
    options = SOURCES[kind](node)
    if "key" in entries and isinstance(options, PostgresOptions):
        raise line_error(line_of(entries["key"]), "rows of a table have its primary key: leave `key` out")
    batch = entries_of(entries["batch"], ("bytes", "seconds")) if "batch" in entries else {}
    return IngestSpec(
        name=checked(entries["name"], validate_batch_writer),
        stream=checked(entries["stream"], validate_stream),
        kind=kind,
        options=options,
        key=text(entries, "key"),
        keeps_poison=choice(entries, "poison", ("fail", "dead letters")) == "dead letters",
        batch_bytes=integer(batch, "bytes", 1, MAX_BATCH_BYTES, 4 << 20),
        batch_seconds=seconds(batch, "seconds", 1.0),
        create=_new_stream(entries["create"]) if "create" in entries else None,
        type=text(entries, "type"),
        registry=_registry(entries),
        registers=_registers(entries, kind, options),
    )


def _source(entries: Mapping[str, yaml.Node]) -> tuple[str, yaml.Node]:
    """Return the kind of the source, and its options."""
    sources = entries_of(entries["source"], SOURCES)
    if len(sources) != 1:
        raise line_error(line_of(entries["source"]), f"give one source, of the kind {' or '.join(SOURCES)}")
    [found] = sources.items()
    return found


def _new_stream(node: yaml.Node) -> NewStream:
    entries = entries_of(node, ("segments", "replication", "stores"))
    return NewStream(
        integer(entries, "segments", 1, 120, 1),
        integer(entries, "replication", 1, 5, 1),
        texts(entries, "stores", _STORES),
    )


def _registry(entries: Mapping[str, yaml.Node]) -> str:
    if ("type" in entries) != ("registry" in entries):
        given = entries["type" if "type" in entries else "registry"]
        raise line_error(line_of(given), "give both a type and the registry that has it, or neither")
    return text(entries, "registry")


def _registers(entries: Mapping[str, yaml.Node], kind: str, options: Any) -> bool:
    if choice(entries, "register", ("false", "true")) == "false":
        return False
    line = line_of(entries["register"])
    if "type" not in entries:
        raise line_error(line, "`register` needs the name of a type and its registry: add `type` and `registry`")
    if "@" in read_text(entries["type"]):
        raise line_error(line, "`register` makes versions, and so the type is named without one: leave @ and it out")
    if options.without_schema:
        raise line_error(
            line, f"{kind}: {options.without_schema} have no schema: leave `register` out, and register a type"
        )
    return True
