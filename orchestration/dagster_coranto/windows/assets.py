"""Tables of a Spark consumer with windows of offsets as partitions, and the sensor that adds the partitions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from time import time
from typing import TYPE_CHECKING, Any, Unpack

import dagster as dg

from coranto.client.groups import JournalGroup
from coranto.errors import CorantoError, Fenced, InvalidInput
from coranto.fragments.windows import DEFAULT_MAX_WINDOWS, DEFAULT_WINDOW_BYTES, Window
from coranto.offsets import JournalOffset
from dagster_coranto.consumers.definition import ConsumerSettings
from dagster_coranto.instance.requests import Requests
from dagster_coranto.instance.tags import PARTITION
from dagster_coranto.instance.underway import Target, backfill_under_way, runs_under_way
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.spark import SparkResource
from dagster_coranto.resources.sql_store import SqlStoreResource
from dagster_coranto.resources.typed import initialize_resource, resource_arguments, resource_of, resource_parameters
from dagster_coranto.translation.metadata import WindowMetadataSet, offsets_metadata, table, vector_version
from dagster_coranto.translation.options import (
    AssetOptions,
    SpecOptions,
    op_options,
    spec_options,
    with_deps,
    with_options,
)
from dagster_coranto.translation.sql_tables import table_facts
from dagster_coranto.translation.translator import DagsterJournalTranslator, build_group_spec
from dagster_coranto.translation.vectors import store_vector
from dagster_coranto.windows.pools import materialize_exclusively, slot_factory

if TYPE_CHECKING:
    from coranto_consumers.spark.consumer.windows import WindowReport
    from coranto_consumers.stores.windows import KnownWindow

_COLUMNS = {"journal": "string", "begin": "int", "end": "int", "bytes": "int"}


@dataclass(frozen=True, slots=True)
class WindowedConsumer:
    """A consumer by windows: its assets, and the arguments of `build_window_sensor`.

    `windows` is an external asset between the sources and the tables: the windows themselves. The sensor reports each
    of them once, with its offsets and the time of its content. The content of a window never changes, so its rows stay
    up to date while the journals grow.
    """

    name: str
    assets: dg.AssetsDefinition
    windows: dg.AssetSpec
    partitions_def: dg.DynamicPartitionsDefinition
    sources: tuple[JournalGroup, ...]
    tables: tuple[dg.AssetSpec, ...]


def build_windowed_consumer(
    *,
    name: str,
    settings: Callable[..., ConsumerSettings],
    sources: Iterable[JournalGroup],
    tables: Sequence[dg.AssetSpec],
    required_resource_keys: Set[str] = frozenset(),
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
    spark_resource_key: str = "spark",
    execute: "Callable[[dg.AssetExecutionContext, WindowStep], Iterator[Any]]" = lambda context, step: step.run(),
    **options: Unpack[AssetOptions],
) -> WindowedConsumer:
    """Return assets for tables that a Spark consumer fills by windows. Add both `assets` and `windows`.

    Each partition is a window: fixed ranges of offsets of the `sources`, made of whole stored fragments. Materialising
    it reads exactly these bytes and replaces the window's rows, in one SQL transaction. So repeating it changes
    nothing. It shares neither checkpoints nor rows with continuous consumers of the same journals. A backfill over
    partitions launches a run for each.

    `settings` is as for `spark_consumer_assets`, and `execute` runs the step. The application returns tables only, each
    with the column `coranto_window` (BIGINT NOT NULL, part of its key), which the run fills. Its name and its selector
    are not used.

    Runs of one window take turns, however they were launched: a later one waits until the earlier one has ended, and
    then replaces the rows again. They wait in pools of Dagster (`windows.pools`).

    `build_window_sensor` adds partitions as journals grow. A run of a merged partition materialises the larger window.
    Metadata: WindowMetadataSet, and facts of the table. The data version is a digest of the window's offsets.
    """
    sources = tuple(sources)
    if options.get("partitions_def") is not None or options.get("backfill_policy") is not None:
        raise InvalidInput(
            "the partitions of a consumer by windows are its windows, with a run for each; leave the option out",
            field="partitions_def" if options.get("partitions_def") is not None else "backfill_policy",
        )
    partitions = dg.DynamicPartitionsDefinition(name=f"coranto_{name}_windows")
    shown = ", ".join(f"{group.name}/…" for group in sources)
    windows = dg.AssetSpec(
        ["windows", name],
        deps=[build_group_spec(group, dagster_journal_translator).key for group in sources],
        description=f"Windows of {shown}: each partition has fixed ranges of offsets, and the time of their content.",
        kinds={"journal"},
        group_name=options.get("group_name"),
        partitions_def=partitions,
    )
    added: SpecOptions = {**spec_options(options), "kinds": {"spark", *options.get("kinds", ())}}
    specs = tuple(
        with_deps(with_options(spec, added), [windows.key]).replace_attributes(partitions_def=partitions)
        for spec in tables
    )

    @dg.multi_asset(
        name=name,
        specs=specs,
        required_resource_keys={
            resource_key,
            spark_resource_key,
            *required_resource_keys,
            *resource_parameters(settings),
        },
        can_subset=True,
        **op_options(options),
    )
    def materialize_window(context: dg.AssetExecutionContext) -> Iterator[Any]:
        yield from execute(context, WindowStep(name, settings, specs, context, resource_key, spark_resource_key))

    return WindowedConsumer(name, materialize_window, windows, partitions, sources, specs)


@dataclass(frozen=True, slots=True)
class WindowStep:
    """A run of one window, for `SparkConsumerComponent.execute`. Use `run`, once."""

    name: str
    settings: Callable[..., ConsumerSettings]
    specs: Sequence[dg.AssetSpec]
    context: dg.AssetExecutionContext
    resource_key: str
    spark_resource_key: str

    def run(self) -> Iterator[dg.MaterializeResult[None]]:
        """Replace the window's rows, and yield a result for each requested table.

        The other tables of the consumer change as well, and are reported by events. Raises dg.Failure if a later run of
        the window has started.
        """
        from coranto_consumers.spark.consumer.windows import WindowConsumer

        context = self.context
        chosen = self.settings(context, **resource_arguments(self.settings, context.resources))
        consumer = WindowConsumer(
            chosen.application,
            resource_of(context.resources, self.resource_key, JournalResource).client_config(),
            chosen.database_url,
            resource_of(context.resources, self.spark_resource_key, SparkResource).session,
            chosen.options,
            name=self.name,
        )
        try:
            report = materialize_exclusively(consumer, context.partition_key, slot_factory(context))
        except Fenced as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        window = report.window
        store_offsets(chosen.database_url, self.name, window)
        if window.name != context.partition_key:
            context.log.info(f"Window {context.partition_key} was merged into {window.name}, which was read.")
        for spec in self.specs:
            facts = table_facts(chosen.database_url, spec, count_rows=False)
            metadata = {**window_metadata(window, report), **facts}
            if window.name != context.partition_key:
                context.instance.report_runless_asset_event(_event(spec.key, window, metadata))
            if spec.key in context.selected_asset_keys:
                yield dg.MaterializeResult(asset_key=spec.key, data_version=window_version(window), metadata=metadata)
            elif window.name == context.partition_key:
                context.log_event(_event(spec.key, window, metadata))


def build_window_sensor(
    consumer: WindowedConsumer,
    *,
    journals: JournalResource,
    store: SqlStoreResource,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    max_windows: int = DEFAULT_MAX_WINDOWS,
    launch: bool = False,
    name: str = "",
    minimum_interval_seconds: int = 60,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """Return a sensor that adds a partition for about each `window_bytes` of stored content, and merges old partitions.

    It reports each new window as a partition of `consumer.windows`, with the time of its content.

    There are at most `max_windows` partitions. A merged partition, such as `00000009-00000016`, counts as materialised
    if all of its parts are. The windows are stored in the SQL store, so another Dagster home sees the same windows.

    With `launch` a run is requested for each window that is not materialised, the oldest first, while fewer than
    `DEFAULT_NEW_WINDOWS` runs of the consumer, and no backfill of it, are under way. Failed runs are retried after a
    backoff that doubles with each failure, up to half an hour. A run that was never created is requested again
    immediately. A canceled run is not: materialise its window yourself, or reset the sensor's cursor.
    """
    sensor_name = name or f"{consumer.name}__window_sensor"

    @dg.sensor(
        name=sensor_name,
        asset_selection=dg.AssetSelection.assets(consumer.assets),
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=f"Adds and merges windows of {consumer.name}.",
    )
    def window_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        from coranto_consumers.stores.sql import SqlStore
        from coranto_consumers.stores.window_growth import grow, stored_times
        from coranto_consumers.stores.windows import WindowLog

        cluster, url = initialize_resource(journals), initialize_resource(store).url_with_password()
        existing = set(context.instance.get_dynamic_partitions(_name_of(consumer.partitions_def)))
        try:
            with cluster.client() as client:
                known = grow(
                    WindowLog(SqlStore(url), consumer.name),
                    client,
                    [cluster.group(group).selector for group in consumer.sources],
                    window_bytes=window_bytes,
                    max_windows=max_windows,
                )
                times = stored_times(client, [each.window for each in known if each.window.name not in existing])
        except Fenced as error:
            return dg.SkipReason(str(error))  # Another daemon has changed the windows first.
        for each in known:
            if each.materialized is not None and each.window.name not in existing:
                store_offsets(url, consumer.name, each.window)
        waiting = [each.window.name for each in known if each.materialized is None]
        return partitions_result(
            consumer,
            known,
            existing,
            times,
            requested_runs(context, consumer, sensor_name, waiting, minimum_interval_seconds) if launch else [],
        )

    return window_sensor


def requested_runs(
    context: dg.SensorEvaluationContext,
    consumer: WindowedConsumer,
    sensor: str,
    windows: Iterable[str],
    interval_seconds: float,
) -> list[dg.RunRequest]:
    """Return requests of runs for windows that are not materialised and have no run under way."""
    from coranto_consumers.stores.window_growth import DEFAULT_NEW_WINDOWS

    keys = {spec.key for spec in consumer.tables}
    if backfill_under_way(context.instance, keys):
        return []
    repository = context.repository_def
    runs = runs_under_way(context.instance, repository, Target(keys, None)) if repository is not None else []
    busy = {run.tags.get(PARTITION) for run in runs}
    purposes = {f"{consumer.name}/{window}": window for window in windows if window not in busy}
    requests = Requests(context, sensor)
    due = [
        purpose
        for purpose, history in requests.histories(purposes).items()
        if (at := history.due(interval_seconds)) is not None and at <= time()
    ]
    free = max(0, DEFAULT_NEW_WINDOWS - len(runs))
    return [requests.request(purpose, partition_key=purposes[purpose]) for purpose in due[:free]]


def partitions_result(
    consumer: WindowedConsumer,
    known: "Sequence[KnownWindow]",
    existing: Set[str],
    times: Mapping[str, tuple[float, float]],
    runs: Sequence[dg.RunRequest],
) -> dg.SensorResult | dg.SkipReason:
    """Return the changes that align Dagster's partitions, now `existing`, with the SQL store.

    `times` has the stored times of the new windows, by name.
    """
    names = {each.window.name for each in known}
    added = [each for each in known if each.window.name not in existing]
    gone = sorted(existing - names)
    if not added and not gone and not runs:
        return dg.SkipReason("No window was added.")
    requests: list[Any] = []
    if added:
        requests.append(consumer.partitions_def.build_add_request([each.window.name for each in added]))
    if gone:
        requests.append(consumer.partitions_def.build_delete_request(gone))
    return dg.SensorResult(
        dynamic_partitions_requests=requests,
        asset_events=[
            _event(spec.key, each.window, window_metadata(each.window, stored=times.get(each.window.name)))
            for each in added
            for spec in (consumer.windows, *(consumer.tables if each.materialized is not None else ()))
        ],
        run_requests=list(runs),
    )


def window_version(window: Window) -> dg.DataVersion:
    """Return the data version of a window's rows: equal for equal bytes."""
    begins = {f"{journal}@": span.begin for journal, span in window.spans.items()}
    return vector_version({**begins, **{journal: span.end for journal, span in window.spans.items()}})


