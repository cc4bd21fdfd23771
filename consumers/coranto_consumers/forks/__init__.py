"""Forks of consumers: a copy of a checkpoint that reads forks of the consumer's journals, to be promoted or dropped."""

from coranto_consumers.forks.journey import (
    ForkedConsumer,
    ForkStatus,
    drop_consumer,
    fork_consumer,
    fork_status,
    promote_consumer,
)

__all__ = ["ForkStatus", "ForkedConsumer", "drop_consumer", "fork_consumer", "fork_status", "promote_consumer"]
