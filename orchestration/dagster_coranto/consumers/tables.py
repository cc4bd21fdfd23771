"""Tables without code as assets: a run writes all existing messages to the table, each once."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

import dagster as dg
from pydantic import Field

from coranto.client import JournalClient
from coranto.client.loop import run_blocking
from coranto.errors import CorantoError, InvalidInput
from coranto.specs.yaml_fields import dump_document
from coranto_consumers.tables.runs import RunOptions, TableReport
from coranto_consumers.tables.spec import TableNames, TableSpec, read_names, read_table
from dagster_coranto.instance.log import DagsterLog
from dagster_coranto.instance.pool_slot import PoolSlot
from dagster_coranto.instance.underway import CONSUMER_TAG
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.typed import resource_of
from dagster_coranto.translation.documents import Definitions, read_document
from dagster_coranto.translation.iceberg_tables import iceberg_facts
from dagster_coranto.translation.metadata import ConsumerMetadataSet, lag_table, offsets_metadata, vector_version
from dagster_coranto.translation.metadata_set import TableMetadata
from dagster_coranto.translation.options import AssetOptions, SpecOptions, op_options, spec_options, with_options
from dagster_coranto.translation.sql_tables import table_facts
from dagster_coranto.translation.translator import DagsterJournalTranslator, JournalTranslatorData

if TYPE_CHECKING:
    from coranto_consumers.tables.state import TableProgress

REPORT_SECONDS: Final = 30.0
T = TypeVar("T")


class TableRun(dg.Config):
    """The configuration of one run of a table."""

    accept_changes: str = Field(
        default="", description="The code that confirms a changed input or store. It is in the error's text."
    )


@dataclass(frozen=True, slots=True)
class TableDefinition:
    """A table that a file or a mapping describes. Environment variables are resolved when it runs."""

    table: Path | Mapping[str, Any]
    names: TableNames
    asset: dg.AssetSpec
    resource_key: str

    def spec(self, journals: JournalResource) -> TableSpec:
        """Return the table, with the prefix of the resource. Raises InvalidInput."""
        spec = _read(self.table, read_table)
        return replace(spec, input=spec.input.under(journals.name("")))

    def progress(self, journals: JournalResource, spec: TableSpec) -> "TableProgress":
        """Return the progress. Uses the short retry timeout of audits. Raises SqlStoreError and client errors."""

        from coranto_consumers.tables.state import progress_of

        async def ask() -> "TableProgress":
            async with JournalClient.of(journals.audit_config()) as client:
                return await progress_of(client, spec)

        return run_blocking(ask())


@dataclass(frozen=True, slots=True)
class TableStep:
    """One run of a table, for `JournalTableComponent.execute`. Use `run`, once."""

    definition: TableDefinition
    context: dg.AssetExecutionContext
    config: TableRun

    def run(self) -> Iterator[dg.MaterializeResult[None]]:
        """Write the existing messages, and yield the result of the table's asset.

        A terminated run completes its transaction. Raises dg.Failure without retries for permanent errors of
        `run_table`, and its other errors unchanged.
        """
        definition, context = self.definition, self.context
        name = definition.names.name
        with PoolSlot(context.instance, context.run.run_id, f"coranto_table_{name}", context.log.info):
            journals = resource_of(context.resources, definition.resource_key, JournalResource)
            try:
                spec = definition.spec(journals)
                report = self._write(journals, spec)
            except CorantoError as error:
                if error.permanent:
                    raise dg.Failure(str(error), allow_retries=False) from error
                raise
            progress = definition.progress(journals, spec)
            yield dg.MaterializeResult(
                asset_key=definition.asset.key,
                data_version=vector_version(progress.offsets),
                metadata=_metadata(definition.asset, spec, progress, report),
            )

    def _write(self, journals: JournalResource, spec: TableSpec) -> TableReport:
        from coranto_consumers.tables.running import run_table

        log, due = DagsterLog(self.context.log), monotonic() + REPORT_SECONDS

        def show(report: TableReport) -> None:
            nonlocal due
            if monotonic() >= due:
                due = monotonic() + REPORT_SECONDS
                log.info("Writing", messages=report.messages, transactions=report.transactions)

        options = RunOptions(once=True, on_progress=show, accept_changes=self.config.accept_changes)
        return run_table(journals.client_config(), spec, options)


def build_table_asset(
    table: Path | Mapping[str, Any],
    *,
    key: str = "",
    resource_key: str = "journals",
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    change: Callable[[dg.AssetSpec], dg.AssetSpec] = lambda spec: spec,
    execute: Callable[[dg.AssetExecutionContext, TableStep], Iterator[Any]] = lambda context, step: step.run(),
    **options: Unpack[AssetOptions],
) -> dg.AssetsDefinition:
    """Return the asset of a table. `table` is a file for `coranto table run`, or its fields.

    The asset has the name of the table, unless `key` (such as `db/orders`) is given. It depends on the asset of its
    stream, or of the folder of its journals. Names are read when this function is called. The rest, including variables
    such as `${SHOP_PASSWORD}`, is read when the asset runs. Runs wait for each other in the pool `coranto_table_NAME`,
    with the name of the table's consumer. A run ends when the messages that existed at its start are in the table. Each
    message is written once, even if runs fail. `change` may change the asset's spec. `execute` runs the step.

    Metadata: ConsumerMetadataSet, with table name, columns and row count. The data version is a digest of the offsets.
    """
    names = _read(table, read_names)
    translator = dagster_journal_translator or DagsterJournalTranslator()
    added: SpecOptions = {
        **spec_options(options),
        "kinds": {"table", *([names.store] if names.store else []), *options.get("kinds", ())},
        "tags": {CONSUMER_TAG: names.name, **options.get("tags", {})},
    }
    made = dg.AssetSpec(
        dg.AssetKey.from_user_string(key) if key else names.table.split("."),
        deps=[translator.get_asset_spec(JournalTranslatorData(names.input.folder)).key] if names.input.folder else [],
        metadata=dict(TableMetadata(table_name=names.table)),
    )
    spec = with_options(change(made), added)
    definition = TableDefinition(table, names, spec, resource_key)

    @dg.multi_asset(
        name=f"table_{names.name.replace('-', '_')}",
        specs=[spec],
        required_resource_keys={resource_key},
        **op_options(options),
    )
    def write(context: dg.AssetExecutionContext, config: TableRun) -> Iterator[Any]:
        yield from execute(context, TableStep(definition, context, config))

    return TABLES.add(write, definition)


TABLES: Final = Definitions[TableDefinition]("build_table_asset")


def _metadata(
    asset: dg.AssetSpec, spec: TableSpec, progress: "TableProgress", report: TableReport
) -> Mapping[str, Any]:
    if spec.is_iceberg:
        from coranto_consumers.stores.iceberg.urls import IcebergHome

        facts = iceberg_facts(IcebergHome.at(spec.store_url), asset)
    else:
        facts = table_facts(spec.store, asset, count_rows=False)
    last = progress.last_commit
    heads = {each.journal: each.head for each in progress.journals if each.head is not None}
    lag = ConsumerMetadataSet(
        messages=report.messages,
        transactions=report.transactions,
        lag_bytes=progress.bytes_behind,
        lag_messages=progress.messages_behind,
        last_commit=None if last is None else dg.MetadataValue.timestamp(last),
        offsets_read=offsets_metadata(progress.offsets),
        journals=lag_table(progress.offsets, heads),
    )
    return {**dict(lag), **facts, **dict(TableMetadata(row_count=progress.rows))}


def _read(table: Path | Mapping[str, Any], read: Callable[[str], T]) -> T:
    if not isinstance(table, Path):
        try:
            return read(dump_document(dict(table)))
        except InvalidInput as error:  # The line number refers to the generated text.
            line, _, problem = str(error).partition(": ")
            raise InvalidInput(problem if line.startswith("line ") else str(error), field="table") from error
    return read_document(table, read, "table")
