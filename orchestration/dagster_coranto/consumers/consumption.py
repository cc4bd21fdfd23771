"""Runs of a Spark consumer for Dagster, and reports of their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from coranto.client.positions import heads_of
from coranto.telemetry import Log
from dagster_coranto.consumers.definition import AssetState, ConsumerSettings, SparkConsumerDefinition
from dagster_coranto.consumers.inputs import Inputs
from dagster_coranto.consumers.skipped_input import SkippedInput, SkippedInputWatch, lost_table
from dagster_coranto.instance.tags import event_tags
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.spark import SparkResource
from dagster_coranto.translation.iceberg_tables import iceberg_facts
from dagster_coranto.translation.metadata import (
    ConsumerMetadataSet,
    GroupMetadataSet,
    lag_table,
    offsets_metadata,
    vector_version,
)
from dagster_coranto.translation.sql_tables import table_facts
from dagster_coranto.translation.vectors import store_vector

if TYPE_CHECKING:
    from coranto_consumers.spark.consumer.progress import ConsumeReport
    from coranto_consumers.spark.consumer.spark_consumer import SparkConsumer


class Consumption:
    """One run of a consumer. Use `drain` or `serve`, once. `report_skipped` gets input that the run has skipped."""

    def __init__(
        self,
        definition: SparkConsumerDefinition,
        settings: ConsumerSettings,
        journals: JournalResource,
        spark: SparkResource,
        instance: dg.DagsterInstance,
        report_skipped: Callable[[SkippedInput], bool],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._definition = definition
        self._settings = settings
        self._journals = journals
        self._spark = spark
        self._monotonic = monotonic
        self._watch = SkippedInputWatch(settings.options, report_skipped, definition.report_seconds, monotonic)
        self._inputs = Inputs(definition, journals, instance)
        self._before = {group: heads_of(journals.positions(group)) for _, group in definition.outputs}

    def drain(self, log: Log) -> ConsumeReport:
        """Consume up to the heads at the start. Raises as `SparkConsumer.run_until_caught_up` does."""
        from coranto_consumers.spark.consumer.progress import show_progress

        with show_progress(log) as show:

            def update(report: ConsumeReport) -> None:
                self._watch.record(report)
                show(report)

            try:
                return self._consumer(update).run_until_caught_up()
            finally:
                self._watch.finish()

    def serve(
        self,
        emit: Callable[[AssetState], object],
        stop: Callable[[], bool],
        wait: Callable[[], object],
        log: Log,
        observe: Callable[[ConsumeReport], object] = lambda report: None,
    ) -> ConsumeReport:
        """Consume content as it is written, until `stop`. Raises as `SparkConsumer.run_until_stopped` does.

        Calls `observe` with each progress report. Calls `emit` with each asset's new state, at most every
        `report_seconds` and at the end.
        """
        latest: ConsumeReport | None = None
        emitted = 0
        due = self._monotonic()

        def update(report: ConsumeReport | None, *, now: bool = False) -> None:
            nonlocal latest, emitted, due
            if report is not None:
                observe(report)
                self._watch.record(report)
            latest = report or latest
            if latest is None or latest.transactions == emitted or (self._monotonic() < due and not now):
                return
            emitted = latest.transactions
            due = self._monotonic() + self._definition.report_seconds
            log.info(
                "Consuming", messages=latest.messages, transactions=latest.transactions, lag_bytes=latest.lag_bytes
            )
            for state in self.states(latest, count_rows=False):
                emit(state)

        def pause() -> None:
            update(None)
            wait()

        try:
            return self._consumer(update).run_until_stopped(stop, wait=pause)
        finally:
            self._watch.finish()
            update(None, now=True)

    def states(self, report: ConsumeReport, *, count_rows: bool = True) -> Iterator[AssetState]:
        """Yield the state of each asset as of the report. Counting rows reads the tables.

        Includes sources with growth that is not reported yet.
        """
        grown = list(self._inputs.record(report.offsets))
        store = self._settings.store
        if isinstance(store, str):
            store_vector(store, self._settings.application.name, report.offsets)
        for spec in self._definition.tables:
            if isinstance(store, str):
                facts = table_facts(store, spec, count_rows=count_rows)
            else:
                facts = iceberg_facts(store, spec)
            yield self._state(spec, report.offsets, {**consumer_metadata(report), **facts})
        for spec, group in self._definition.outputs:
            heads = heads_of(self._journals.positions(group))
            metadata = GroupMetadataSet(
                messages=report.published,
                transactions=report.transactions,
                bytes=sum(heads.values()) - sum(self._before[group].values()),
                head=sum(heads.values()),
                heads=offsets_metadata(heads),
                offsets_read=offsets_metadata(report.offsets),
            )
            yield self._state(spec, heads, dict(metadata))
        yield from grown
        self._inputs.next()

    def _state(self, spec: dg.AssetSpec, vector: Mapping[str, int], metadata: Mapping[str, Any]) -> AssetState:
        version = vector_version(vector)
        tags = event_tags(version.value, self._inputs.of(spec), spec.code_version)
        return AssetState(spec.key, version, metadata, tags)

    def _consumer(self, show: Callable[[ConsumeReport], None]) -> SparkConsumer:
        from coranto_consumers.spark.consumer.spark_consumer import SparkConsumer

        return SparkConsumer(
            self._settings.application,
            self._journals.client_config(),
            self._settings.store,
            self._spark.session,
            self._settings.options,
            on_progress=show,
        )


def consumer_metadata(report: ConsumeReport) -> Mapping[str, Any]:
    """Return a consumer's report as metadata of its tables."""
    return dict(
        ConsumerMetadataSet(
            messages=report.messages,
            transactions=report.transactions,
            lag_bytes=report.lag_bytes,
            published=report.published,
            misfits=report.misfits,
            lost_bytes=SkippedInput(lost=report.lost).counts["lost_bytes"],
            lost=lost_table(report.lost) if report.lost else None,
            fence=report.fence,
            offsets_read=offsets_metadata(report.offsets),
            journals=lag_table(report.offsets, report.heads),
        )
    )
