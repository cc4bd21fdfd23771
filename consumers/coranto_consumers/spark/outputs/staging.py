"""Staging and publishing of an application's outputs. They take effect only if the transaction commits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, BooleanType, MapType, StructField, StructType, VariantType
from sqlalchemy import Connection, Table

from coranto.client import SyncJournalClient
from coranto.errors import InvalidInput
from coranto.messages.uuids import ProducerId
from coranto.security.tokens import Capability
from coranto_consumers.journals.discovery import list_journals
from coranto_consumers.spark.application.outputs import JournalOutput, TableOutput
from coranto_consumers.spark.outputs.tasks import PUBLISHED, PublishTask
from coranto_consumers.spark.session.access import for_tasks
from coranto_consumers.spark.session.sessions import described
from coranto_consumers.spark.sink.message_rows import is_encodable, require_text_keys
from coranto_consumers.spark.sink.producer_ids import ReleasedIds, Use
from coranto_consumers.stores.merge import MergePlan, merge_staged, plan_merge
from coranto_consumers.stores.staged_sql import StagedSql
from coranto_consumers.stores.staging import merge_in_transaction, write_in_transaction

EXACT: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Options of Spark's JSON writer for microseconds. By default it writes milliseconds."""


CARRIED_TO_APPEND: Final = 8 << 20
"""The maximum bytes of rows that one of the first tasks returns ("carries") to the driver, which then writes them."""
CARRIED_TO_MERGE: Final = 1 << 20
"""The limit for rows with keys, which must be staged in any case. Tasks stage many rows faster, in parallel.

On PostgreSQL, the limit is `CARRIED_TO_APPEND`: staging in a temporary table takes a third of the time.
"""


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that are ready to be merged: in a stage table, or in `carried`."""

    plan: MergePlan
    stage: Table
    owner: tuple[str, int, str]
    """The values of `STAGE_COLUMNS` for rows that `merge` stages."""
    attempts: tuple[str, ...]
    """The winning attempts whose rows are in the stage table."""
    rows: int
    carried: tuple[bytes, ...] = ()
    """Other rows, as Arrow streams."""
    sql: StagedSql | None = None

    def merge(self, connection: Connection) -> None:
        """Merge the rows, or run SQL statements on them. Carried rows to append are written directly to their table."""
        attempts, rows = self.attempts, self.rows
        is_appended = not self.plan.keys and self.sql is None
        if self.plan.keys and not attempts and self.sql is None and connection.dialect.name == "postgresql":
            merge_in_transaction(connection, self.plan, *chain.from_iterable(map(_batches, self.carried)))
            return
        for stream in self.carried:
            for batch in _batches(stream):
                if is_appended:
                    write_in_transaction(connection, self.plan.table, batch)
                else:
                    write_in_transaction(connection, self.stage, batch, self.owner)
                    rows += batch.num_rows
        if self.carried and not is_appended:
            attempts = (*attempts, self.owner[-1])
        if self.sql is not None:
            self.sql.run(connection, self.stage, attempts, rows)
        else:
            merge_staged(connection, self.plan, self.stage, attempts, rows)


def _batches(stream: bytes) -> Any:
    return pa.ipc.open_stream(pa.BufferReader(stream))


@dataclass(frozen=True, slots=True)
class Published:
    """Messages that are pending in their journals, and the acknowledgements that commit them, by journal."""

    intents: dict[str, bytes] = field(default_factory=dict)
    messages: int = 0
    rollbacks: dict[str, bytes] = field(default_factory=dict)
    uses: tuple[Use, ...] = ()


def plan_of(output: TableOutput) -> MergePlan:
    """Return the merge plan for the rows of an output. Raises InvalidInput if they do not fit the table."""
    table = table_of(output)
    plan = plan_merge(table, output.rows.columns, output.keys, output.merge, output.delete)
    require_deletes(output, table.name)
    return plan


def table_of(output: TableOutput) -> Table:
    """Return the table of an output for a SQL store. Raises InvalidInput for features that only `IcebergStore` has."""
    if isinstance(output.table, str):
        raise InvalidInput("a table in SQL needs its definition: a Table of SQLAlchemy", field=f"table {output.table}")
    if output.overwrite:
        raise InvalidInput(
            "tables in SQL have no partitions to overwrite; use keys to replace rows",
            field=f"table {output.table.name}",
        )
    return output.table


def require_deletes(output: TableOutput, name: str) -> None:
    """Raise InvalidInput if the column that marks rows to delete is not a BOOLEAN."""
    if output.delete and not isinstance(kind := output.rows.schema[output.delete].dataType, BooleanType):
        raise InvalidInput(
            f"{output.delete!r} is {kind.simpleString()}, and must be BOOLEAN to mark rows to delete: cast it",
            field=f"table {name}",
        )


def can_carry(plan: MergePlan) -> bool:
    """Return True if writing rows directly into a plan's table has the same result as a merge.

    A merge is a SQLAlchemy statement: it sets defaults of other columns, and rejects values for generated columns.
    """
    others = [column for name, column in plan.table.c.items() if name not in plan.columns]
    own = [plan.table.c[name] for name in plan.columns]
    return not any(each.default is not None for each in others) and all(
        each.identity is None and each.computed is None for each in own
    )


def publish_journal_outputs(
    outputs: Sequence[JournalOutput], client: SyncJournalClient, ids: ReleasedIds | None = None
) -> Published:
    """Publish the messages of outputs as pending, under producer ids of `ids`, or new ones. Raises InvalidInput."""
    intents: defaultdict[str, bytes] = defaultdict(bytes)
    rollbacks: defaultdict[str, bytes] = defaultdict(bytes)
    uses: dict[ProducerId, Use] = {}
    messages = 0
    pool = (ids or ReleasedIds()).pool()
    for output in outputs:
        found = list_journals(client, output.journals, field="journal output")
        journals = tuple(info.name for info in found)
        messages_of, fields = _keys_and_values(output, keyed=len(journals) > 1)
        access = for_tasks(client.config, Capability.APPEND, journals)
        task = PublishTask(access, journals, output.mapping, pool, fields)
        shown = output.journals if isinstance(output.journals, str) else ", ".join(output.journals)
        with described(output.rows.sparkSession, f"publishes messages to {shown}"):
            won = messages_of.mapInArrow(task, PUBLISHED).collect()
        for row in won:
            intents[row.journal] += bytes(row.intent)
            rollbacks[row.journal] += bytes(row.rollback)
            messages += row.messages
            uses[ProducerId(bytes(row.producer))] = Use(ProducerId(bytes(row.producer)), row.token, row.clock)
    return Published(dict(intents), messages, dict(rollbacks), tuple(uses.values()))


def _keys_and_values(output: JournalOutput, *, keyed: bool) -> tuple[DataFrame, tuple[StructField, ...] | None]:
    """Return the rows' keys and values, and the fields that tasks encode as JSON: None if Spark encodes the values."""
    rows = output.rows
    wanted = {"key", "value"} if keyed and output.mapping != "random" else {"value"}
    if missing := sorted(wanted - set(rows.columns)):
        raise InvalidInput(f"the rows have no column {missing[0]!r}; add it", field="journal output")
    value, kind = F.col("value"), rows.schema["value"].dataType
    key = (F.col("key") if "key" in rows.columns else F.lit(None)).cast(BinaryType()).alias("key")
    if isinstance(kind, StructType) and is_encodable(kind):
        return rows.select(key, value), tuple(kind.fields)
    if isinstance(kind, StructType | MapType | VariantType):
        require_text_keys(kind, "value", field="journal output")
        value = F.to_json(value, dict(EXACT))
    return rows.select(key, value.cast("string").alias("value")), None
