"""YAML file of a table: the messages to read, and the table to write.

name: orders
input: {stream: shop/orders}
columns: id BIGINT, customer STRING, cents BIGINT
store: sqlite:///shop.db
table: orders
mode: upsert
key: [id]
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar, cast

import yaml

from coranto.errors import InvalidInput
from coranto.ingest.option_fields import checked, choice, expanded, pairs, required, seconds, text, texts
from coranto.labels import format_selector, label_selector, parse_selector
from coranto.names import validate_journal, validate_path, validate_shard_id
from coranto.specs.yaml_fields import entries_of, line_error, line_of, read_document, read_text
from coranto.streams.model.stream import segments_selector, validate_stream
from coranto.types.kinds import TypeField
from coranto.types.parsing import parse_fields
from coranto_consumers.stores.reading import ICEBERG

Mode = Literal["append", "upsert", "changes"]
Runner = Literal["shard", "spark"]
T = TypeVar("T")

_REQUIRED: Final = ("name", "input", "store", "table")
_FIELDS: Final = (
    *_REQUIRED,
    *("columns", "type", "registry", "mode", "key", "operation"),
    *("filter", "select", "runner", "misfits", "evolve", "interval"),
)
_INPUTS: Final = ("stream", "journal", "prefix", "selector")
_MODES: Final = ("append", "upsert", "changes")
_RUNNERS: Final = ("shard", "spark")
_ICEBERG_SECONDS: Final = 10.0
"""The default interval of Iceberg tables, whose transactions create a snapshot each."""
_SQL_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_ICEBERG_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)+")
_CATALOG: Final = re.compile(re.escape(ICEBERG) + r"[A-Za-z0-9_-]+")
DELETED: Final = "coranto_deleted"
"""The boolean column of rows: true deletes the table's row with the same key."""
_RESERVED: Final = frozenset(
    {"_meta"}
    | {f"_{name}" for name in ("journal", "offset", "next_offset", "producer", "clock", "flags", "value")}
    | {"_commit_offset"}
)
_RESERVED_PREFIXES: Final = ("coranto_", "_coranto_")


@dataclass(frozen=True, slots=True)
class TableInput:
    """The journals whose messages become rows."""

    selector: str
    """The label selector of the journals."""
    stream: str = ""
    """The stream, if the journals are its segments."""
    journal: str = ""
    """The journal, if there is only one."""
    prefix: str = ""
    """The prefix of the journals' names, if it selects them. It ends with a slash."""
    keyed: bool = False
    """True if the user declares that all messages of a key are in one journal."""

    @classmethod
    def of(cls, kind: str, name: str, *, keyed: bool = False) -> TableInput:
        """Return the input for an entry of the file's field `input`. Raises InvalidInput."""
        match kind:
            case "stream":
                return cls(format_selector(segments_selector(validate_stream(name))), stream=name)
            case "journal":
                chosen = label_selector(include=[("name", validate_journal(name))])
                return cls(format_selector(chosen), journal=name)
            case "prefix":
                chosen = label_selector(include=[("name:prefix", _checked_prefix(name))])
                return cls(format_selector(chosen), prefix=name, keyed=keyed)
        return cls(format_selector(parse_selector(name)), keyed=keyed)

    def under(self, prefix: str) -> TableInput:
        """Return the same input with a prefix in front of its journals' names. Raises InvalidInput for a selector."""
        for kind, name in (("stream", self.stream), ("journal", self.journal), ("prefix", self.prefix)):
            if name:
                return TableInput.of(kind, prefix + name, keyed=self.keyed)
        if prefix:
            raise InvalidInput(
                f"a selector has no name that {prefix!r} can begin: write the prefix into the selector, or give a "
                "stream, a journal or a prefix",
                field="input",
            )
        return self

    @property
    def folder(self) -> str:
        """The folder of the journals; empty if they may be anywhere."""
        return self.stream or self.prefix[:-1] or self.journal.rpartition("/")[0]

    def __str__(self) -> str:
        if self.stream:
            return f"stream {self.stream}"
        return f"journal {self.journal}" if self.journal else f"journals {self.selector}"