def window_metadata(
    window: Window, report: "WindowReport | None" = None, stored: tuple[float, float] | None = None
) -> dict[str, Any]:
    """Return the metadata of a window's materialisation. `stored` has the begin and end of its content's time."""
    spans = sorted(window.spans.items())
    return dict(
        WindowMetadataSet(
            window=window.name,
            stored_from=dg.MetadataValue.timestamp(stored[0]) if stored is not None else None,
            stored_until=dg.MetadataValue.timestamp(stored[1]) if stored is not None else None,
            messages=report.messages if report is not None else None,
            misfits=report.misfits if report is not None else None,
            fence=report.fence if report is not None else None,
            bytes=window.length,
            offsets_from=offsets_metadata({name: JournalOffset(at.begin, at.journal_id) for name, at in spans}),
            offsets_read=offsets_metadata({name: JournalOffset(at.end, at.journal_id) for name, at in spans}),
            journals=table(
                [{"journal": name, "begin": at.begin, "end": at.end, "bytes": at.length} for name, at in spans],
                _COLUMNS,
            ),
        )
    )


def store_offsets(store_url: str, consumer: str, window: Window) -> None:
    """Store a window's offsets if they are too many for metadata. Raises SqlStoreError."""
    spans = window.spans.items()
    begins = {journal: span.begin for journal, span in spans}
    ends = {journal: JournalOffset(span.end, span.journal_id) for journal, span in spans}
    store_vector(store_url, consumer, ends, begins)


def _event(key: dg.AssetKey, window: Window, metadata: dict[str, Any]) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        asset_key=key,
        partition=window.name,
        metadata=metadata,
        tags={"dagster/data_version": window_version(window).value},
    )


def _name_of(partitions: dg.DynamicPartitionsDefinition) -> str:
    if partitions.name is None:
        raise CorantoError("the partitions of a consumer by windows have a name")
    return partitions.name
