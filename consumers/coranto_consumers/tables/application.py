"""A table as an application of a shard, without Java."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from coranto.messages.framing import DEFAULT_UUID_POINTER
from coranto.types.definitions import JsonForm
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.columns import Columns, MessageBatch
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.merge import MergePlan, Replace, plan_merge
from coranto_consumers.stores.sql_shard import SqlShardStore
from coranto_consumers.tables.columns import TableLayout, arrow_columns, sql_table
from coranto_consumers.tables.rows import JournalRows, last_rows, table_rows
from coranto_consumers.tables.spec import DELETED


class TableApplication(Application[Store]):
    """Writes the messages of one shard to a table. Create an instance for each run of the shard."""

    def __init__(self, layout: TableLayout, require_latest: Callable[[], None] = lambda: None) -> None:
        """`require_latest` is called before a transaction commits, after its messages were read."""
        spec = layout.spec
        self._layout = layout
        self._require_latest = require_latest
        self._table = sql_table(layout)
        self._parts: list[JournalRows] = []
        self._delete = DELETED if spec.operation is not None else ""
        self._rules = {name: Replace() for name in layout.names if name not in spec.key}
        self._plan: MergePlan | None = None
        if spec.key:
            columns = [*layout.names, *([DELETED] if self._delete else [])]
            self._plan = plan_merge(self._table, columns, spec.key, self._rules, self._delete)
        form = JsonForm() if layout.version is None else layout.version.definition.form
        pointer = form.uuid_pointer if isinstance(form, JsonForm) else DEFAULT_UUID_POINTER
        misfits = MisfitPolicy.NULLS if spec.keeps_misfits else MisfitPolicy.FAIL
        self._columns: Final = Columns(arrow_columns(layout.messages), pointer, misfits)

    def new_store(self, shard: Shard) -> Store:
        spec = self._layout.spec
        if not spec.is_iceberg:
            return SqlShardStore(spec.store, self._table)
        from coranto_consumers.stores.iceberg import IcebergShardStore
        from coranto_consumers.stores.iceberg.urls import IcebergHome

        home = IcebergHome.at(spec.store_url)
        return IcebergShardStore(home.catalog, home.table, keys=spec.key, delete=self._delete)

    def new_message(self, journal: pb.JournalSpec) -> Columns:
        return self._columns

    def consume_batch(self, shard: Shard, store: Any, batch: MessageBatch, publisher: ShardPublisher) -> None:
        rows = table_rows(batch.rows, self._layout.names, self._layout.spec.operation)
        if self._plan is not None:
            self._parts.append(JournalRows(batch.journal, rows))
        elif isinstance(store, SqlShardStore):
            store.insert_batch(self._table, rows)
        else:
            store.append(rows)

    def finalize_txn(self, shard: Shard, store: Any, publisher: ShardPublisher) -> None:
        self._require_latest()
        parts, self._parts = self._parts, []
        if self._plan is None or not parts:
            return
        spec = self._layout.spec
        rows = last_rows(spec, self._plan, parts)
        if not isinstance(store, SqlShardStore):
            store.append(rows)
            return
        for batch in rows.to_batches():
            store.merge_batch(self._table, batch, spec.key, self._rules, self._delete)
