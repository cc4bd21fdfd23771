"""The client of dlt's loader: it creates journals and message types, publishes load files, and keeps the state.

Each table of a dataset is one journal, or several, in the folder `<dataset>/<table>/`. Its rows are lines of JSON of
the message type `<dataset>.<table>`. A load file is one publication, whose name has the ids of the load and of the
file; a ledger for each table, `<dataset>/_dlt_published/<table>`, records it. So a file is published once, however
often dlt repeats it, in any process. dlt's own tables are written in the same way: `_dlt_loads` once all files of
a load are published, `_dlt_version` for each version of the schema, and `_dlt_pipeline_state`, which dlt loads as any
other table.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from dlt.common.destination.client import (
    JobClientBase,
    LoadJob,
    PreparedTableSchema,
    RunnableLoadJob,
    StateInfo,
    StorageSchemaInfo,
    WithStateSync,
)
from dlt.common.destination.exceptions import DestinationTerminalException, DestinationUndefinedEntity
from dlt.common.schema import Schema
from dlt.destinations.utils import verify_schema_merge_disposition

from coranto.client import SyncJournalClient
from coranto.client.retry import RetryPolicy
from coranto.destinations.columns import fields_of, rows_of
from coranto.destinations.newest import newest
from coranto.errors import EtcdTransactionFailed, IncompatibleType, InvalidInput, JournalNotFound
from coranto.labels import CONTENT_TYPE, JSON_LINES, MESSAGE_TYPE, label_selector, label_set
from coranto.messages.json_codec import encode_json
from coranto.names import validate_journal
from coranto.publication import Ledger, publish_once
from coranto.streams.control.lifecycle import default_template
from coranto.types import JsonForm, MessageType, SyncTypeRegistry, framing_of
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto.destinations.factory import CorantoClientConfiguration

PUBLISHED: Final = "_dlt_published"
"""The folder of ledgers. No table has this name: dlt's own tables have other names."""
_CHECK_SECONDS: Final = 10.0
"""The timeout for brokers to learn of a new journal."""
_LOAD_ID: Final = "_dlt_load_id"
_KEYS: Final = ("_dlt_root_id", "_dlt_parent_id", "_dlt_id")
"""The columns that choose the journal of rows without a primary key: nested rows follow their root row."""
_ADVICE: Final = "journals keep their messages. Load into another dataset, or delete the journals (`coranto journals`)"


class CorantoJob(RunnableLoadJob):
    """The publication of one load file."""

    def run(self) -> None:
        """Publish the file, unless it was published. Raises DestinationTerminalException for rows that do not fit."""
        client = self._job_client  # The client that dlt has opened for this job, which another one created.
        assert isinstance(client, CorantoClient)
        try:
            client.publish_file(self._load_table, Path(self._file_path), self.job_file_info().file_id, self._load_id)
        except InvalidInput as error:
            raise DestinationTerminalException(f"{self.file_name()} cannot be published: {error.message}") from error


