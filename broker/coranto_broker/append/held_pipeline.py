"""The pipeline that an append owns, and the ways in which it gives it up.

An append holds nothing until it has acquired the replica's pipeline. It keeps the pipeline while it synchronizes and
streams. Once it has sent its proposal, it hands the pipeline on, and holds only its turn to read acknowledgements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from coranto_broker.replication.pipeline import Pipeline, Turn
from coranto_broker.replication.resolver import Resolution

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class HeldPipeline:
    """Ownership of a replica's pipeline by one append. Without a pipeline, it owns the right to build one."""

    def __init__(self, spawn: Spawn) -> None:
        """`spawn` runs work that outlives the append."""
        self._spawn = spawn
        self.pipeline: Pipeline | None = None
        self.owner: Resolution | None = None
        """The resolution whose replica's pipeline is owned; None while none is."""

    def acquired(self, pipeline: Pipeline | None, owner: Resolution) -> None:
        self.pipeline, self.owner = pipeline, owner

    def shut_down(self) -> None:
        """Close the pipeline, if there is one, and give back its spool, but keep the right to build another.

        A background task reads the ends of the replicas' streams.
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

    def hand_on(self) -> tuple[Turn, bool]:
        """Give the pipeline to the next append. Returns our turn to read, and True if the pipeline is broken.

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
        """Give up the ownership, if there is one."""
        pipeline, owner = self.pipeline, self.owner
        self.pipeline = self.owner = None
        if owner is not None:
            owner.require_replica.pipeline.put(pipeline)
