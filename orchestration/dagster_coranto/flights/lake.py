"""The flights pipeline with the Iceberg table of all flights: the definitions of `coranto demo run --lake`."""

import dagster as dg

from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_flights.names import LAKE
from dagster_coranto.consumers.assets import spark_consumer_assets
from dagster_coranto.consumers.definition import ConsumerSettings
from dagster_coranto.flights import definitions
from dagster_coranto.flights.config import FlightsConfig
from dagster_coranto.resources.journals import JournalResource


def lake_settings(context: dg.AssetExecutionContext) -> ConsumerSettings:
    """Return the application that copies flights into the lake, with the settings of the run's resources."""
    from coranto_flights.lake import FlightsIntoLake, lake_store

    journals: JournalResource = context.resources.journals
    settings: FlightsConfig = context.resources.flights
    return ConsumerSettings(
        FlightsIntoLake(journals.prefix, settings.table),
        lake_store(journals.located_data_dir(), settings.table),
        ConsumerOptions(max_transaction_bytes=settings.max_transaction_bytes),
    )


flights_lake = spark_consumer_assets(
    name="consume_flights_into_lake",
    sources=[definitions.EVENTS],
    tables=[dg.AssetSpec(LAKE, kinds={"iceberg"}, description="Every flight, in an Iceberg table.")],
    required_resource_keys={"flights"},
    group_name=definitions.GROUP,
)(lake_settings)

defs = dg.Definitions.merge(definitions.defs, dg.Definitions(assets=[flights_lake]))
