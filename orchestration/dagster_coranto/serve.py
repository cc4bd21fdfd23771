"""A consumer process outside of Dagster's runs: `python -m dagster_coranto.serve -m my_project.definitions [CONSUMER]`.

The process consumes until it is interrupted, and reports materialisations without runs to $DAGSTER_HOME's instance. Use
it for a consumer that needs low latency at all times, under a supervisor such as systemd or Kubernetes. Turn the
consumer's polling sensor off while the process runs: otherwise the process and the sensor's runs fence each other off.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Annotated

import dagster as dg
import structlog
import typer
from dagster.components.definitions import LazyDefinitions
from prometheus_client import CollectorRegistry, start_http_server
from sqlalchemy.exc import SQLAlchemyError

from coranto.client.retry import Retry, RetryPolicy
from coranto.errors import ClusterError, CommitOutcomeUnknown, CorantoError, Fenced, InvalidInput
from coranto.telemetry import configure_logging
from coranto_consumers.spark import SparkConsumerMetrics, StopOnSignals
from coranto_consumers.stopping import Stop
from dagster_coranto.consumers.consumption import Consumption
from dagster_coranto.consumers.definition import AssetState, SparkConsumerDefinition, consumer_of
from dagster_coranto.consumers.skipped_input import SkippedInput, report_skipped_input
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.spark import SparkResource
from dagster_coranto.resources.typed import resource_arguments, resource_of

_IDLE_SECONDS = 1.0

_log = structlog.get_logger(__name__)


def load_repository(module: str) -> dg.RepositoryDefinition:
    """Load the definitions of a module: its `dg.Definitions`, a function that returns them, or its assets.

    Raises InvalidInput for a module with several `dg.Definitions`.
    """
    loaded = importlib.import_module(module)
    found = [each for each in vars(loaded).values() if isinstance(each, dg.Definitions | LazyDefinitions)]
    if len(found) > 1:
        raise InvalidInput(f"{module} has {len(found)} objects with definitions; leave one of them", field="module")
    made = found[0] if found else dg.load_definitions_from_module(loaded)
    return (made if isinstance(made, dg.Definitions) else made()).get_repository_def()


def serve(
    repository: dg.RepositoryDefinition,
    name: str,
    instance: dg.DagsterInstance,
    stop: Stop,
    registry: CollectorRegistry | None = None,
) -> None:
    """Run a consumer until `stop` returns True, through outages of brokers and stores. `registry` gets its metrics.

    Raises Fenced when another instance has started, and InvalidInput if no consumer has that name.
    """
    assets = repository.assets_defs_by_key
    definition = consumer_of(list(dict.fromkeys(assets.values())), name)
    required = assets[definition.keys[0]].required_resource_keys - {"io_manager"}
    metrics = SparkConsumerMetrics(definition.name, registry)
    resources = {key: value for key, value in repository.get_top_level_resources().items() if key in required}
    retry = Retry(RetryPolicy(seed=int.from_bytes(os.urandom(8))))
    with dg.build_resources(resources, instance=instance) as bound:
        while not stop():
            try:
                _serve_once(definition, bound, instance, stop, metrics)
                retry.progressed()
            except CorantoError as error:
                if not (error.retriable or isinstance(error, CommitOutcomeUnknown | ClusterError)):
                    raise
                now = time.monotonic()
                pause = retry.failed(now)
                assert pause is not None  # The policy has no timeout.
                if retry.is_report_due(now):
                    _log.warning(
                        "dagster.consuming_interrupted",
                        consumer=definition.name,
                        error=str(error),
                        failures=retry.failures,
                    )
                stop.wait(pause)


def _serve_once(
    definition: SparkConsumerDefinition,
    resources: object,
    instance: dg.DagsterInstance,
    stop: Stop,
    metrics: SparkConsumerMetrics,
) -> None:
    by_name = {key: getattr(resources, key) for key in resources._asdict()}  # type: ignore[attr-defined]
    context = dg.build_asset_context(resources=by_name, instance=instance)
    settings = definition.settings(context, **resource_arguments(definition.settings, resources))
    journals = resource_of(resources, definition.resource_key, JournalResource)
    spark = resource_of(resources, definition.spark_resource_key, SparkResource)

    def emit(state: AssetState) -> None:
        try:
            instance.report_runless_asset_event(state.as_event())
        except (dg.DagsterError, SQLAlchemyError, OSError) as error:
            # Consuming does not need Dagster's database. The next report includes this state.
            _log.warning("dagster.materialisation_not_reported", asset=state.key.to_user_string(), error=str(error))

    def warn(new: SkippedInput) -> bool:
        _log.warning("dagster.input_left_out", consumer=definition.name, what=str(new))
        try:
            report_skipped_input(instance, definition, new)
        except (dg.DagsterError, SQLAlchemyError, OSError) as error:
            _log.warning("dagster.left_out_not_reported", consumer=definition.name, error=str(error))
            return False
        return True

    Consumption(definition, settings, journals, spark, instance, warn).serve(
        emit, stop, lambda: stop.wait(_IDLE_SECONDS), _log, metrics.observe
    )


def run(
    module: Annotated[str, typer.Option("--module-name", "-m", help="Python module of the Dagster definitions.")],
    consumer: Annotated[str, typer.Argument(help="The consumer's name; not needed if there is only one.")] = "",
    metrics_port: Annotated[
        int, typer.Option(help="Port for Prometheus metrics, on all interfaces; 0: none.", min=0, max=65535)
    ] = 0,
) -> None:
    """Run a Spark consumer outside of Dagster's runs, until interrupted.

    The exit code is 1 when another instance of the consumer has fenced this one off, or when it cannot start.
    """
    configure_logging("info")
    try:
        with StopOnSignals() as stop, dg.DagsterInstance.get() as instance:
            _log.info("dagster.consuming_begun", module=module, consumer=consumer or "(the only one)")
            registry = CollectorRegistry()
            if metrics_port:
                start_http_server(metrics_port, registry=registry)
            serve(load_repository(module), consumer, instance, stop, registry)
    except Fenced as error:
        typer.echo(f"Another instance of the consumer has started: {error}", err=True)
        raise typer.Exit(1) from None
    except CorantoError as error:
        typer.echo(f"The consumer has ended: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    typer.run(run)
