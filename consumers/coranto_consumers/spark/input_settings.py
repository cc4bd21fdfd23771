"""The settings of a consumer's input, and the reader that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from coranto.client import ClientConfig
from coranto_consumers.spark.application import Application
from coranto_consumers.spark.consumer_options import ConsumerOptions
from coranto_consumers.spark.dead_letters import policy_of
from coranto_consumers.spark.frames import parse_schema
from coranto_consumers.spark.inputs import InputReader


@dataclass(frozen=True, slots=True)
class InputSettings:
    """The settings of a consumer's input.

    `spark` may be a function that starts a session; `name` is that of the consumer.
    """

    application: Application
    client: ClientConfig
    spark: SparkSession | Callable[[], SparkSession]
    options: ConsumerOptions
    name: str

    def reader(self) -> InputReader:
        """Return the reader of the input. Starts the session if there is none yet."""
        return InputReader(
            self.spark() if callable(self.spark) else self.spark,
            self.client,
            parse_schema(self.application.value_schema),
            self.options.max_partition_bytes,
            misfits=policy_of(self.options.misfits),
            framing=self.options.chosen_framing,
            name=self.name,
        )
