"""Writing of an application's outputs. They count only if the transaction commits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructType, VariantType
from sqlalchemy import Connection, Table

from coranto.client import SyncJournalClient
from coranto.errors import InvalidInput
from coranto.messages.uuids import ProducerId
from coranto.security.tokens import Capability
from coranto_consumers.spark.access import for_tasks
from coranto_consumers.spark.application import JournalOutput, TableOutput
from coranto_consumers.spark.discovery import find_journals
from coranto_consumers.spark.producer_ids import SettledIds, Use
from coranto_consumers.spark.tasks import PUBLISHED, STAGED, PublishTask, StageTask
from coranto_consumers.stores.merge import MergePlan, merge_staged, plan_merge
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.staging import stage_of

EXACT: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Options of Spark's writer of JSON, which writes milliseconds otherwise."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that are ready in a stage table."""

    plan: MergePlan
    stage: Table
    attempts: tuple[str, ...]
    """The attempts that Spark declared successful."""
    rows: int

    def merge(self, connection: Connection) -> None:
        """Merge the rows into their table. Raises like `merge_staged`."""
        merge_staged(connection, self.plan, self.stage, self.attempts, self.rows)


@dataclass(frozen=True, slots=True)
class Published:
    """Messages that are pending in their journals, and the acknowledgements that commit them, by journal."""

    intents: dict[str, bytes] = field(default_factory=dict)
    messages: int = 0
    rollbacks: dict[str, bytes] = field(default_factory=dict)
    """The acknowledgements that drop the messages instead."""
    uses: tuple[Use, ...] = ()
    """The uses of producer ids, by the attempts that Spark declared successful."""


def stage_table_output(output: TableOutput, store: SqlStore, shard: str, fence: int) -> Staged:
    """Stage the rows of an output. Raises InvalidInput when they do not fit the table."""
    plan = plan_merge(output.table, output.rows.columns, output.keys, output.merge)
    stage = stage_of(store, plan)
    task = StageTask(store.url, stage, shard, fence)
    won = output.rows.mapInArrow(task, STAGED).collect()
    return Staged(plan, stage, tuple(row.attempt for row in won), sum(row.rows for row in won))


def publish_journal_outputs(
    outputs: Sequence[JournalOutput], client: SyncJournalClient, ids: SettledIds | None = None
) -> Published:
    """Publish the messages of outputs as pending. Raises InvalidInput for missing journals or columns.

    Tasks may use the producer ids of `ids` again; without it, each uses a new one.
    """
    intents: defaultdict[str, bytes] = defaultdict(bytes)
    rollbacks: defaultdict[str, bytes] = defaultdict(bytes)
    uses: dict[ProducerId, Use] = {}
    messages = 0
    pool = (ids or SettledIds()).pool()
    for output in outputs:
        journals = find_journals(client, output.journals, field="journal output")
        task = PublishTask(for_tasks(client.config, Capability.APPEND, journals), journals, output.mapping, pool)
        won = _keys_and_values(output, keyed=len(journals) > 1).mapInArrow(task, PUBLISHED).collect()
        for row in won:
            intents[row.journal] += bytes(row.intent)
            rollbacks[row.journal] += bytes(row.rollback)
            messages += row.messages
            uses[ProducerId(bytes(row.producer))] = Use(ProducerId(bytes(row.producer)), row.token, row.clock)
    return Published(dict(intents), messages, dict(rollbacks), tuple(uses.values()))


def _keys_and_values(output: JournalOutput, *, keyed: bool) -> DataFrame:
    rows = output.rows
    wanted = {"key", "value"} if keyed and output.mapping != "random" else {"value"}
    if missing := sorted(wanted - set(rows.columns)):
        raise InvalidInput(f"the rows have no column {missing[0]!r}; add it", field="journal output")
    value, kind = F.col("value"), rows.schema["value"].dataType
    if isinstance(kind, StructType | MapType | VariantType):
        _require_json_type(kind, "value")
        value = F.to_json(value, dict(EXACT))
    key = F.col("key") if "key" in rows.columns else F.lit(None)
    return rows.select(key.cast(BinaryType()).alias("key"), value.cast("string").alias("value"))


def _require_json_type(kind: DataType, place: str) -> None:
    """Raise InvalidInput for a type that would not arrive in a message as it left."""
    match kind:
        case StructType():
            for field in kind.fields:
                _require_json_type(field.dataType, f"{place}.{field.name}")
        case ArrayType():
            _require_json_type(kind.elementType, f"{place}[]")
        case MapType():
            if not isinstance(kind.keyType, StringType):
                raise InvalidInput(
                    f"{place} is {kind.simpleString()}, and names in JSON are texts: cast its keys to STRING, or write "
                    "its entries as an array of structs (map_entries)",
                    field="journal output",
                )
            _require_json_type(kind.valueType, f"{place}{{}}")
