"""An IO manager for records and tables in journals. Outputs are exactly once, and inputs are committed messages."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from coranto.client import SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.client.groups import JournalGroup
from coranto.client.heads import Heads
from coranto.errors import InvalidInput, JournalNotFound
from coranto.messages.framing import JsonLines
from coranto.telemetry import amount
from dagster_coranto.instance.tags import PARENT_RUN, RESUMES
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.sql_store import SqlStoreResource
from dagster_coranto.translation.metadata import GroupMetadataSet, JournalMetadataSet, namespaced, offsets_metadata

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

KEY_METADATA = "dagster-coranto/key_field"
"""The name of an asset's metadata for the record field that selects the journal. Equal values stay in order."""
_META = "_meta"
_DEFAULT_INPUT_BYTES = 1 << 30


class JournalIOManager(dg.ConfigurableIOManager):
    """Stores assets in journals, as JSON messages.

    An asset's journals are the group in its metadata `dagster-coranto/journal`, or else the group named by its key. A
    step may return an iterable of mappings, a pyarrow Table or a pandas DataFrame; each record becomes one message. A
    transaction publishes the messages, and commits with a row in the SQL store. So an output is stored exactly once,
    even if the step, or a run that resumes this one, retries it. Without the metadata `dagster-coranto/key_field` an
    output goes to one journal, in order.

    The row is deleted `keep_outputs_days` after its output was committed. Outputs of runs that began before that time
    are rejected.

    An input is a list of records, or a `pyarrow.Table` or `pandas.DataFrame` if the parameter has that type. It has
    every committed message up to the current heads, in order within each journal. `max_input_bytes` limits the step's
    memory; use a Spark consumer for more.
    """

    journals: JournalResource
    store: SqlStoreResource
    max_input_bytes: int = Field(
        default=_DEFAULT_INPUT_BYTES, gt=0, description="Reject inputs with more bytes of journal content."
    )
    keep_outputs_days: int = Field(
        default=90, gt=0, description="Days to remember committed outputs. Outputs of older runs are rejected."
    )

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Publish the output, unless it is committed already.

        Raises JournalNotFound for a group without journals, and InvalidInput if its run began before the oldest
        remembered output.
        """
        from coranto_consumers.outputs.log import OutputLog
        from coranto_consumers.outputs.publishing import publish_output

        group = group_of(context.asset_key, context.definition_metadata)
        run_id, began = first_run(context)
        log = OutputLog(self.store.store(), keep_days=self.keep_outputs_days)
        with self.journals.client() as client:
            heads = _heads_of(client, self.journals.group(group))
            done = publish_output(
                client,
                log,
                records_of(obj),
                list(heads),
                output=output_id(context, run_id),
                asset=context.asset_key.to_user_string(),
                began=began,
                key=context.definition_metadata.get(KEY_METADATA),
            )
            after = _heads_of(client, self.journals.group(group))
        metadata = GroupMetadataSet(
            messages=done.messages,
            bytes=sum(after.values()) - sum(heads.values()),
            head=sum(after.values()),
            heads=offsets_metadata(after),
        )
        context.add_output_metadata({**dict(metadata), "dagster/row_count": done.messages})

    def load_input(self, context: dg.InputContext) -> Any:
        """Return the committed messages. Raises InvalidInput for more than `max_input_bytes`."""
        metadata = context.upstream_output.definition_metadata if context.upstream_output is not None else {}
        group = self.journals.group(group_of(context.asset_key, metadata))
        with self.journals.client() as client:
            heads = client.heads(group.selector).all_known()
            self._require_size(group, heads)
            records = [
                without_meta(envelope.message)
                for each in heads
                for envelope in committed_messages(client, each.journal, JsonLines(), begin=each.begin, end=each.head)
            ]
        read = {each.journal: each.offset for each in heads}
        context.add_input_metadata(namespaced({"offsets_read": offsets_metadata(read)}))
        return as_type(records, context.dagster_type.typing_type)

    def _require_size(self, group: JournalGroup, heads: Heads) -> None:
        size = sum(each.head - each.begin for each in heads)
        if size > self.max_input_bytes:
            raise InvalidInput(
                f"journals {group.name}/… hold {amount(size, 'bytes')}, and an input may have {self.max_input_bytes} "
                "bytes; raise max_input_bytes, or consume them with Spark",
                field="max_input_bytes",
            )


def group_of(key: dg.AssetKey, metadata: Mapping[str, Any]) -> JournalGroup:
    """Return the group of journals of an asset."""
    return JournalGroup(JournalMetadataSet.extract(metadata).journal or "/".join(key.path))


def first_run(context: dg.OutputContext) -> tuple[str, float]:
    """Return the id and the creation time (Unix seconds) of the first run that this run resumes, or of this run."""
    instance, run = context.step_context.instance, context.step_context.dagster_run
    run_id = run.run_id
    while run.tags.get(RESUMES) == "true" and (parent := run.tags.get(PARENT_RUN)):
        run_id = parent
        found = instance.get_run_by_id(parent)
        if found is None:
            break
        run = found
    record = instance.get_run_record_by_id(run.run_id)
    return run_id, record.create_timestamp.timestamp() if record is not None else time.time()


def output_id(context: dg.OutputContext, run_id: str) -> str:
    """Return the identity of an output: equal for all attempts to write it, in its run and in runs that resume it."""
    partition = f"/{context.partition_key}" if context.has_asset_partitions else ""
    return f"{run_id}/{context.asset_key.to_user_string()}{partition}"


def records_of(obj: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the records of an output. Raises InvalidInput for an output without records."""
    if obj is None:
        return
    if hasattr(obj, "to_pylist") and hasattr(obj, "schema"):  # A pyarrow Table or RecordBatch.
        yield from obj.to_pylist()
    elif hasattr(obj, "to_dict") and hasattr(obj, "columns"):  # A pandas DataFrame.
        yield from obj.to_dict(orient="records")
    elif isinstance(obj, Iterable) and not isinstance(obj, str | bytes | Mapping):
        yield from _checked(obj)
    else:
        raise InvalidInput(f"an output is records, a pyarrow Table or a DataFrame, not a {type(obj).__name__}")


def _checked(records: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for index, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise InvalidInput(f"record {index} of the output is a {type(record).__name__}, not a mapping")
        yield record


def as_type(records: list[dict[str, Any]], kind: Any) -> "list[dict[str, Any]] | pa.Table | pd.DataFrame":
    """Convert records to the type of a step's parameter."""
    module, _, name = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}".rpartition(".")
    if module.startswith("pyarrow") and name == "Table":
        import pyarrow as pa

        return pa.Table.from_pylist(records)
    if module.startswith("pandas") and name == "DataFrame":
        import pandas as pd

        return pd.DataFrame.from_records(records)
    return records


def without_meta(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the fields that its publisher added."""
    return {name: value for name, value in message.items() if name != _META}


def _heads_of(client: SyncJournalClient, group: JournalGroup) -> dict[str, int]:
    heads = client.heads(group.selector)
    if not len(heads):
        raise JournalNotFound(f"no journal {group.name}/… exists")
    return {each.journal: each.offset for each in heads.all_known()}