@dataclass(frozen=True, slots=True)
class OperationColumn:
    """The column of messages that marks deletions. The table does not have it."""

    column: str
    deletes: tuple[str, ...] = ()
    """The texts that mark deletions. Empty: the column is a BOOLEAN, and true marks them."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """The definition of a table in its file."""

    name: str
    """The name of the consumer, and of its checkpoint in the store."""
    input: TableInput
    store: str
    table: str
    columns: tuple[TypeField, ...] = ()
    """The fields of messages. Empty: all fields of the type."""
    type: str = ""
    registry: str = ""
    mode: Mode = "append"
    key: tuple[str, ...] = ()
    operation: OperationColumn | None = None
    filter: str = ""
    select: tuple[tuple[str, str], ...] = ()
    """The table's columns, each with its expression. Empty: the fields of messages."""
    runner: Runner = "shard"
    keeps_misfits: bool = False
    """True: values that do not fit become null."""
    evolves: bool = False
    """True: missing columns are added to the table, and narrow types widened."""
    interval: float = 0.0
    """The minimum seconds between two transactions of a service."""

    @property
    def is_iceberg(self) -> bool:
        return self.store.startswith(ICEBERG)

    @property
    def store_url(self) -> str:
        """The URL of the store with the checkpoint. An Iceberg table has its own checkpoint."""
        return f"{self.store}/{self.table}" if self.is_iceberg else self.store


class TableNames(NamedTuple):
    """The names in the file of a table."""

    name: str
    input: TableInput
    table: str
    store: str
    """The kind of the store, such as `postgresql`. Empty if an environment variable has it."""


def read_names(content: str, environment: Mapping[str, str] | None = None) -> TableNames:
    """Read the names of a table. Variables of other fields may be missing. Raises InvalidInput, with the line."""
    known = os.environ if environment is None else environment

    def read(node: yaml.Node) -> TableNames:
        entries = entries_of(node, _FIELDS)
        required(node, entries, *_REQUIRED)
        name, given, table = (expanded(entries[each], known) for each in ("name", "input", "table"))
        store = read_text(entries["store"]).partition(":")[0].partition("+")[0]
        return TableNames(
            checked(name, validate_shard_id), _input(given), read_text(table), "" if "$" in store else store
        )

    return _document(content, read)


def read_table(content: str, environment: Mapping[str, str] | None = None) -> TableSpec:
    """Parse the text of a file. `${NAME}` in the text of a field stands for an environment variable.

    Raises InvalidInput, with the line.
    """
    known = os.environ if environment is None else environment
    return _document(content, lambda node: _read(expanded(node, known)))


def _document(content: str, read: Callable[[yaml.Node], T]) -> T:
    found = read_document(content, read)
    if found is None:
        raise InvalidInput(f"the file is empty; it needs the fields {', '.join(_REQUIRED)}")
    return found


def _read(node: yaml.Node) -> TableSpec:
    entries = entries_of(node, _FIELDS)
    required(node, entries, *_REQUIRED)
    store = _store(entries["store"])
    mode = cast(Mode, choice(entries, "mode", _MODES))
    columns = _columns(entries["columns"]) if "columns" in entries else ()
    _require_one_source_of_columns(node, entries)
    key = _key(entries, mode)
    operation = _operation(entries, mode)
    spec = TableSpec(
        name=checked(entries["name"], validate_shard_id),
        input=_input(entries["input"]),
        store=store,
        table=_table(entries["table"], store),
        columns=columns,
        type=text(entries, "type"),
        registry=checked(entries["registry"], validate_journal) if "registry" in entries else "",
        mode=mode,
        key=key,
        operation=operation,
        filter=text(entries, "filter"),
        select=tuple(pairs(entries, "select").items()),
        runner=cast(Runner, choice(entries, "runner", _RUNNERS)),
        keeps_misfits=choice(entries, "misfits", ("fail", "nulls")) == "nulls",
        evolves=choice(entries, "evolve", ("false", "true")) == "true",
        interval=seconds(entries, "interval", _ICEBERG_SECONDS if store.startswith(ICEBERG) else 0.0),
    )
    for name in ("filter", "select"):
        if name in entries and spec.runner != "spark":
            raise line_error(line_of(entries[name]), f"`{name}` has Spark SQL, which needs Spark: add `runner: spark`")
    for name, _ in spec.select:
        _require_name(name, entries["select"])
    if spec.columns:
        require_columns(spec, [field.name for field in spec.columns])
    return spec


def require_columns(spec: TableSpec, fields: Sequence[str]) -> None:
    """Raise InvalidInput for a key that the table lacks, and an operation that messages lack."""
    if spec.operation is not None and spec.operation.column not in fields:
        raise InvalidInput(
            f"there is no column {spec.operation.column!r} among {', '.join(fields)}", field="operation.column"
        )
    names = [name for name, _ in spec.select] or table_columns(spec, fields)
    for name in spec.key:
        if name not in names:
            raise InvalidInput(f"the key {name!r} is not among the table's columns {', '.join(names)}", field="key")
    if not names:
        raise InvalidInput("the table has no columns but the operation: give it some", field="columns")


