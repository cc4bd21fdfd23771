"""`ShardReplica`: one shard in one process, from its assignment to its end.

::

    IDLE ──> BACKFILL ──> STANDBY ──promoted──> PRIMARY
      └──────────┴───────────┴────────────────────┴──> FAILED

A shard with a recovery log plays the log, and follows it as a standby until it is promoted. A shard without one has
nothing to play, and is STANDBY immediately. A primary restarts from its checkpoint after a transient error of a store,
of brokers or of etcd, without a limit. It also restarts when it was fenced off although the shard is still assigned to
it. After any other error, a primary is FAILED until it is unassigned. The status is kept in the assignment's value,
where the allocator and all other processes see it.
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
from coranto.client.retry import REPORT_SECONDS, Retry, RetryPolicy
from coranto.coordination.etcd import Compare, CompareTarget, Coordinator, KeyValue
from coranto.effects import Clock, Entropy
from coranto.errors import (
    CorantoError,
    Fenced,
    InvalidInput,
    JournalRecreated,
    RejectedRow,
    TxnOutcomeUnknown,
    Unavailable,
)
from coranto.messages import new_producer_id
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.recoverylog.standby import LogStandby
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.primary import Primary, is_retriable
from coranto_consumers.runtime.progress import Progress
from coranto_consumers.runtime.recreated import continues
from coranto_consumers.runtime.rejections import RejectionSearch
from coranto_consumers.runtime.specs import exclusive, hint_keys, recovery_log

_log = structlog.get_logger(__name__)

FENCINGS: Final = 5
"""The maximum number of times that an assigned primary may be fenced off. After more, it counts as failed: another
consumer uses its row, such as one of a copied cluster."""

STOP_SECONDS: Final = 5.0
"""Seconds for a primary to complete its transactions, once the shard is no longer assigned to it."""

MAX_ERROR_CHARS: Final = 4096
"""The maximum number of characters of an error's text in logs and in etcd. It may quote a journal's content at any
length."""

_FOLDER_CHARS: Final = 40


class ReplicaEnvironment(Protocol):
    """The parts of the process that its replicas need."""

    @property
    def coordinator(self) -> Coordinator: ...

    @property
    def entropy(self) -> Entropy: ...

    @property
    def recovery_folder(self) -> Path:
        """The parent folder of played recovery logs."""
        ...

    async def set_status(self, shard: str, status: pc.ReplicaStatus, is_due: Callable[[], bool]) -> None:
        """Write a replica's status into its assignment. Retries while there is an assignment and `is_due`."""
        ...

    @property
    def accept_changes(self) -> str:
        """The codes of confirmed changes of shards."""
        ...

    def fqn_of(self, shard: str) -> str:
        """Return the key of a shard's spec in etcd."""
        ...

    def assignment_of(self, shard: str) -> KeyValue | None:
        """Return this process's assignment to a shard. None when there is none."""
        ...

    def earlier_shards(self, shard: str) -> Sequence[pc.ShardSpec]:
        """Return the specs of the shards created before a shard. For shards created together, the smaller id
        is earlier."""
        ...


