"""Assets of a Spark consumer: the tables it maintains and the journals it publishes to."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from time import monotonic, sleep
from typing import Unpack

import dagster as dg
from pydantic import Field

from coranto.client.groups import JournalGroup
from coranto.errors import Fenced, InvalidInput
from dagster_coranto.consumers.consumption import Consumption
from dagster_coranto.consumers.definition import (
    ConsumerMode,
    ConsumerSettings,
    SparkConsumerDefinition,
    remember_consumer,
)
from dagster_coranto.consumers.left_out import LeftOut, report_left_out
from dagster_coranto.instance.log import DagsterLog
from dagster_coranto.instance.one_at_a_time import OneAtATime
from dagster_coranto.instance.underway import CONSUMER_TAG
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.spark import SparkResource
from dagster_coranto.resources.typed import resource_arguments, resource_of, resource_parameters
from dagster_coranto.translation.options import AssetOptions, SpecOptions, filled, op_options, spec_options, with_deps
from dagster_coranto.translation.translator import DagsterJournalTranslator, build_group_spec

_IDLE_SECONDS = 1.0


class ConsumerRun(dg.Config):
    """The configuration of one run of a consumer."""

    mode: str = Field(
        default="", description="drain: until caught up. service: until stopped. Empty: as the consumer is defined."
    )
    for_seconds: float = Field(
        default=0, ge=0, description="End a service by itself after so many seconds; 0: never. Then it succeeds."
    )

    def mode_or(self, default: ConsumerMode) -> ConsumerMode:
        """Return the mode. Raises InvalidInput for an unknown one."""
        try:
            return ConsumerMode(self.mode) if self.mode else default
        except ValueError:
            known = " or ".join(mode.value for mode in ConsumerMode)
            raise InvalidInput(f"{self.mode!r} is no mode of a consumer; write {known}", field="mode") from None


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
    mode: ConsumerMode = ConsumerMode.DRAIN,
    report_seconds: float = 30.0,
    **options: Unpack[AssetOptions],
) -> dg.AssetsDefinition:
    """Return assets for the tables that a Spark consumer maintains, and for the journal groups that it publishes to.

    All of them depend on the assets of the `sources`. They are materialised together. In the mode DRAIN a run goes on
    until it has caught up with the heads that its source journals had when it began. In the mode SERVICE it goes on
    until it is terminated, or for as long as its configuration says, and reports materialisations at most every
    `report_seconds`. The consumer itself gives the exactly-once guarantees (`coranto_consumers.spark`), so a run may be
    killed and started again at any time.

    Runs wait for one another in the pool `coranto_` and the name, however they were launched. Its limit is one, unless
    you set another one in Dagster; `pool` adds a pool of yours. If two run nevertheless, the SQL store's fence shuts
    out the earlier one, whose run fails without retries.

    What the consumer goes on without is in the metadata and the run's log: dead letters, and content that was gone.
    `build_left_out_check` makes the check that tells of it until somebody accepts it.

    `settings` is called at run time, with Dagster's context, and with a resource for each further parameter that is
    annotated with a resource's class; import the application there.

    All fields of the translator's specs take effect, as do those of `tables`; see AssetOptions for what options add.
    Metadata: ConsumerMetadataSet for tables, with table name, columns and row count if the store has the table;
    GroupMetadataSet for journal groups. The data version of tables is a digest of the offsets read, and that of journal
    groups a digest of their heads.
    """
    sources = tuple(sources)
    deps = [build_group_spec(group, dagster_journal_translator).key for group in sources]
    added: SpecOptions = {
        **spec_options(options),
        "kinds": {"spark", *options.get("kinds", ())},
        "tags": {CONSUMER_TAG: name, **options.get("tags", {})},
    }
    definition = SparkConsumerDefinition(
        name=name,
        settings=settings,
        sources=sources,
        tables=tuple(with_deps(filled(spec, added), deps) for spec in tables),
        outputs=tuple(
            (with_deps(filled(build_group_spec(group, dagster_journal_translator), added), deps), group)
            for group in outputs
        ),
        mode=mode,
        report_seconds=report_seconds,
        resource_key=resource_key,
        spark_resource_key=spark_resource_key,
    )

    @dg.multi_asset(
        name=name,
        specs=[*definition.tables, *(spec for spec, _ in definition.outputs)],
        required_resource_keys={
            resource_key,
            spark_resource_key,
            *required_resource_keys,
            *resource_parameters(settings),
        },
        can_subset=False,
        **op_options(options),
    )
    def consume(context: dg.AssetExecutionContext, config: ConsumerRun) -> Iterator[dg.MaterializeResult[None]]:
        chosen = config.mode_or(mode)
        log = DagsterLog(context.log)
        with OneAtATime(context.instance, context.run.run_id, f"coranto_{name}", context.log.info):
            consumption = Consumption(
                definition,
                settings(context, **resource_arguments(settings, context.resources)),
                resource_of(context.resources, resource_key, JournalResource),
                resource_of(context.resources, spark_resource_key, SparkResource),
                partial(_warn, context, definition),
            )
            try:
                if chosen is ConsumerMode.DRAIN:
                    report = consumption.drain(log)
                else:
                    end = monotonic() + config.for_seconds if config.for_seconds else float("inf")
                    report = consumption.serve(
                        lambda state: context.log_event(state.as_event()),
                        lambda: monotonic() >= end,
                        lambda: sleep(_IDLE_SECONDS),
                        log,
                    )
            except Fenced as error:
                raise dg.Failure(str(error), allow_retries=False) from error
            for state in consumption.states(report):
                yield state.as_result()

    remember_consumer(consume, definition)
    return consume


def _warn(context: dg.AssetExecutionContext, definition: SparkConsumerDefinition, new: LeftOut) -> bool:
    """Tell in the run, and by the assets' checks, what the consumer went on without."""
    context.log.warning(f"{definition.name} went on without {new}.")
    report_left_out(context.instance, definition, new)
    return True
