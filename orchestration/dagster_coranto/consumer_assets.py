"""Assets of a Spark consumer: the tables it maintains and the journals it publishes to."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from coranto.errors import Fenced
from coranto.telemetry import progress
from dagster_coranto.groups import JournalGroup
from dagster_coranto.log import DagsterLog
from dagster_coranto.metadata import offsets_metadata, offsets_text, table
from dagster_coranto.resource import JournalResource, heads_of
from dagster_coranto.spark import SparkResource
from dagster_coranto.translator import DagsterJournalTranslator, JournalTranslatorData, build_group_spec

if TYPE_CHECKING:
    from coranto_consumers.spark.application import Application
    from coranto_consumers.spark.progress import ConsumeReport

_COLUMNS = {"journal": "string", "offset": "int", "head": "int", "lag_bytes": "int"}


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The settings of one run: the application, its SQL store, and the size of transactions (0: the default)."""

    application: "Application"
    store_url: str
    max_transaction_bytes: int = 0


def build_spark_consumer_assets(
    *,
    name: str,
    settings: Callable[[dg.AssetExecutionContext], ConsumerSettings],
    sources: Iterable[JournalGroup],
    tables: Sequence[dg.AssetSpec],
    outputs: Sequence[JournalGroup] = (),
    required_resource_keys: set[str] | None = None,
    group_name: str | None = None,
    retry_policy: dg.RetryPolicy | None = None,
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
    spark_resource_key: str = "spark",
) -> dg.AssetsDefinition:
    """Return assets for the tables that a Spark consumer maintains, and for the journal groups that it publishes to.

    All of them depend on the assets of the `sources`. They are materialised together: the consumer runs until it has
    caught up with the heads that its source journals had when it began. The consumer itself gives the exactly-once
    guarantees (`coranto_consumers.spark`), so a run may be killed and started again at any time. `settings` is called
    at run time; import the application there. If another instance has fenced the consumer off, the run fails without
    retries.

    Metadata of tables: offsets read, as a vector and with lag per journal, messages, transactions, lag in bytes,
    messages published, fence. The data version of tables is the vector of offsets read. The data version of journal
    groups is the vector of heads.
    """
    translator = dagster_journal_translator or DagsterJournalTranslator()
    deps = [translator.get_asset_key(JournalTranslatorData(group.name)) for group in sources]
    table_specs = [spec.merge_attributes(deps=deps, kinds={"spark"}) for spec in tables]
    group_specs = [build_group_spec(group, translator) for group in outputs]
    journal_specs = [spec.merge_attributes(deps=deps, kinds={"spark"}) for spec in group_specs]
    if group_name is not None:
        table_specs = [spec.replace_attributes(group_name=group_name) for spec in table_specs]
        journal_specs = [spec.replace_attributes(group_name=group_name) for spec in journal_specs]

    @dg.multi_asset(
        name=name,
        specs=[*table_specs, *journal_specs],
        required_resource_keys={resource_key, spark_resource_key, *(required_resource_keys or ())},
        retry_policy=retry_policy,
        can_subset=False,
    )
    def consume(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        journals: JournalResource = getattr(context.resources, resource_key)
        spark: SparkResource = getattr(context.resources, spark_resource_key)
        before = {group: heads_of(journals.positions(group)) for group in outputs}
        report = _run_consumer(context, settings(context), journals, spark)
        for spec in table_specs:
            yield dg.MaterializeResult(
                asset_key=spec.key,
                data_version=dg.DataVersion(offsets_text(report.offsets)),
                metadata=consumer_metadata(report),
            )
        for spec, group in zip(journal_specs, outputs, strict=True):
            heads = heads_of(journals.positions(group))
            yield dg.MaterializeResult(
                asset_key=spec.key,
                data_version=dg.DataVersion(offsets_text(heads)),
                metadata={
                    "published": report.published,
                    "transactions": report.transactions,
                    "bytes": sum(heads.values()) - sum(before[group].values()),
                    "heads": offsets_metadata(heads),
                    "offsets_read": offsets_metadata(report.offsets),
                },
            )

    return consume


def _run_consumer(
    context: dg.AssetExecutionContext, settings: ConsumerSettings, journals: JournalResource, spark: SparkResource
) -> "ConsumeReport":
    from coranto_consumers.spark.consumer import DEFAULT_TRANSACTION_BYTES, SparkConsumer

    with progress("Consuming", unit="bytes", log=DagsterLog(context.log)) as bar:
        lag: int | None = None

        def show(report: "ConsumeReport") -> None:
            nonlocal lag
            bar.note(
                f"{report.messages:,} messages ({report.published:,} published), transactions: {report.transactions}"
            )
            if lag is None:
                bar.expect(report.lag_bytes)
            else:
                bar.advance(lag - report.lag_bytes)
            lag = report.lag_bytes

        consumer = SparkConsumer(
            settings.application,
            journals.client_config(),
            settings.store_url,
            spark.session,
            max_transaction_bytes=settings.max_transaction_bytes or DEFAULT_TRANSACTION_BYTES,
            on_progress=show,
        )
        try:
            return consumer.run_until_caught_up()
        except Fenced as error:
            raise dg.Failure(str(error), allow_retries=False) from error


def consumer_metadata(report: "ConsumeReport") -> Mapping[str, Any]:
    """Return a consumer's report as metadata of its tables."""
    rows: list[dict[str, str | int | float | bool | None]] = [
        {
            "journal": journal,
            "offset": report.offsets.get(journal, 0),
            "head": head,
            "lag_bytes": max(0, head - report.offsets.get(journal, 0)),
        }
        for journal, head in sorted(report.heads.items())
    ]
    return {
        "messages": report.messages,
        "transactions": report.transactions,
        "lag_bytes": report.lag_bytes,
        "published": report.published,
        "offsets_read": offsets_metadata(report.offsets),
        "journals": table(rows, _COLUMNS),
        "rows_read": report.rows,
        "fence": report.fence,
    }
