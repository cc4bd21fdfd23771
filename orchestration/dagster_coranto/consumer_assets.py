"""Assets of a Spark consumer: the tables it maintains and the journals it publishes to."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import dagster as dg

from coranto.errors import Fenced
from coranto.telemetry import progress
from dagster_coranto.groups import JournalGroup
from dagster_coranto.log import DagsterLog
from dagster_coranto.metadata import JournalRow, offsets_metadata, table, vector_version
from dagster_coranto.options import AssetOptions, SpecOptions, filled, op_options, spec_options, with_deps
from dagster_coranto.resource import JournalResource, heads_of
from dagster_coranto.spark import SparkResource
from dagster_coranto.translator import DagsterJournalTranslator, build_group_spec
from dagster_coranto.typed_resources import resource_arguments, resource_of, resource_parameters

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
    settings: Callable[..., ConsumerSettings],
    sources: Iterable[JournalGroup],
    tables: Sequence[dg.AssetSpec],
    outputs: Sequence[JournalGroup] = (),
    required_resource_keys: Set[str] = frozenset(),
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
    spark_resource_key: str = "spark",
    **options: Unpack[AssetOptions],
) -> dg.AssetsDefinition:
    """Return assets for the tables that a Spark consumer maintains, and for the journal groups that it publishes to.

    All of them depend on the assets of the `sources`. They are materialised together: the consumer runs until it has
    caught up with the heads that its source journals had when it began. The consumer itself gives the exactly-once
    guarantees (`coranto_consumers.spark`), so a run may be killed and started again at any time. `settings` is called
    at run time, with Dagster's context, and with a resource for each further parameter that is annotated with a
    resource's class; import the application there. If another instance has fenced the consumer off, the run fails
    without retries.

    The translator's specs are honoured in every field, and those of `tables`, too; see AssetOptions for what options
    add. Metadata of tables: offsets read, as a vector and with lag per journal, messages, transactions, lag in bytes,
    messages published, fence. The data version of tables is a digest of the offsets read. The data version of journal
    groups is a digest of their heads.
    """
    deps = [build_group_spec(group, dagster_journal_translator).key for group in sources]
    added: SpecOptions = {**spec_options(options), "kinds": {"spark", *options.get("kinds", ())}}
    table_specs = [with_deps(filled(spec, added), deps) for spec in tables]
    group_specs = [
        with_deps(filled(build_group_spec(group, dagster_journal_translator), added), deps) for group in outputs
    ]

    @dg.multi_asset(
        name=name,
        specs=[*table_specs, *group_specs],
        required_resource_keys={
            resource_key,
            spark_resource_key,
            *required_resource_keys,
            *resource_parameters(settings),
        },
        can_subset=False,
        **op_options(options),
    )
    def consume(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        journals = resource_of(context.resources, resource_key, JournalResource)
        spark = resource_of(context.resources, spark_resource_key, SparkResource)
        chosen = settings(context, **resource_arguments(settings, context.resources))
        before = {group: heads_of(journals.positions(group)) for group in outputs}
        report = _run_consumer(context, chosen, journals, spark)
        for spec in table_specs:
            yield dg.MaterializeResult(
                asset_key=spec.key,
                data_version=vector_version(report.offsets),
                metadata=consumer_metadata(report),
            )
        for spec, group in zip(group_specs, outputs, strict=True):
            heads = heads_of(journals.positions(group))
            yield dg.MaterializeResult(
                asset_key=spec.key,
                data_version=vector_version(heads),
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
    rows: list[JournalRow] = [
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