class CorantoClient(JobClientBase, WithStateSync):
    """A client of dlt's loader for one schema. Use it as a context manager, from one thread at a time."""

    config: CorantoClientConfiguration

    def __init__(self, schema: Schema, config: CorantoClientConfiguration, capabilities: Any) -> None:
        super().__init__(schema, config, capabilities)
        self._dataset = config.normalize_dataset_name(schema)
        self._root = config.root_of(self._dataset)
        self._load_id = schema.naming.normalize_identifier(_LOAD_ID)
        self._connected: tuple[SyncJournalClient, SyncTypeRegistry] | None = None

    def __enter__(self) -> Self:
        if self._connected is None:
            client = SyncJournalClient.of(self.config.client_config())
            self._connected = client, SyncTypeRegistry(client, self.config.registry)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._connected is not None:
            client, registry = self._connected
            self._connected = None
            registry.close()
            client.close()

    # -- The storage and its schema ------------------------------------------------------------------------------------

    def initialize_storage(self, truncate_tables: Iterable[str] | None = None) -> None:
        """Do nothing: journals are created with the schema. Raises DestinationTerminalException for a `refresh`."""
        self._refuse("emptied", truncate_tables or ())

    def is_storage_initialized(self) -> bool:
        return bool(self._journals(self.schema.version_table_name))

    def drop_storage(self) -> None:
        self._refuse("dropped", [self._dataset])

    def drop_tables(self, *tables: str, delete_schema: bool = True) -> None:
        self._refuse("dropped", tables)

    def should_truncate_table_before_load(self, table_name: str) -> bool:
        return False

    def verify_schema(
        self, only_tables: Iterable[str] | None = None, new_jobs: Iterable[Any] | None = None
    ) -> list[PreparedTableSchema]:
        """Check the tables of a load.

        Raises DestinationTerminalException for write_disposition `replace`, unless the setting `replace` is `append`.
        """
        tables = super().verify_schema(only_tables, new_jobs)
        for error in verify_schema_merge_disposition(self.schema, tables, self.capabilities, warnings=True):
            raise error
        replaced = sorted(table["name"] for table in tables if table["write_disposition"] == "replace")
        if replaced and self.config.replace == "refuse":
            raise DestinationTerminalException(
                f"{', '.join(replaced)}: write_disposition replace is not possible, because a journal keeps earlier "
                "rows. Use merge with a primary key, or append. Or set destination.coranto.replace to append: then "
                f"each load adds its rows, and the rows with the latest {self._load_id} are the table"
            )
        return list(tables)

    def update_stored_schema(
        self,
        only_tables: Iterable[str] | None = None,
        expected_update: Any = None,
        force: bool = False,
    ) -> Any:
        """Create the journals of tables, register their types, and record this version of the schema."""
        applied = super().update_stored_schema(only_tables, expected_update, force)
        for name in sorted(only_tables or self.schema.tables):
            own = self._load_id if name not in self.schema.dlt_table_names() else ""
            try:
                validate_journal(self._first(name))
                fields = fields_of(self._columns(self.prepare_load_table(name)), own)
                definition = MessageType(self._type(name), JsonForm(), fields, "Loaded by dlt.")
            except InvalidInput as error:
                raise DestinationTerminalException(f"table {name} cannot be loaded: {error}") from error
            journals = self._create(name)
            try:
                self._registry.extend(definition, like=journals[0])
            except (InvalidInput, IncompatibleType) as error:
                raise DestinationTerminalException(
                    f"table {name} does not fit the type {self._type(name)}, which its journals have: {error}. "
                    "Give the column another name, or load into another dataset"
                ) from error
        version = self._normalized(
            version=self.schema.version,
            engine_version=self.schema.ENGINE_VERSION,
            inserted_at=_now(),
            schema_name=self.schema.name,
            version_hash=self.schema.stored_version_hash,
            schema=json.dumps(self.schema.to_dict()),
        )
        self._record(self.schema.version_table_name, f"{self.schema.name}/{self.schema.stored_version_hash}", version)
        return applied

    # -- Loads ---------------------------------------------------------------------------------------------------------

    def create_load_job(
        self, table: PreparedTableSchema, file_path: str, load_id: str, restore: bool = False
    ) -> LoadJob:
        return CorantoJob(file_path)

    def complete_load(self, load_id: str) -> None:
        """Record that all files of a load are published."""
        load = self._normalized(
            load_id=load_id,
            schema_name=self.schema.name,
            status=0,
            inserted_at=_now(),
            schema_version_hash=self.schema.version_hash,
        )
        self._record(self.schema.loads_table_name, load_id, load)

    def publish_file(self, table: PreparedTableSchema, path: Path, file_id: str, load_id: str) -> None:
        """Publish the rows of a load file, unless it was published. Raises InvalidInput, and errors of appends."""
        columns = self._columns(table)
        primary = [name for name, column in columns.items() if column.get("primary_key")]
        keys = primary or [name for name in map(self.schema.naming.normalize_identifier, _KEYS) if name in columns][:1]

        def rows() -> Iterable[dict[str, Any]]:
            for row in rows_of(path, columns):
                row.setdefault(self._load_id, load_id)
                yield row

        self._publish(
            table["name"],
            rows(),
            f"{load_id}/{file_id}",
            lambda row: encode_json([row.get(name) for name in keys]),
        )

    def _record(self, table: str, name: str, row: Mapping[str, Any]) -> None:
        """Publish one row of dlt's own tables."""
        self._publish(table, [dict(row)], name, lambda _: b"")

    def _publish(
        self, table: str, rows: Iterable[dict[str, Any]], name: str, key: Callable[[dict[str, Any]], bytes]
    ) -> None:
        journals, framing = self._created(table), framing_of(self._registry.find(self._type(table)))
        publish_once(
            self._client,
            journals,
            rows,
            writer_id=name,
            key=key,
            framing=framing,
            ledger=self._ledger(table),
            accept_loss=self.config.accept_loss,
        )

    # -- The state -----------------------------------------------------------------------------------------------------

    def get_stored_schema(self, schema_name: str | None = None) -> StorageSchemaInfo | None:
        return self._stored_schema("schema_name", schema_name)

    def get_stored_schema_by_hash(self, version_hash: str) -> StorageSchemaInfo | None:
        return self._stored_schema("version_hash", version_hash)

    def get_stored_state(self, pipeline_name: str) -> StateInfo | None:
        """Return the last state whose load is complete. Raises DestinationUndefinedEntity if there is no dataset."""
        naming = self.schema.naming
        try:
            loads = Ledger.open(
                self._client,
                self._ledger(self.schema.loads_table_name),
                like=self._one_journal(self.schema.loads_table_name),
                accept_loss=self.config.accept_loss,
            )
            pipeline = naming.normalize_identifier("pipeline_name")
            found = newest(
                self._client,
                self._one_journal(self.schema.state_table_name),
                lambda row: row.get(pipeline) == pipeline_name and loads.find(row[self._load_id]) is not None,
            )
        except JournalNotFound as error:
            raise DestinationUndefinedEntity(f"dataset {self._root} has no complete load") from error
        if found is None:
            return None
        state = StateInfo.from_normalized_mapping(found, naming)
        state.created_at = dt.datetime.fromisoformat(found[naming.normalize_identifier("created_at")])
        return state

    def _stored_schema(self, column: str, value: str | None) -> StorageSchemaInfo | None:
        naming = self.schema.naming
        name = naming.normalize_identifier(column)
        try:
            journal = self._one_journal(self.schema.version_table_name)
            found = newest(self._client, journal, lambda row: value is None or row.get(name) == value)
        except JournalNotFound:
            return None
        if found is None:
            return None
        info = StorageSchemaInfo.from_normalized_mapping(found, naming)
        return info._replace(inserted_at=dt.datetime.fromisoformat(found[naming.normalize_identifier("inserted_at")]))

    # -- Names and journals --------------------------------------------------------------------------------------------

    @property
    def _client(self) -> SyncJournalClient:
        assert self._connected is not None, "dlt uses its clients in `with`"
        return self._connected[0]

    @property
    def _registry(self) -> SyncTypeRegistry:
        assert self._connected is not None, "dlt uses its clients in `with`"
        return self._connected[1]

    def _folder(self, table: str) -> str:
        return f"{self._root}/{table}/"

    def _first(self, table: str) -> str:
        return f"{self._folder(table)}000"

    def _ledger(self, table: str) -> str:
        return f"{self._root}/{PUBLISHED}/{table}"

    def _type(self, table: str) -> str:
        return f"{self._root}.{table}"

    def _journals(self, table: str) -> Sequence[str]:
        """Return the journals of a table. Their number never changes, so each key stays in one of them."""
        listing = self._client.list(label_selector(include=[("name:prefix", self._folder(table))]))
        return sorted(info.spec.name for info in listing.journals)

    def _one_journal(self, table: str) -> str:
        journals = self._journals(table)
        if not journals:
            raise JournalNotFound(self._first(table))
        return journals[0]

    def _create(self, table: str) -> Sequence[str]:
        """Return the journals of a table. Create them if there are none."""
        if found := self._journals(table):
            return found
        count = 1 if table in self.schema.dlt_table_names() else self.config.journals
        names = [f"{self._folder(table)}{number:03}" for number in range(count)]
        template = default_template(replication=self.config.replication, stores=self.config.stores)
        template.labels.CopyFrom(label_set({CONTENT_TYPE: JSON_LINES, MESSAGE_TYPE: self._type(table)}))
        specs = []
        for name in names:
            spec = pb.JournalSpec()
            spec.CopyFrom(template)
            spec.name, spec.flags = name, pb.JournalSpec.O_RDWR
            specs.append(spec)
        with contextlib.suppress(EtcdTransactionFailed):  # Another process created them.
            self._client.apply([pb.ApplyRequest.Change(upsert=spec) for spec in specs])
        return self._created(table)

    def _created(self, table: str) -> Sequence[str]:
        """Return the existing journals of a table. Wait for brokers that do not know them yet."""
        for wait in RetryPolicy(_CHECK_SECONDS).waits():
            if found := self._journals(table):
                return found
            time.sleep(wait)
        raise JournalNotFound(self._first(table))

    @staticmethod
    def _columns(table: PreparedTableSchema) -> Mapping[str, Mapping[str, Any]]:
        return dict(table["columns"])

    def _normalized(self, **row: Any) -> dict[str, Any]:
        return {self.schema.naming.normalize_identifier(name): value for name, value in row.items()}

    def _refuse(self, what: str, tables: Iterable[str]) -> None:
        if names := sorted(tables):
            raise DestinationTerminalException(f"{', '.join(names)} cannot be {what}: {_ADVICE}")


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat().replace("+00:00", "Z")
