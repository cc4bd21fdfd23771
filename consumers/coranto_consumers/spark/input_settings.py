"""The settings of a consumer's input, and the reader that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from coranto.client import ClientConfig
from coranto.errors import InvalidInput
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.spark.application import Application
from coranto_consumers.spark.dead_letters import DeadLetters, policy_of
from coranto_consumers.spark.frames import parse_schema
from coranto_consumers.spark.framings import ReadFraming
from coranto_consumers.spark.inputs import InputReader


@dataclass(frozen=True, slots=True)
class InputSettings:
    """The settings of a consumer's input. Making them raises InvalidInput if they say what cannot be done.

    `spark` may be a function that starts a session; `name` is that of the consumer.
    """

    application: Application
    client: ClientConfig
    spark: SparkSession | Callable[[], SparkSession]
    max_partition_bytes: int
    misfits: MisfitPolicy | DeadLetters
    framing: ReadFraming
    name: str

    def __post_init__(self) -> None:
        policy_of(self.misfits)
        if self.max_partition_bytes < 1:
            raise InvalidInput(
                f"{self.max_partition_bytes} is not a positive number of bytes, such as 33554432",
                field="max_partition_bytes",
            )

    def reader(self) -> InputReader:
        """Return the reader of the input. Starts the session if there is none yet."""
        return InputReader(
            self.spark() if callable(self.spark) else self.spark,
            self.client,
            parse_schema(self.application.value_schema),
            self.max_partition_bytes,
            misfits=policy_of(self.misfits),
            framing=self.framing,
            name=self.name,
        )
