"""Dagster's definitions of the flights pipeline: specs → flights/events → carrier_delays and flights/alerts.

Loading them imports neither Spark nor pandas, and needs no cluster. The cluster is looked up when assets run.
"""

from datetime import timedelta

import dagster as dg

from coranto.client.groups import JournalGroup
from coranto.telemetry import progress
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_flights.names import TABLE, TREE, consumer_name
from dagster_coranto.consumers.assets import spark_consumer_assets
from dagster_coranto.consumers.definition import ConsumerSettings
from dagster_coranto.consumers.polling_sensor import build_journal_polling_sensor
from dagster_coranto.flights.config import FlightsConfig, FlightsStore, store_url
from dagster_coranto.instance.log import DagsterLog
from dagster_coranto.journals.assets import Publication, PublishContext, journal_assets
from dagster_coranto.observation.journals import build_journal_observation_sensor
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.spark import SparkResource
from dagster_coranto.specs.journals import build_journal_specs_asset
from dagster_coranto.verification.checks import build_fragment_check

EVENTS = JournalGroup("flights/events")
ALERTS = JournalGroup("flights/alerts")
GROUP = "flights"

journal_specs = build_journal_specs_asset(TREE, group_name=GROUP)


@journal_assets(
    EVENTS,
    deps=[journal_specs],
    required_resource_keys={"flights"},
    group_name=GROUP,
    freshness_policy=dg.FreshnessPolicy.time_window(fail_window=timedelta(days=1)),
)
def flight_events(context: PublishContext) -> Publication:
    """Flights that left New York in 2013, one message each, partitioned by tail number. Publishing again adds none."""
    from coranto_flights.data import load_flights
    from coranto_flights.publish import FlightsPublisher

    settings: FlightsConfig = context.dagster.resources.flights
    flights = load_flights(settings.limit)
    with progress("Publishing flights", unit="flights", log=DagsterLog(context.dagster.log)) as report:
        done = FlightsPublisher(context.client, context.journals).publish(flights, report)
    return Publication(
        messages=done.flights,
        metadata={
            "transactions": done.transactions,
            "batches_appended_twice": done.repeated_batches,
            "flights_rolled_back": done.rolled_back,
        },
    )


def consumer_settings(context: dg.AssetExecutionContext) -> ConsumerSettings:
    """Return the flights' application with the settings of the run's resources."""
    from coranto_flights.application import CarrierDelays

    journals: JournalResource = context.resources.journals
    settings: FlightsConfig = context.resources.flights
    return ConsumerSettings(
        CarrierDelays(journals.prefix, settings.table),
        settings.store_url or store_url(journals.located_data_dir()),
        ConsumerOptions(max_transaction_bytes=settings.max_transaction_bytes),
    )


flight_consumer = spark_consumer_assets(
    name="consume_flights",
    sources=[EVENTS],
    tables=[
        dg.AssetSpec(
            TABLE, kinds={"sql"}, description="Flights, cancellations and arrival delays by carrier and month."
        )
    ],
    outputs=[ALERTS],
    required_resource_keys={"flights"},
    group_name=GROUP,
)(consumer_settings)

flights_job = dg.define_asset_job(
    "flights", selection=dg.AssetSelection.all(), description="Everything: specs, flights, delays and alerts, checks."
)
consume_job = dg.define_asset_job(
    "consume_flights_job",
    selection=dg.AssetSelection.assets(*flight_consumer.keys),
    description="Process the new content of the journals.",
)

JOURNALS = JournalResource()

# Stopped by default: a run starts a JVM, so the user of the UI should decide to start it.
flights_sensor = build_journal_polling_sensor(
    journals=JOURNALS,
    group=EVENTS,
    job=consume_job,
    default_sensor_status=dg.DefaultSensorStatus.STOPPED,
)

# The growth of the journals, also by writers outside Dagster, and the consumer's lag.
flights_observation = build_journal_observation_sensor(
    journals=JOURNALS,
    groups=[EVENTS, ALERTS],
    consumers={consumer_name(""): FlightsStore()},
    name="flights_observation_sensor",
    report_seconds=25.0,
)

defs = dg.Definitions(
    assets=[journal_specs, flight_events, flight_consumer],
    asset_checks=[build_fragment_check(EVENTS), build_fragment_check(ALERTS)],
    jobs=[flights_job, consume_job],
    sensors=[flights_sensor, flights_observation],
    resources={"journals": JOURNALS, "flights": FlightsConfig(), "spark": SparkResource(short=True, early=True)},
    # One Spark session serves a run, so its steps share a process.
    executor=dg.in_process_executor,
)
