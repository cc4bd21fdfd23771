"""`coranto consumer run module:Application`: a Spark consumer as a process, until it is stopped or has caught up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import structlog
import typer
import yaml

from coranto.cli.connect import Endpoint, ended_by_sigterm, find_cluster
from coranto.client.config import DEFAULT_RETRY_TIMEOUT
from coranto.errors import InvalidInput
from coranto.specs.durations import parse_duration
from coranto.telemetry import configure_logging
from coranto_consumers.cli.arguments import Store
from coranto_consumers.cli.loading import load_here
from coranto_consumers.cli.resetting import begin_at
from coranto_consumers.positions.moves import EARLIEST

if TYPE_CHECKING:
    from coranto_consumers.spark import ConsumeReport, ConsumerOptions, SparkApplication, SparkConsumer

_MEMBERS: Final = ("name", "sources", "value_schema", "outputs")

_log = structlog.get_logger(__name__)


def run(
    application: Annotated[str, typer.Argument(metavar="module:Application")],
    store: Store,
    spark_master: Annotated[
        str | None,
        typer.Option(
            "--spark-master",
            envvar="CORANTO_SPARK_MASTER",
            help="Master of the Spark session. Default: local[2], or the master of spark-submit.",
            show_default=False,
        ),
    ] = None,
    spark_conf: Annotated[
        list[str] | None,
        typer.Option("--spark-conf", metavar="NAME=VALUE", help="Setting of the Spark session. May be repeated."),
    ] = None,
    trigger_interval: Annotated[
        str,
        typer.Option(
            "--trigger-interval",
            help="Minimum time between two transactions of a consumer that has caught up, such as 10s.",
        ),
    ] = "0s",
    until_caught_up: Annotated[
        bool, typer.Option("--until-caught-up", help="Process all current messages, and exit.")
    ] = False,
    start: Annotated[
        str,
        typer.Option(
            "--start",
            help="First position of a new consumer: `earliest`, `latest`, a time or offsets, as for "
            "`coranto consumer reset --to`.",
        ),
    ] = EARLIEST,
    retry_timeout: Annotated[
        str | None,
        typer.Option(
            "--retry-timeout",
            help="Exit when a store or broker has been unavailable for this time, such as 10m. Default: 10m with "
            "--until-caught-up, else without a limit.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Option of the consumer, with a value as in YAML, such as max_transaction_bytes=67108864. "
            "May be repeated.",
        ),
    ] = None,
    metrics_port: Annotated[
        int, typer.Option(help="Port for Prometheus metrics, on all interfaces; 0: none.", min=0, max=65535)
    ] = 0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")] = False,
    endpoint: Endpoint = None,
) -> None:
    """Run a Spark consumer until it is stopped.

    APPLICATION is `module:name`: a coranto_consumers.spark.SparkApplication, or a class or function that returns one.
    Modules of the current folder are found too. At SIGTERM or an interrupt, the consumer completes its transaction and
    exits with 0. The exit code is 1 after an error, and when another instance of the same name has started.
    """
    configure_logging(log_level, json_lines=log_json)
    made = load_spark_application(application)
    options = consumer_options(settings or (), trigger_interval, retry_timeout)
    conf = _pairs(spark_conf or (), "--spark-conf")
    config = replace(find_cluster(endpoint), retry_timeout=DEFAULT_RETRY_TIMEOUT)
    begin_at(made.name, start, store, made.sources, endpoint)

    from coranto_consumers.spark import SparkConsumer, SparkConsumerMetrics
    from coranto_consumers.spark.session.sessions import start_session

    metrics = SparkConsumerMetrics(made.name)
    if metrics_port:
        _serve(metrics_port, metrics.registry)
    session = start_session(made.name, spark_master, conf)
    try:
        consumer = SparkConsumer(made, config, store, session, options, on_progress=metrics.observe)
        _log.info("consumer.run_began", consumer=made.name, until="caught up" if until_caught_up else "stopped")
        if until_caught_up:
            with ended_by_sigterm():
                report = consumer.run_until_caught_up()
        else:
            report = _run_until_stopped(consumer, math.inf if retry_timeout is None else options.retry_timeout)
    finally:
        session.stop()
    _log.info(
        "consumer.run_ended",
        consumer=made.name,
        transactions=report.transactions,
        messages=report.messages,
        published=report.published,
    )


def load_spark_application(target: str) -> SparkApplication:
    """Load the application `module:name`: an instance, or a class or function that returns one without arguments.

    Modules of the current folder are found too. Raises InvalidInput.
    """
    made: Any = load_here(target)
    if missing := [name for name in _MEMBERS if not hasattr(made, name)]:
        advice = (
            "it is an application of shards, so use `coranto consumer serve`"
            if hasattr(made, "new_store")
            else "see coranto_consumers.spark.SparkApplication"
        )
        raise InvalidInput(f"{target} is not a SparkApplication: it has no {missing[0]}; {advice}", field="application")
    application: SparkApplication = made
    return application


def consumer_options(settings: Sequence[str], trigger_interval: str, retry_timeout: str | None) -> ConsumerOptions:
    """Return the options of a consumer. Raises InvalidInput."""
    from coranto_consumers.spark import ConsumerOptions

    given: dict[str, object] = {}
    for name, text in _pairs(settings, "--set").items():
        try:
            given[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InvalidInput(f"{name}: {text!r} is not YAML", field="--set") from error
    for name, option in (("min_transaction_seconds", "--trigger-interval"), ("retry_timeout", "--retry-timeout")):
        if name in given:
            raise InvalidInput(f"{name} is given by {option}; leave it out", field="--set")
    given["min_transaction_seconds"] = _seconds(trigger_interval, "--trigger-interval")
    if retry_timeout is not None:
        given["retry_timeout"] = _seconds(retry_timeout, "--retry-timeout")
    return ConsumerOptions.of(given)


def _run_until_stopped(consumer: SparkConsumer, retry_timeout: float) -> ConsumeReport:
    from coranto_consumers.spark import StopOnSignals

    with StopOnSignals() as stop:
        return consumer.run_until_stopped(stop, wait=stop.wait, retry_timeout=retry_timeout)


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidInput(f"{text!r} is not of the form NAME=VALUE", field=option)
        pairs[name] = value
    return pairs


def _seconds(text: str, option: str) -> float:
    try:
        return parse_duration(text).ToNanoseconds() / 1e9
    except InvalidInput as error:
        raise InvalidInput(error.message, field=option) from error


def _serve(port: int, registry: Any) -> None:
    from prometheus_client import start_http_server

    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        raise InvalidInput(f"port {port} cannot be used: {error.strerror}", field="--metrics-port") from error