class ShardReplica:
    """A local replica of a shard. `start` it once, and `stop` it once."""

    def __init__(
        self,
        app: Application[Any],
        spec: pc.ShardSpec,
        client: JournalClient,
        host: ReplicaEnvironment,
        *,
        clock: Clock,
        metrics: ConsumerMetrics,
        policy: RetryPolicy | None = None,
    ) -> None:
        """`policy` schedules restarts after transient errors. The default has no limit."""
        self.shard = Shard(spec, client, host.fqn_of(spec.id))
        self.progress = Progress()
        self.stopped = asyncio.Event()
        """Set once the replica has stopped processing."""
        self._app = app
        self._host = host
        self._clock = clock
        self._metrics = metrics
        self._policy = policy or RetryPolicy(seed=int.from_bytes(host.entropy(8)))
        self._promoted = asyncio.Event()
        self._serving = asyncio.Event()
        self._stopping = False
        self._search = RejectionSearch()
        self._primary: Primary | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def spec(self) -> pc.ShardSpec:
        return self.shard.spec

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"shard {self.spec.id}")

    def promote(self) -> None:
        """Make this replica the primary."""
        self._promoted.set()

    def update(self, spec: pc.ShardSpec) -> None:
        """Use a changed spec. If the sources differ, the primary restarts from its checkpoint with the new ones."""
        before, self.shard.spec = self.shard.spec, spec
        if list(before.sources) != list(spec.sources) and self._primary is not None:
            _log.info("shard.sources_changed", shard=spec.id)
            self._primary.stop()

    def stop(self) -> Coroutine[Any, Any, None]:
        """Complete transactions in bounded time, and end. Await the result.

        From the call on, no status of this replica is written: the assignment may already belong to another replica.
        """
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
        """Wait until the primary has restored its store. Returns True then, or False when the replica has stopped."""
        return await self._unless_stopped(self._serving.wait())

    async def wait_read_through(self, offsets: dict[str, int]) -> bool:
        """Wait until completed transactions have read this far. Returns True then, or False when it has stopped."""
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
            # A plain traceback: elaborate formatting can take longer than a lease, while everything else waits.
            stack = (
                {} if isinstance(error, CorantoError) else {"stack": _cut("".join(traceback.format_exception(error)))}
            )
            text = _cut(str(error))
            _log.error("shard.failed", shard=self.spec.id, error=text or type(error).__name__, **stack)
            self.stopped.set()
            await self._status(pc.ReplicaStatus.FAILED, f"{type(error).__name__}: {text}")
        finally:
            self.stopped.set()

    async def _keep_running(self) -> None:
        """Run the shard. Restart it after transient errors, and when it was fenced off although it is assigned."""
        retry, fencings = Retry(self._policy), 0
        while not self._stopping:
            completed, begun = dict(self.progress.read_through), self._clock.monotonic()
            self._primary = None
            try:
                await self._run_once()
            except Exception as error:
                if isinstance(error, RejectedRow) and self._search.may_continue():
                    if error.journal:
                        _log.warning("shard.row_rejected", shard=self.spec.id, error=_cut(str(error)))
                    else:
                        most = self._search.max_messages
                        _log.info("shard.looks_for_rejected_row", shard=self.spec.id, max_messages=most)
                    self._metrics.restarts.labels(self.spec.id).inc()
                    continue
                now = self._clock.monotonic()
                if self.progress.read_through != completed or now - begun >= REPORT_SECONDS:
                    retry.progressed()
                fencings += isinstance(error, Fenced) and not error.is_moved
                if fencings > FENCINGS or not await self._may_start_again(error):
                    raise
                pause = retry.failed(now)
                if pause is None:
                    raise
                self._metrics.failed(self.spec.id, retry.seconds(now))
                if retry.is_report_due(now):
                    _log.warning(
                        "shard.restarting",
                        shard=self.spec.id,
                        error=_cut(str(error)),
                        failures=retry.failures,
                        seconds=round(retry.seconds(now), 1),
                    )
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
            # A promotion creates a new assignment.
            async with await standby.take_over(self._host.assignment_of(self.spec.id)) as owner:
                self.shard.log_recorder = owner.recorder
                try:
                    await self._run_primary(owner.opened)
                finally:
                    self.shard.log_recorder = None

    def _check_log(self) -> None:
        """Raise InvalidInput when an earlier shard has the same log: taking it over here would fence that shard off.

        Apply refuses such a shard. This check is for two shards that were applied concurrently, and for shards that
        were applied before Apply had its check.
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
            search=self._search,
            accept_changes=self._host.accept_changes,
        )
        announcing = asyncio.create_task(self._announce(primary))
        try:
            await primary.run()
        finally:
            announcing.cancel()

    async def _may_start_again(self, error: Exception) -> bool:
        if isinstance(error, Fenced):
            return await self._is_assigned()
        if isinstance(error, JournalRecreated) and continues(self.spec):
            return True  # The next run continues in the present journal.
        return is_retriable(error, self._primary.store if self._primary is not None else None)

    async def _is_assigned(self) -> bool:
        """Return True if the shard is still assigned to this process. Also returns True if etcd is unavailable.

        The process that raised the fence may no longer own the shard: it may have hung before, for longer than its
        lease.
        """
        mine = self._host.assignment_of(self.spec.id)
        if mine is None:
            return False
        try:
            is_unchanged = Compare(mine.key, CompareTarget.CREATE_REVISION, mine.create_revision)
            return (await self._host.coordinator.txn([is_unchanged], [])).succeeded
        except (Unavailable, TxnOutcomeUnknown):
            return True

    async def _announce(self, primary: Primary) -> None:
        await primary.ready.wait()
        self._metrics.outage.labels(self.spec.id).set(0)
        self._serving.set()
        await self._status(pc.ReplicaStatus.PRIMARY)

    async def _status(self, code: pc.ReplicaStatus.Code.ValueType, *errors: str) -> None:
        self._metrics.status.labels(self.spec.id).set(code)
        status = pc.ReplicaStatus(code=code, errors=errors)
        await self._host.set_status(self.spec.id, status, lambda: not self._stopping)


def _cut(text: str) -> str:
    """Return text of bounded length: the beginning and end of a longer text."""
    if len(text) <= MAX_ERROR_CHARS:
        return text
    half = MAX_ERROR_CHARS // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def _folder_prefix(shard: str) -> str:
    """Return the prefix of a shard's folder name. Ids may be longer than file names, and hold slashes and `..`."""
    return re.sub(r"[^\w-]", "_", shard)[:_FOLDER_CHARS] + "-"
