"""One shard in one process, from its assignment to its end.

::

    IDLE ──> BACKFILL ──> STANDBY ──promoted──> PRIMARY
      └──────────┴───────────┴────────────────────┴──> FAILED

A shard with a recovery log plays it, and goes on to follow it as a standby until it is promoted. One without has
nothing to play, and is STANDBY at once. A primary that meets a transient error starts anew from its checkpoint, and so
does one that was fenced off although the shard is assigned to it, or that appends to a journal while the brokers that
know its end are away; one that does not get on, or meets any other error, is FAILED until it is unassigned. The status
is kept in the assignment's value, where the allocator and everybody else see it.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from coranto.client import JournalClient
from coranto.client.retry import backoff
from coranto.coordination.etcd import Compare, Coordinator, KeyValue, Target
from coranto.effects import Clock, Entropy
from coranto.errors import CorantoError, Fenced, IndexHasGreaterOffset, InvalidInput, TxnOutcomeUnknown, Unavailable
from coranto.messages import new_producer_id
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.recoverylog.standby import LogStandby
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.primary import Primary
from coranto_consumers.runtime.progress import Progress
from coranto_consumers.runtime.specs import exclusive, hint_keys, recovery_log

_log = structlog.get_logger(__name__)

RESTARTS: Final = 5
"""How often a primary starts anew without completing a transaction in between, or because it was fenced off, before it
counts as failed."""

AWAY_SECONDS: Final = 60.0
"""How long brokers may be away that alone know where a journal ends, before a primary that gets nowhere counts as
failed. The client repeats other refusals of brokers by itself; this one may need an operator."""

AWAY_PAUSE_SECONDS: Final = 2.0

STOP_SECONDS: Final = 5.0
"""How long a primary may take to complete what it has consumed, once the shard is no longer its own."""

MAX_ERROR_CHARS: Final = 4096
"""How much of an error's text is logged and kept in etcd. It may repeat what a journal holds, of any size."""

_FOLDER_CHARS: Final = 40


class Host(Protocol):
    """The process, as its replicas need it."""

    @property
    def coordinator(self) -> Coordinator: ...

    @property
    def entropy(self) -> Entropy: ...

    @property
    def recovery_folder(self) -> Path:
        """Where recovery logs are played into folders."""
        ...

    async def set_status(self, shard: str, status: pc.ReplicaStatus, is_due: Callable[[], bool]) -> None:
        """Write a replica's status into its assignment, for as long as there is one and `is_due`."""
        ...

    def fqn_of(self, shard: str) -> str:
        """The key of a shard's spec in etcd."""
        ...

    def assignment_of(self, shard: str) -> KeyValue | None:
        """This process's assignment to a shard."""
        ...

    def earlier_shards(self, shard: str) -> Sequence[pc.ShardSpec]:
        """The specs of the shards that were created before a shard, or together with it and by a smaller id."""
        ...


