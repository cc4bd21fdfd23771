"""Options of `write.format("journal")` and `writeStream.format("journal")`, and the form of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast, get_args

import pyarrow as pa
from pyspark.sql.types import BinaryType, MapType, StringType, StructField, StructType, VariantType

from coranto.client import ClientConfig, SyncJournalClient
from coranto.errors import InvalidInput
from coranto.messages.framing import DEFAULT_UUID_POINTER, JsonLines
from coranto.messages.mapping import MappingName
from coranto.publication.ledger import checked_writer_id
from coranto.types.arrow import require_filled
from coranto.types.catalog import TypeVersion
from coranto.types.writing import require_columns
from coranto_consumers.journals.framings import require_json
from coranto_consumers.spark.decoding.type_columns import fields_of_spark
from coranto_consumers.spark.options import client_options, selections
from coranto_consumers.spark.options.message_types import find_type
from coranto_consumers.spark.options.option_values import choice_option, flag_option, require_known
from coranto_consumers.spark.options.source_options import OPTIONS, SourceOptions
from coranto_consumers.spark.sink.message_rows import ColumnRows, ObjectTextRows, Rows, require_encodable

_SHARED: Final = (*client_options.OPTIONS, *selections.OPTIONS, "uuidPointer", "registry", "messageType")
SINK_OPTIONS: Final[Mapping[str, str]] = {
    **{name: OPTIONS[name] for name in _SHARED},
    "registry": "journal that registers message types: rows that do not fit the type that messageType names, else the "
    "one that the journals' labels name, are refused",
    "messageType": "with a registry: name of a message type there, as shop.Order or shop.Order@3",
    "stream": "name of a stream: messages go to its segments by their keys, through splits and merges: shop/orders",
    "ledger": "journal that records which writes are decided; it is created if it is missing. Default: the name that "
    "journal or prefix gives, below ledgers/; required with other options, for a stream only with writerId",
    "mapping": "journal of a message by its key: rendezvous (default), modulo or random",
    "keyColumn": "column that messages are mapped by: key (default)",
    "writerId": "name of a batch write; a write of a name that was written already adds nothing",
    "acceptLoss": "true: write although the ledger may have lost records, and perhaps write something twice",
    "failOnDataLoss": "for a query whose batch has a number that is written already, with other rows: an error (true, "
    "default), or the batch is left out with a warning (false)",
}
_OF_JOURNALS: Final = {
    "mapping": "keys are mapped to segments by the stream's own rule",
    "uuidPointer": "events of a stream have their UUIDs at /_meta/uuid",
}
_VALUE: Final = "value"
_JOURNAL: Final = "journal"


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The parsed options of one write."""

    client: ClientConfig
    target: SourceOptions
    """The journals to write to, selected as for a read."""
    stream: str
    """The stream to write to. Empty for journals."""
    ledger: str
    mapping: MappingName
    key_column: str
    writer_id: str
    """The name of a batch write. Empty: the write gets a unique name."""
    accept_loss: bool
    fail_on_data_loss: bool
    framing: JsonLines
    version: TypeVersion | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        """Parse options, in any case. Raises InvalidInput."""
        given = {key.lower(): value for key, value in options.items()}
        for key in options:
            require_known(key, SINK_OPTIONS)
        if "stream" in given:
            for name, why in _OF_JOURNALS.items():
                if name.lower() in given:
                    raise InvalidInput(f"{why}: leave it out", field=f"option {name}")
            if "ledger" in given and "writerid" not in given:
                raise InvalidInput(
                    "a stream itself records decided writes, except for writes with a writerId: leave it out",
                    field="option ledger",
                )
            if given.get("ledger", "").startswith(f"{given['stream']}/"):
                raise InvalidInput("is among the stream's own journals: name another", field="option ledger")
        named = (given.get("journal") or given.get("prefix", "")).rstrip("/")
        ledger = given.get("ledger") or (f"ledgers/{named}" if named else "")
        if not ledger and ("stream" not in given or "writerid" in given):
            raise InvalidInput(f"is required: {SINK_OPTIONS['ledger']}", field="option ledger")
        mapping = choice_option(given, "mapping", get_args(MappingName), "rendezvous")
        if streaming and "writerid" in given:
            raise InvalidInput("is for batch writes; a query is known by its checkpoint", field="option writerId")
        shared = {name.lower() for name in _SHARED}
        target = SourceOptions.parse({key: value for key, value in given.items() if key in shared})
        return cls(
            target.client,
            target,
            given.get("stream", ""),
            ledger,
            cast(MappingName, mapping),
            given.get("keycolumn", "key"),
            checked_writer_id(given["writerid"]) if "writerid" in given else "",
            flag_option(given, "acceptLoss", False),
            flag_option(given, "failOnDataLoss", True),
            require_json(target.framing, "the sink writes"),
        )

    def typed(self) -> SinkOptions:
        """Return the options with the registered type that rows must fit, if any. Raises InvalidInput."""
        if not self.target.registry:
            return self
        with SyncJournalClient.of(self.client) as client:
            found = find_type(client, self.target)
        framing = require_json(found.framing, f"{found.version} has another framing: the sink writes")
        if self.stream and framing.pointer != DEFAULT_UUID_POINTER:
            raise InvalidInput(
                f"{found.version} has its UUIDs at {framing.pointer}, and events of a stream have them at "
                f"{DEFAULT_UUID_POINTER}",
                field="option registry",
            )
        if framing.pointer is None:
            raise InvalidInput(
                f"messages of {found.version} have no UUIDs, which the sink needs to write them once",
                field="option registry",
            )
        target = replace(self.target, labels=found.labels)
        return replace(self, target=target, framing=framing, version=found.version)


