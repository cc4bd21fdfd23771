"""A shard that runs in the test's process, for tests of applications. It needs no consumer processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from coranto.client import JournalClient
from coranto.effects import Clock, SystemClock
from coranto.messages import new_producer_id
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.recoverylog.standby import LogOwner
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.primary import Primary
from coranto_consumers.runtime.progress import Progress
from coranto_consumers.runtime.specs import validate_shard_spec


def shard_spec(
    id: str, sources: Sequence[str], *, min_seconds: float = 0.0, max_seconds: float = 1.0, **fields: Any
) -> pc.ShardSpec:
    """Return the spec of a shard with `sources`. Raises InvalidInput for a spec that is not valid."""
    spec = pc.ShardSpec(id=id, **fields)
    spec.min_txn_duration.FromNanoseconds(round(min_seconds * 1e9))
    spec.max_txn_duration.FromNanoseconds(round(max_seconds * 1e9))
    for journal in sorted(sources):
        spec.sources.add(journal=journal)
    validate_shard_spec(spec)
    return spec


class RunningShard:
    """A running shard.

    Cancelling `read_through` ends only the wait. Cancelling `finish` ends the shard as `crash` does.
    """

    def __init__(self, primary: Primary, task: asyncio.Task[None], progress: Progress) -> None:
        self.primary = primary
        self.task = task
        """The running task. It ends with the error that ends the shard."""
        self.progress = progress

    async def read_through(self, offsets: dict[str, int]) -> None:
        """Wait until the shard has read through these offsets. Raises the error of a shard that ended before."""
        waiting = asyncio.create_task(self.progress.wait_for(offsets))
        try:
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await self.task
                raise AssertionError(f"the shard has ended at {self.progress.read_through}, before {offsets}")
        finally:
            waiting.cancel()

    async def finish(self) -> None:
        """Complete transactions, and end."""
        self.primary.stop()
        await self.task

    async def crash(self) -> None:
        """End immediately, and abandon transactions in progress."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@contextlib.asynccontextmanager
async def running_shard(
    app: Application[Any],
    spec: pc.ShardSpec,
    client: JournalClient,
    *,
    owner: LogOwner | None = None,
    accept_changes: str = "",
    clock: Clock | None = None,
) -> AsyncIterator[RunningShard]:
    """Run the shard of `spec` with `app` and the journals of `client` until the context is left.

    Every run has a producer of its own, as after a new assignment. `clock` is the system clock by default. For a store
    in a recovery log, pass the `owner` that has taken the log over (see `coranto_consumers.recoverylog.standby`). A
    block that is cancelled ends the shard as `crash` does.
    """
    progress = Progress()
    shard = Shard(spec, client)
    shard.log_recorder = owner.recorder if owner is not None else None
    primary = Primary(
        app,
        shard,
        clock=clock or SystemClock(),
        producer=new_producer_id(os.urandom),
        progress=progress,
        metrics=ConsumerMetrics(),
        restored=owner.opened if owner is not None else None,
        accept_changes=accept_changes,
    )
    running = RunningShard(primary, asyncio.create_task(primary.run()), progress)
    try:
        yield running
    finally:
        await running.crash()