def table_columns(spec: TableSpec, fields: Sequence[str]) -> list[str]:
    """Return the fields of messages that are columns of a table without expressions: all but the operation."""
    return [name for name in fields if spec.operation is None or name != spec.operation.column]


def require_name(name: str) -> None:
    """Raise InvalidInput for a column name that Coranto reserves."""
    if name in _RESERVED or name.startswith(_RESERVED_PREFIXES):
        raise InvalidInput(f"{name!r} is a name that Coranto uses: leave it out, or rename the field")


def _require_name(name: str, node: yaml.Node) -> None:
    try:
        require_name(name)
    except InvalidInput as error:
        raise line_error(line_of(node), error.message) from None


def _input(node: yaml.Node) -> TableInput:
    entries = entries_of(node, (*_INPUTS, "keyed"))
    given = [name for name in _INPUTS if name in entries]
    if len(given) != 1:
        raise line_error(line_of(node), f"give one of {', '.join(_INPUTS)}")
    kind, value = given[0], entries[given[0]]
    keyed = choice(entries, "keyed", ("false", "true")) == "true"
    if keyed and kind in ("stream", "journal"):
        raise line_error(line_of(entries["keyed"]), f"a {kind} keeps the order of keys by itself: leave `keyed` out")
    found: TableInput = checked(value, lambda name: TableInput.of(kind, name, keyed=keyed))
    return found


def _checked_prefix(prefix: str) -> str:
    if not prefix.endswith("/"):
        raise InvalidInput(f"{prefix!r} does not end with a slash, such as {prefix + '/'!r}")
    validate_path("prefix", prefix[:-1], 1, 500)
    return prefix


def _store(node: yaml.Node) -> str:
    store = read_text(node)
    if not store.startswith(ICEBERG):
        from coranto_consumers.stores.urls import parse_store_url

        checked(node, parse_store_url)
    elif not _CATALOG.fullmatch(store):
        raise line_error(line_of(node), "the store is not like iceberg://CATALOG; `table` has the namespace and name")
    return store


def _table(node: yaml.Node, store: str) -> str:
    table = read_text(node)
    if store.startswith(ICEBERG):
        if not _ICEBERG_NAME.fullmatch(table):
            raise line_error(line_of(node), f"{table!r} is not like namespace.name, in small letters, digits and _")
    elif not _SQL_NAME.fullmatch(table):
        raise line_error(line_of(node), f"{table!r} is not a name of up to 63 small letters, digits and _")
    return table


def _columns(node: yaml.Node) -> tuple[TypeField, ...]:
    found: tuple[TypeField, ...] = checked(node, parse_fields)
    for field in found:
        _require_name(field.name, node)
    return found


def _require_one_source_of_columns(node: yaml.Node, entries: Mapping[str, yaml.Node]) -> None:
    if ("columns" in entries) == ("registry" in entries):
        raise line_error(line_of(node), "give either `columns`, or the `registry` of the messages' type")
    if "type" in entries and "registry" not in entries:
        raise line_error(line_of(entries["type"]), "a type is found in a registry: add `registry`")


def _key(entries: Mapping[str, yaml.Node], mode: Mode) -> tuple[str, ...]:
    if mode == "append":
        if "key" in entries:
            raise line_error(line_of(entries["key"]), "rows that are appended have no key: leave it out, or upsert")
        return ()
    if "key" not in entries:
        raise line_error(line_of(entries["mode"]), f"`mode: {mode}` needs a `key`, such as [id]")
    node = entries["key"]
    key = (read_text(node),) if isinstance(node, yaml.ScalarNode) else texts(entries, "key")
    if not key or len(set(key)) != len(key):
        raise line_error(line_of(node), "the key needs one column at least, and each once")
    return key


def _operation(entries: Mapping[str, yaml.Node], mode: Mode) -> OperationColumn | None:
    if mode != "changes":
        if "operation" in entries:
            raise line_error(line_of(entries["operation"]), "only `mode: changes` has an operation")
        return None
    if "operation" not in entries:
        raise line_error(
            line_of(entries["mode"]), "`mode: changes` needs an `operation`, such as {column: op, deletes: [d]}"
        )
    node = entries["operation"]
    found = entries_of(node, ("column", "deletes"))
    required(node, found, "column")
    operation = OperationColumn(read_text(found["column"]), texts(found, "deletes"))
    if "deletes" in found and not operation.deletes:
        raise line_error(line_of(found["deletes"]), "the list is empty, so nothing marks deletions: give texts")
    return operation
