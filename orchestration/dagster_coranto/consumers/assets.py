"""Assets of a Spark consumer: the tables it maintains and the journals it publishes to."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Unpack

import dagster as dg
from pydantic import Field

from coranto.client.groups import JournalGroup
from coranto.errors import Fenced, InvalidInput
from dagster_coranto.consumers.consumption import Consumption
from dagster_coranto.consumers.definition import (
    ConsumerMode,
    ConsumerSettings,
    SparkConsumerDefinition,
    register_consumer,
)
from dagster_coranto.consumers.skipped_input import SkippedInput, report_skipped_input
from dagster_coranto.instance.log import DagsterLog
from dagster_coranto.instance.pool_slot import PoolSlot
from dagster_coranto.instance.underway import CONSUMER_TAG
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.spark import SparkResource
from dagster_coranto.resources.typed import resource_arguments, resource_of, resource_parameters
from dagster_coranto.translation.options import (
    AssetOptions,
    SpecOptions,
    op_options,
    spec_options,
    with_deps,
    with_options,
)
from dagster_coranto.translation.translator import DagsterJournalTranslator, build_group_spec

_IDLE_SECONDS = 1.0


class ConsumerRun(dg.Config):
    """The configuration of one run of a consumer."""

    mode: str = Field(
        default="", description="drain: until caught up. service: until stopped. Empty: the consumer's default."
    )
    for_seconds: float = Field(
        default=0, ge=0, description="End a service successfully after this many seconds; 0: never."
    )

    def mode_or(self, default: ConsumerMode) -> ConsumerMode:
        """Return the mode. Raises InvalidInput for an unknown mode."""
        try:
            return ConsumerMode(self.mode) if self.mode else default
        except ValueError:
            known = " or ".join(mode.value for mode in ConsumerMode)
            raise InvalidInput(f"{self.mode!r} is not a mode of a consumer; write {known}", field="mode") from None


@dataclass(frozen=True, slots=True)
class ConsumerStep:
    """One run of a consumer, for `SparkConsumerComponent.execute`. Use `run`, once."""

    definition: SparkConsumerDefinition
    context: dg.AssetExecutionContext
    config: ConsumerRun

    def run(self) -> Iterator[dg.MaterializeResult[None]]:
        """Consume, and yield a result for each requested asset.

        A consumer's tables and journals change together, so assets that were not requested are reported by events.
        Raises dg.Failure when another instance of the consumer has started, and the errors of `SparkConsumer`.
        """
        definition, context = self.definition, self.context
        mode = self.config.mode_or(definition.mode)
        log = DagsterLog(context.log)
        with PoolSlot(context.instance, context.run.run_id, f"coranto_{definition.name}", context.log.info):
            consumption = Consumption(
                definition,
                definition.settings(context, **resource_arguments(definition.settings, context.resources)),
                resource_of(context.resources, definition.resource_key, JournalResource),
                resource_of(context.resources, definition.spark_resource_key, SparkResource),
                context.instance,
                self._warn,
            )
            try:
                if mode is ConsumerMode.DRAIN:
                    report = consumption.drain(log)
                else:
                    end = monotonic() + self.config.for_seconds if self.config.for_seconds else float("inf")
                    report = consumption.serve(
                        lambda state: context.log_event(state.as_event()),
                        lambda: monotonic() >= end,
                        lambda: sleep(_IDLE_SECONDS),
                        log,
                    )
            except Fenced as error:
                raise dg.Failure(str(error), allow_retries=False) from error
            for state in consumption.states(report):
                if state.key in context.selected_asset_keys:
                    yield state.as_result()
                else:
                    context.log_event(state.as_event())

    def _warn(self, new: SkippedInput) -> bool:
        """Report skipped input in the run's log, and in the assets' checks."""
        self.context.log.warning(f"{self.definition.name} continued without {new}.")
        report_skipped_input(self.context.instance, self.definition, new)
        return True


def spark_consumer_assets(
    *,
    sources: Iterable[JournalGroup],
    tables: Sequence[dg.AssetSpec],
    outputs: Sequence[JournalGroup] = (),
    name: str | None = None,
    required_resource_keys: Set[str] = frozenset(),
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
    spark_resource_key: str = "spark",
    mode: ConsumerMode = ConsumerMode.DRAIN,
    report_seconds: float = 30.0,
    execute: Callable[[dg.AssetExecutionContext, ConsumerStep], Iterator[Any]] = lambda context, step: step.run(),
    **options: Unpack[AssetOptions],
) -> Callable[[Callable[..., ConsumerSettings]], dg.AssetsDefinition]:
    """Turn a function that returns a Spark consumer's settings into the consumer's assets.

    The assets are the consumer's tables and the journal groups that it publishes to. All of them depend on the assets
    of the `sources`. The function is called when a run begins, with Dagster's context, and with a resource for each
    other parameter that is annotated with a resource's class; import the application there. `name` is the consumer's
    name in Dagster, by default the function's. `execute` runs the step.

    A run always does all of the consumer's work. If it was requested for some of the assets, it reports
    materialisations of the others as events. In the mode DRAIN, a run ends when it reaches the heads that its source
    journals had at its start. In the mode SERVICE, it ends when it is terminated, or after the time in its
    configuration, and reports materialisations at most every `report_seconds`. The consumer itself gives the
    exactly-once guarantees (`coranto_consumers.spark`), so a run may be killed and restarted at any time.

    Runs of the consumer wait for each other in the pool `coranto_NAME`, however they were launched. The pool's limit is
    one, unless you set another limit in Dagster; `pool` adds another pool. If two runs overlap anyway, the SQL store's
    fence stops the earlier run, which fails without retries.

    Dead letters and lost content are in the metadata and the run's log. `build_left_out_check` returns a check that
    fails for them until a person accepts them.

    All fields of the specs of `tables` and of the translator take effect; AssetOptions describes the effect of options.
    Metadata: ConsumerMetadataSet for tables, with table name, columns and row count if the store has the table;
    GroupMetadataSet for journal groups. The data version of a table is a digest of the offsets read, and a journal
    group's is a digest of its heads. A run that has read its sources up to their heads reports their growth, if nothing
    else has, so that Dagster shows the assets as up to date.
    """
    read = tuple(sources)
    source_keys = tuple(build_group_spec(group, dagster_journal_translator).key for group in read)

    def decorate(settings: Callable[..., ConsumerSettings]) -> dg.AssetsDefinition:
        consumer = name or settings.__name__
        added: SpecOptions = {
            **spec_options(options),
            "kinds": {"spark", *options.get("kinds", ())},
            "tags": {CONSUMER_TAG: consumer, **options.get("tags", {})},
        }
        definition = SparkConsumerDefinition(
            name=consumer,
            settings=settings,
            sources=read,
            source_keys=source_keys,
            tables=tuple(with_deps(with_options(spec, added), source_keys) for spec in tables),
            outputs=tuple(
                (
                    with_deps(with_options(build_group_spec(group, dagster_journal_translator), added), source_keys),
                    group,
                )
                for group in outputs
            ),
            mode=mode,
            report_seconds=report_seconds,
            resource_key=resource_key,
            spark_resource_key=spark_resource_key,
        )

        @dg.multi_asset(
            name=consumer,
            # All of them change together, but a run may be requested for some of them.
            specs=definition.specs,
            required_resource_keys={
                resource_key,
                spark_resource_key,
                *required_resource_keys,
                *resource_parameters(settings),
            },
            can_subset=True,
            **op_options(options),
        )
        def consume(context: dg.AssetExecutionContext, config: ConsumerRun) -> Iterator[Any]:
            yield from execute(context, ConsumerStep(definition, context, config))

        register_consumer(consume, definition)
        return consume

    return decorate
