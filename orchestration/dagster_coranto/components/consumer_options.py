"""The options of a Spark consumer, as YAML gives them."""

from typing import Literal

import dagster as dg
from pydantic import Field

from coranto_consumers.spark.application.consumer_options import ConsumerOptions


class DeadLettersModel(dg.Model, dg.Resolvable):
    """The place of dead letters, as YAML gives it."""

    table: str = Field(default="", description="A table of the consumer's store. It is created when absent.")
    journals: str | list[str] = Field(default="", description="A label selector, or the names of journals.")


class ConsumerOptionsModel(dg.Model, dg.Resolvable):
    """The options of a Spark consumer, as YAML gives them. What is left out has the consumer's default."""

    max_transaction_bytes: int | None = Field(
        default=None, gt=0, description="Most bytes of new content that a transaction reads."
    )
    max_transaction_messages: int | None = Field(
        default=None,
        gt=0,
        description="About the most new messages that a transaction reads, in addition to its bytes.",
    )
    min_transaction_seconds: float | None = Field(
        default=None, ge=0, description="The least time between transactions of a service that has caught up."
    )
    retry_timeout: float | None = Field(
        default=None, ge=0, description="Seconds that a run waits for a store or broker that is unavailable."
    )
    max_partition_bytes: int | None = Field(default=None, gt=0, description="Most bytes that a task of Spark reads.")
    misfits: Literal["fail", "nulls"] | DeadLettersModel | None = Field(
        default=None,
        description="Messages that do not fit the application's columns. They end the run (fail), get nulls for what "
        "does not fit (nulls), or become dead letters in the same transaction.",
        examples=["nulls", {"table": "dead_letters"}],
    )
    fail_on_data_loss: bool | None = Field(
        default=None, description="False: continue behind content that is gone. The check nothing_left_out reports it."
    )
    accept_changes: str | None = Field(
        default=None,
        description="Code of a change of the consumer's sources, outputs or store, as the error about it names it.",
    )
    uuid_pointer: str | None = Field(default=None, description="JSON pointer to a message's UUID.")
    framing: dict[str, str | int] | None = Field(
        default=None,
        description="The framing of messages that are not lines of JSON, by the options of Spark's data source.",
        examples=[{"framing": "csv", "csvColumns": 3}],
    )
    registry: str | None = Field(
        default=None,
        description="The journal that registers message types, and tells framing and UUIDs.",
        examples=["types/registry"],
    )

    def made(self, *, by_window: bool) -> ConsumerOptions:
        """Return the options; `by_window`, for a consumer by windows. Raises InvalidInput."""
        return ConsumerOptions.of(self.model_dump(exclude_none=True), by_window=by_window)
