"""Forks of consumers: a copy of a checkpoint, with forks of its journals, that is promoted or dropped later."""

from coranto_consumers.forks.lifecycle import (
    ForkedConsumer,
    ForkStatus,
    drop_consumer,
    fork_consumer,
    fork_status,
    promote_consumer,
)

__all__ = ["ForkStatus", "ForkedConsumer", "drop_consumer", "fork_consumer", "fork_status", "promote_consumer"]