class ShardReplica:
    """A local replica of a shard. `start` it once, and `stop` it once."""

    def __init__(
        self,
        app: Application[Any],
        spec: pc.ShardSpec,
        client: JournalClient,
        host: Host,
        *,
        clock: Clock,
        metrics: ConsumerMetrics,
    ) -> None:
        self.shard = Shard(spec, client, host.fqn_of(spec.id))
        self.progress = Progress()
        self.stopped = asyncio.Event()
        """It processes nothing any more."""
        self._app = app
        self._host = host
        self._clock = clock
        self._metrics = metrics
        self._promoted = asyncio.Event()
        self._serving = asyncio.Event()
        self._stopping = False
        self._primary: Primary | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def spec(self) -> pc.ShardSpec:
        return self.shard.spec

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"shard {self.spec.id}")

    def promote(self) -> None:
        """This process is to be the primary."""
        self._promoted.set()

    def update(self, spec: pc.ShardSpec) -> None:
        """The spec has changed. Other sources are taken up from the checkpoint on."""
        before, self.shard.spec = self.shard.spec, spec
        if list(before.sources) != list(spec.sources) and self._primary is not None:
            _log.info("sources changed", shard=spec.id)
            self._primary.stop()

    def stop(self) -> Coroutine[Any, Any, None]:
        """Complete what was consumed, in bounded time, and end. To be awaited; but from the call on nothing is told of
        this replica any more, since the assignment may be another one's already."""
        self._stopping = True
        return self._stop()

    async def _stop(self) -> None:
        assert self._task is not None
        if self._primary is not None:
            self._primary.stop()
            await asyncio.wait([self._task], timeout=STOP_SECONDS)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait_serving(self) -> bool:
        """Return once the primary has restored its store: True, or False when that will not be."""
        return await self._unless_stopped(self._serving.wait())

    async def wait_read_through(self, offsets: dict[str, int]) -> bool:
        """Return once completed transactions have read this far: True, or False when that will not be."""
        return await self._unless_stopped(self.progress.wait_for(offsets))

    async def _unless_stopped(self, work: Coroutine[Any, Any, object]) -> bool:
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self.stopped.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            return working.done()
        finally:
            working.cancel()
            stopping.cancel()

    async def _run(self) -> None:
        try:
            await self._keep_running()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the application's, too: whatever it is, the shard has failed
            # Rendered plainly: an elaborate traceback can take longer than a lease, while everything else waits.
            stack = (
                {} if isinstance(error, CorantoError) else {"stack": _cut("".join(traceback.format_exception(error)))}
            )
            text = _cut(str(error))
            _log.error("shard failed", shard=self.spec.id, error=text or type(error).__name__, **stack)
            self.stopped.set()
            await self._status(pc.ReplicaStatus.FAILED, f"{type(error).__name__}: {text}")
        finally:
            self.stopped.set()

    async def _keep_running(self) -> None:
        """Run the shard. Start anew after transient errors, and when who fenced it off does not own it."""
        failures = fencings = 0
        away: float | None = None  # Since when brokers are away without which nothing can be appended.
        while not self._stopping:
            completed = dict(self.progress.read_through)
            self._primary = None
            try:
                await self._run_once()
            except Exception as error:
                if self.progress.read_through != completed:
                    failures, away = 0, None
                now = self._clock.monotonic()
                if isinstance(error, IndexHasGreaterOffset):
                    away = now if away is None else away
                    if now - away >= AWAY_SECONDS:
                        raise
                    event, pause = "shard waits for brokers that know a journal's end", AWAY_PAUSE_SECONDS
                else:
                    failures += 1
                    fencings += isinstance(error, Fenced)
                    if max(failures, fencings) > RESTARTS or not await self._may_start_anew(error):
                        raise
                    event, pause = "shard starts anew", backoff(failures)
                _log.warning(event, shard=self.spec.id, error=_cut(str(error)), failures=failures, pause_seconds=pause)
                self._metrics.restarts.labels(self.spec.id).inc()
                await self._clock.sleep(pause)

    async def _run_once(self) -> None:
        log = recovery_log(self.spec)
        if not log:
            await self._run_primary()
            return
        self._check_log()
        keys = hint_keys(self.spec)
        folder = Path(tempfile.mkdtemp(prefix=_folder_prefix(self.spec.id), dir=self._host.recovery_folder))
        guard = self._host.assignment_of(self.spec.id)
        async with LogStandby(
            self.shard.client,
            self._host.coordinator,
            keys,
            log,
            folder,
            guard=guard,
            clock=self._clock,
            entropy=self._host.entropy,
        ) as standby:
            if not self._serving.is_set():
                await self._status(pc.ReplicaStatus.BACKFILL)
            await standby.tailing()
            if not self._serving.is_set():
                await self._status(pc.ReplicaStatus.STANDBY)
            await self._promoted.wait()
            # A promotion makes another assignment of it.
            async with await standby.take_over(self._host.assignment_of(self.spec.id)) as owner:
                self.shard.log_recorder = owner.recorder
                try:
                    await self._run_primary(owner.opened)
                finally:
                    self.shard.log_recorder = None

    def _check_log(self) -> None:
        """Raises InvalidInput when an earlier shard has the same log: playing it here would fence that one off.

        Apply refuses such a shard. This is for two that were applied at once, and for those that were there before.
        """
        own = exclusive(self.spec)
        for other in self._host.earlier_shards(self.spec.id):
            for each in exclusive(other):
                if each in own:
                    raise InvalidInput(
                        f"shard {self.spec.id} has {each}, which shard {other.id} had before; choose other prefixes",
                        field="recovery_log_prefix",
                    )

    async def _run_primary(self, restored: Callable[[], Awaitable[None]] | None = None) -> None:
        if restored is None and not self._serving.is_set():
            await self._status(pc.ReplicaStatus.STANDBY)
        await self._promoted.wait()
        primary = self._primary = Primary(
            self._app,
            self.shard,
            clock=self._clock,
            producer=new_producer_id(self._host.entropy),
            progress=self.progress,
            metrics=self._metrics,
            restored=restored,
        )
        announcing = asyncio.create_task(self._announce(primary))
        try:
            await primary.run()
        finally:
            announcing.cancel()

    async def _may_start_anew(self, error: Exception) -> bool:
        if isinstance(error, Fenced):
            return await self._is_assigned()
        return self._is_transient(self._primary, error)

    async def _is_assigned(self) -> bool:
        """Whether the shard is still assigned to this process, by etcd's own word or as far as can be known.

        Who raises a fence need not own the shard any more: it may have hung before that, for longer than its lease.
        """
        mine = self._host.assignment_of(self.spec.id)
        if mine is None:
            return False
        try:
            still = Compare(mine.key, Target.CREATE_REVISION, mine.create_revision)
            return (await self._host.coordinator.txn([still], [])).succeeded
        except (Unavailable, TxnOutcomeUnknown):
            return True

    @staticmethod
    def _is_transient(primary: Primary | None, error: Exception) -> bool:
        if primary is not None and primary.store is not None:
            return primary.store.is_transient(error)
        return isinstance(error, CorantoError) and error.retriable

    async def _announce(self, primary: Primary) -> None:
        await primary.ready.wait()
        self._serving.set()
        await self._status(pc.ReplicaStatus.PRIMARY)

    async def _status(self, code: pc.ReplicaStatus.Code.ValueType, *errors: str) -> None:
        self._metrics.status.labels(self.spec.id).set(code)
        status = pc.ReplicaStatus(code=code, errors=errors)
        await self._host.set_status(self.spec.id, status, lambda: not self._stopping)


def _cut(text: str) -> str:
    """Text of bounded length: its beginning, and where it was longer its end."""
    if len(text) <= MAX_ERROR_CHARS:
        return text
    half = MAX_ERROR_CHARS // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def _folder_prefix(shard: str) -> str:
    """How the name of a shard's folder begins. Ids may be longer than names of files, and hold slashes and `..`."""
    return re.sub(r"[^\w-]", "_", shard)[:_FOLDER_CHARS] + "-"
