"""Ownership of a replica's pipeline by an append.

An append owns the pipeline while it synchronizes and streams. With its proposal it hands the pipeline over to the next
append, and keeps only its turn to read acknowledgements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from coranto_broker.replication.pipeline import Pipeline, Turn
from coranto_broker.replication.resolver import Resolution

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class HeldPipeline:
    """Ownership of a replica's pipeline, or of the right to build one."""

    def __init__(self, spawn: Spawn) -> None:
        """`spawn` starts tasks that outlive the append."""
        self._spawn = spawn
        self.pipeline: Pipeline | None = None
        self.owner: Resolution | None = None
        """The resolution of the replica whose pipeline is owned; None without ownership."""

    def acquired(self, pipeline: Pipeline | None, owner: Resolution) -> None:
        self.pipeline, self.owner = pipeline, owner

    def shut_down(self) -> None:
        """Close the pipeline, if any, and return its spool, but keep the right to build another pipeline.

        A background task reads the replicas' streams to their ends.
        """
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is None:
            return
        assert self.owner is not None
        turn = pipeline.turn()
        self.owner.require_replica.spool.put(pipeline.close_send())
        if pipeline.local_only:
            turn.done()
        else:
            self._spawn(pipeline.shut_down(turn))

    def hand_over(self) -> tuple[Turn, bool]:
        """Hand the pipeline over to the next append. Return the turn to read, and True if the pipeline is broken.

        A broken pipeline is closed instead, and its replicas' streams end after that turn.
        """
        pipeline, owner = self.pipeline, self.owner
        assert pipeline is not None
        assert owner is not None
        turn = pipeline.turn()
        self.pipeline = self.owner = None
        replica = owner.require_replica
        broken = pipeline.error is not None
        if broken:
            replica.spool.put(pipeline.close_send())
            replica.pipeline.put(None)
        else:
            replica.pipeline.put(pipeline)
        return turn, broken

    def release(self) -> None:
        """Give up the ownership, if any."""
        pipeline, owner = self.pipeline, self.owner
        self.pipeline = self.owner = None
        if owner is not None:
            owner.require_replica.pipeline.put(pipeline)