@dataclass(frozen=True, slots=True)
class RowForm:
    """The form of rows. The message is the column `value`, next to a key and `journal`, or all columns together."""

    fields: tuple[StructField, ...]
    """The fields of the message. Empty if the message is the text in the column `value`."""
    text: bool
    key: int | None
    journal: int | None
    value: int | None
    registered: TypeVersion | None = None
    """The registered type that messages must fit."""

    @classmethod
    def of(cls, schema: StructType, options: SinkOptions, journals: int = 0) -> RowForm:
        """Return the form of rows with a schema, for a stream or for `journals` journals. Raises InvalidInput."""
        names = schema.names
        key = names.index(options.key_column) if options.key_column in names else None
        kinds = (StringType,) if options.stream else (StringType, BinaryType)
        if key is not None and not isinstance(schema[key].dataType, kinds):
            raise InvalidInput(
                f"the key {options.key_column} is {schema[key].dataType.simpleString()}: cast it to STRING",
                field="schema",
            )
        if _VALUE not in names:
            if not names:
                raise InvalidInput("the rows have no columns", field="schema")
            require_encodable(schema, "")
            form = cls(tuple(schema.fields), False, key, None, None)
        else:
            form = cls._of_value(schema, options, key)
        if options.stream and form.journal is not None:
            raise InvalidInput("a stream maps messages itself: leave the column journal out", field="schema")
        if options.stream and key is None:
            raise InvalidInput(
                f"there is no column {options.key_column} with the messages' routing keys: add it, or name another one "
                "(keyColumn)",
                field="schema",
            )
        if not options.stream and key is None and form.journal is None and journals > 1 and options.mapping != "random":
            raise InvalidInput(
                f"there is no column {options.key_column} to map messages to {journals} journals by: add it, name "
                "another one (keyColumn), or set mapping=random",
                field="schema",
            )
        return form if options.version is None else form._fitting(options.version)

    def _fitting(self, version: TypeVersion) -> RowForm:
        """Return the form for messages of a registered type. Raises InvalidInput for columns that do not fit."""
        if self.text:
            raise InvalidInput(
                "the value is a text, whose fields are not known before it is written: make it a struct of the fields "
                f"of {version} (from_json)",
                field="schema",
            )
        try:
            require_columns(fields_of_spark(StructType(list(self.fields))), version.definition.fields)
        except InvalidInput as error:
            raise InvalidInput(f"rows do not fit {version}: {error.message}", field="schema") from error
        return replace(self, registered=version)

    @classmethod
    def _of_value(cls, schema: StructType, options: SinkOptions, key: int | None) -> RowForm:
        names = schema.names
        known = {_VALUE, _JOURNAL, options.key_column}
        if unknown := [name for name in names if name not in known]:
            raise InvalidInput(
                f"{unknown[0]} has no place next to the column value: put it into the value, or rename value",
                field="schema",
            )
        journal = names.index(_JOURNAL) if _JOURNAL in names else None
        if journal is not None and not isinstance(schema[journal].dataType, StringType):
            raise InvalidInput("the column journal is not STRING", field="schema")
        value = names.index(_VALUE)
        kind = schema[value].dataType
        match kind:
            case StringType() | BinaryType():
                return cls((), True, key, journal, value)
            case StructType():
                require_encodable(kind, _VALUE)
                return cls(tuple(kind.fields), False, key, journal, value)
        hint = "; write to_json(value)" if isinstance(kind, MapType | VariantType) else ""
        raise InvalidInput(
            f"the column value is {kind.simpleString()}, and a message is a struct or the text of a JSON object{hint}",
            field="schema",
        )

    def rows(self, batch: Any) -> Rows:
        """Return the messages of an Arrow batch. Raises InvalidInput."""
        if self.registered is not None:
            columns = batch.columns if self.value is None else batch.column(self.value).flatten()
            try:
                require_filled([field.name for field in self.fields], columns, self.registered.definition.fields)
            except InvalidInput as error:
                raise InvalidInput(f"rows do not fit {self.registered}: {error.message}", field="schema") from error
        if self.value is None:
            return ColumnRows.of(self.fields, batch.columns, batch.num_rows)
        column = batch.column(self.value)
        if not self.text:
            return ColumnRows.of_structs(self.fields, column)
        try:
            return ObjectTextRows(column.cast(pa.string()))
        except pa.ArrowInvalid as error:
            raise InvalidInput(f"a value is not UTF-8: {error}", field="column value") from error
