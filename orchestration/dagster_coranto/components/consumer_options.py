"""The YAML model of a Spark consumer's options."""

from typing import Literal

import dagster as dg
from pydantic import Field

from coranto_consumers.spark.application.consumer_options import ConsumerOptions


class DeadLettersModel(dg.Model, dg.Resolvable):
    """The destination of dead letters, in YAML."""

    table: str = Field(default="", description="A table of the consumer's store. It is created when absent.")
    journals: str | list[str] = Field(default="", description="A label selector, or the names of journals.")


class ConsumerOptionsModel(dg.Model, dg.Resolvable):
    """The options of a Spark consumer, in YAML. Omitted options have the consumer's defaults."""

    max_transaction_bytes: int | None = Field(
        default=None, gt=0, description="Maximum bytes of new content that a transaction reads."
    )
    max_transaction_messages: int | None = Field(
        default=None, gt=0, description="Approximate limit of the new messages that a transaction reads."
    )
    atomic: bool | None = Field(
        default=None,
        description="True: deliver all messages that one acknowledgement commits in a journal in one transaction.",
    )
    min_transaction_seconds: float | None = Field(
        default=None, ge=0, description="Minimum seconds between transactions of a service that has caught up."
    )
    retry_timeout: float | None = Field(
        default=None, ge=0, description="The seconds that a run retries an unavailable store or broker."
    )
    max_partition_bytes: int | None = Field(default=None, gt=0, description="Maximum bytes that a Spark task reads.")
    misfits: Literal["fail", "nulls"] | DeadLettersModel | None = Field(
        default=None,
        description="Messages that do not fit the application's columns. They end the run (fail), get nulls for "
        "values that do not fit (nulls), or become dead letters in the same transaction.",
        examples=["nulls", {"table": "dead_letters"}],
    )
    fail_on_data_loss: bool | None = Field(
        default=None, description="False: continue after lost content. The check nothing_left_out reports it."
    )
    accept_changes: str | None = Field(
        default=None,
        description="Code of a change of the consumer's sources, outputs or store, from the error about it.",
    )
    uuid_pointer: str | None = Field(default=None, description="JSON pointer to a message's UUID.")
    framing: dict[str, str | int] | None = Field(
        default=None,
        description="The framing of messages that are not lines of JSON, by the options of Spark's data source.",
        examples=[{"framing": "csv", "csvColumns": 3}],
    )
    registry: str | None = Field(
        default=None,
        description="The journal that registers message types, which determine framing and UUIDs.",
        examples=["types/registry"],
    )

    def to_options(self, *, by_window: bool) -> ConsumerOptions:
        """Return the options, for a consumer by windows if `by_window`. Raises InvalidInput."""
        return ConsumerOptions.of(self.model_dump(exclude_none=True), by_window=by_window)
