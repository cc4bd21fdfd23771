"""`StateSynchronizer`: a state that is replicated by a journal, and that many processes change.

Each change is an update. A process decides the update on the state that it knows, and appends it on the condition that
the state is unchanged. Otherwise nothing is appended; the process reads the new updates and decides again. So all
processes apply the same updates in the same order, and each update to exactly the state that it was decided on.

The condition is a register, `coranto.dev/revision`: the token of the last record. Tokens are random and never used
again, so an append whose answer was lost can be retried: only one of the attempts can succeed, and a late attempt is
refused because the token has changed. If the brokers lose the registers, a snapshot of the state in the journal is
appended, which creates new registers; updates that were decided before it are refused.

The journal has one JSON object per line: `{"revision": token, "after": token, "update": …}`, or a snapshot, which has
`"state"` in place of `"update"`. New processes read from the last snapshot, whose offset is in the label
`coranto.dev/snapshot` of the journal's spec. Content before it may be removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Callable
from typing import Final, Generic, Protocol, TypeVar

import structlog
from pydantic import TypeAdapter

from coranto import labels
from coranto.client.client import JournalClient
from coranto.client.record_journals import RecordLines
from coranto.client.retry import Retry
from coranto.client.values import Chunk
from coranto.effects import Clock, Entropy, SystemClock
from coranto.errors import (
    AppendOutcomeUnknown,
    ApplyOutcomeUnknown,
    ContentGone,
    CorantoError,
    CorruptData,
    EtcdTransactionFailed,
    InvalidInput,
    JournalNotFound,
    OffsetJump,
    OffsetNotYetAvailable,
    PermissionDenied,
    RegisterMismatch,
    StreamNotFound,
)
from coranto.streams.model.stream import HELD_LABEL, MAX_RECORD_BYTES
from coranto.wire import protocol_pb2 as pb

S = TypeVar("S")
U = TypeVar("U")

REVISION_LABEL: Final = "coranto.dev/revision"
SNAPSHOT_LABEL: Final = "coranto.dev/snapshot"
DEFAULT_SNAPSHOT_EVERY: Final = 256
"""Number of updates after which a snapshot is written."""
DEFAULT_RETRY_TIMEOUT: Final = 60.0
"""Retry timeout of a call in seconds."""

_log = structlog.get_logger(__name__)


class StateModel(Protocol[S, U]):
    """The types of a state and its updates, and the application of updates."""

    @property
    def states(self) -> TypeAdapter[S]: ...

    @property
    def updates(self) -> TypeAdapter[U]: ...

    def apply(self, state: S, update: U) -> S:
        """Return the state after an update. Raises a CorantoError if the update cannot be applied to the state."""
        ...


class _Fold(Generic[S, U]):
    """The state that results from the records up to an offset."""

    __slots__ = ("journal", "model", "offset", "revision", "since_snapshot", "state")

    def __init__(self, journal: str, model: StateModel[S, U], offset: int) -> None:
        self.journal = journal
        self.model = model
        self.offset = offset
        self.revision = ""  # The token of the last record; empty before the first.
        self.since_snapshot = 0
        self.state: S | None = None

    def take(self, line: bytes, begin: int, end: int) -> None:
        """Apply a record, unless another task that reads the journal has applied it already. Raises CorruptData."""
        if begin != self.offset:
            return
        try:
            record = json.loads(line)
            revision, after = record["revision"], record["after"]
            if "state" in record:
                self.state = self.model.states.validate_python(record["state"])
                self.since_snapshot = 0
            elif self.state is None or after != self.revision:
                raise ValueError(f"it is based on {after!r}, but {self.revision!r} is the previous record")
            else:
                self.state = self.model.apply(self.state, self.model.updates.validate_python(record["update"]))
                self.since_snapshot += 1
        except (ValueError, KeyError, TypeError, RecursionError, CorantoError) as error:
            raise CorruptData(f"journal {self.journal}: the record at offset {begin} is invalid: {error}") from error
        self.revision, self.offset = revision, end

    async def read(self, chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[None]:
        """Apply the records in content that begins with a record. Yields after each chunk with new records."""
        lines, begin = RecordLines(), -1
        async for chunk in chunks:
            begin = chunk.offset if begin < 0 else begin
            whole = lines.feed(chunk.content)
            if lines.partial_bytes > MAX_RECORD_BYTES:
                raise CorruptData(f"journal {self.journal}: content at offset {begin} is not a record: it does not end")
            before = self.revision
            for line in whole:
                end = begin + len(line) + 1
                self.take(line, begin, end)
                begin = end
            if self.revision != before:
                yield


class StateSynchronizer(Generic[S, U]):
    """The state in `journal`, as this process knows it. For one event loop; safe for many tasks.

    Call `initialize` or `load` first. A snapshot is written after every `snapshot_every` updates. An update whose
    answer was lost is retried for up to `retry_timeout` seconds. After a cancelled read, `state` is unchanged or newer.
    A cancelled write may or may not have been applied.
    """

    def __init__(
        self,
        client: JournalClient,
        journal: str,
        model: StateModel[S, U],
        *,
        snapshot_every: int = DEFAULT_SNAPSHOT_EVERY,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
        clock: Clock | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        if snapshot_every < 1:
            raise InvalidInput(
                f"a snapshot every {snapshot_every} updates is not possible; give 1 or more", field="snapshot_every"
            )
        self.journal = journal
        self._client = client
        self._model = model
        self._snapshot_every = snapshot_every
        self._retry_timeout = retry_timeout
        self._clock: Clock = clock or SystemClock()
        self._entropy = entropy
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._fold: _Fold[S, U] = _Fold(journal, model, 0)

    @property
    def is_loaded(self) -> bool:
        return self._fold.state is not None

    @property
    def state(self) -> S:
        """The newest state that this process knows. Others may have changed it. Raises InvalidInput before `load`."""
        if self._fold.state is None:
            raise InvalidInput(f"the state in {self.journal} is not loaded: initialize() or load() it first")
        return self._fold.state

    async def initialize(self, state: S) -> S:
        """Write the initial `state`, unless the journal has a state already. Returns the state in the journal.

        Any number of processes may call this concurrently.
        """
        async with self._lock:
            await self._load()
            while self._fold.state is None:
                record = self._record("state", self._model.states.dump_python(state, mode="json"))
                # Empty registers pass any check. The first append sets HELD_LABEL, which refuses all others.
                await self._append(*record, labels.label_selector(exclude=[(HELD_LABEL, "")]))
            return self._fold.state

    async def load(self) -> S:
        """Read the state. Raises JournalNotFound, and StreamNotFound if the journal has no state yet."""
        async with self._lock:
            await self._load()
            if self._fold.state is None:
                raise StreamNotFound(f"journal {self.journal} has no state yet: initialize it first")
            return self._fold.state

    async def fetch(self) -> S:
        """Return the state with all changes made before this call."""
        async with self._lock:
            await self._fetch()
            return self.state

    async def update(self, decide: Callable[[S], U | None]) -> S:
        """Append the update that `decide` returns for the newest state. Returns the state after it.

        `decide` is called again whenever another process was faster, so it must have no side effects. If it returns
        None, nothing changes. If it raises an error for the newest state, `update` raises it. Raises
        AppendOutcomeUnknown if answers were lost for `retry_timeout` seconds. After that error or a cancellation, the
        update may still be applied, but only to the state that it was decided on. Also raises the errors of
        `JournalClient.append`.
        """
        async with self._lock:
            while True:
                try:
                    update = decide(self.state)
                    if update is None:
                        return self.state
                    self._model.apply(self.state, update)
                except CorantoError:
                    before = self._fold.revision
                    await self._fetch()
                    if self._fold.revision == before:
                        raise
                    continue
                token, content = self._record("update", self._model.updates.dump_python(update, mode="json"))
                if await self._append(token, content, self._unchanged()):
                    break
            if self._fold.since_snapshot >= self._snapshot_every:
                await self._snapshot()
            return self.state

    async def states(self) -> AsyncGenerator[S]:
        """Yield the state now and after each later change by any process, without end.

        When several changes arrive together, only the last state is yielded.
        """
        seen: str | None = None
        while True:
            async with self._lock:
                fold = self._fold
            pump = asyncio.ensure_future(self._pump(fold))
            try:
                while self._fold is fold and not pump.done():
                    if seen != fold.revision:
                        seen = fold.revision
                        yield self.state
                        continue
                    self._changed.clear()
                    changed = asyncio.ensure_future(self._changed.wait())
                    await asyncio.wait([pump, changed], return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
                if pump.done():
                    try:
                        await pump
                    except OffsetJump:
                        async with self._lock:
                            await self._load()
            finally:
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)

    async def compact(self) -> None:
        """Write a snapshot now, so that earlier content of the journal is no longer needed."""
        async with self._lock:
            await self._snapshot()

    # -- Reading -----------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Read the state from the last snapshot."""
        known = -1
        while True:
            mark = await self._snapshot_offset()
            fold: _Fold[S, U] = _Fold(self.journal, self._model, mark)
            try:
                await self._catch_up(fold)
                break
            except (ContentGone, OffsetJump, OffsetNotYetAvailable) as error:
                # Another process may have written a newer snapshot, and the content is gone: read the new offset.
                if mark == known:
                    raise CorruptData(
                        f"the state in {self.journal} cannot be read from its snapshot at {mark}: {error}"
                    ) from error
                known = mark
        self._fold = fold
        self._changed.set()

    async def _snapshot_offset(self) -> int:
        found = (await self._client.list(labels.label_selector(include=[(labels.NAME, self.journal)]))).journals
        if not found:
            raise JournalNotFound(self.journal)
        value = labels.value_of(found[0].spec.labels, SNAPSHOT_LABEL, "0")
        if not value.isdecimal():
            raise CorruptData(
                f"journal {self.journal}: {SNAPSHOT_LABEL}={value} is not an offset; remove the label, "
                "and the state is read from its beginning"
            )
        return int(value)

    async def _fetch(self) -> None:
        """Read new records. Load a snapshot if this process is too far behind, or the brokers lost content."""
        try:
            await self._catch_up(self._fold)
        except (ContentGone, OffsetJump, OffsetNotYetAvailable):
            await self._load()
        self._changed.set()

    async def _catch_up(self, fold: _Fold[S, U]) -> None:
        """Apply all records up to the current head, as the primary knows it."""
        head = await self._client.head(self.journal)
        if head < fold.offset:
            raise OffsetNotYetAvailable(f"state in {self.journal}: known up to {fold.offset}, but it ends at {head}")
        if head > fold.offset:
            chunks = self._client.read(self.journal, fold.offset, end_offset=head, fail_on_jump=True)
            async with contextlib.aclosing(chunks):
                async for _ in fold.read(chunks):
                    pass

    async def _pump(self, fold: _Fold[S, U]) -> None:
        """Apply the records that other processes append, until cancelled."""
        chunks = self._client.read(self.journal, fold.offset, block=True, fail_on_jump=True)
        async with contextlib.aclosing(chunks):
            async for _ in fold.read(chunks):
                self._changed.set()

    # -- Writing -----------------------------------------------------------------------------------------------------

    def _record(self, kind: str, value: object) -> tuple[str, bytes]:
        token = self._entropy(12).hex()
        record = {"revision": token, "after": self._fold.revision, kind: value}
        return token, json.dumps(record, separators=(",", ":"), sort_keys=True).encode() + b"\n"

    def _unchanged(self) -> pb.LabelSelector:
        return labels.label_selector(include=[(HELD_LABEL, ""), (REVISION_LABEL, self._fold.revision)])

    async def _append(self, token: str, content: bytes, check: pb.LabelSelector) -> bool:
        """Append a record and apply it. If the check fails, read the new records and return False."""
        union = labels.label_set([(HELD_LABEL, "true"), (REVISION_LABEL, token)])
        retry = Retry(self._retry_timeout)
        while True:
            try:
                result = await self._client.append(self.journal, content, check_registers=check, union_registers=union)
            except RegisterMismatch as error:
                lost = not labels.values_of(error.registers, HELD_LABEL)
                await self._fetch()
                if self._fold.revision == token:
                    return True  # Applied by an attempt whose answer was lost.
                if lost:
                    await self._restore()
                return False
            except AppendOutcomeUnknown:
                # Retry with the same token: at most one attempt finds the registers unchanged.
                delay = retry.failed(self._clock.monotonic())
                if delay is None:
                    raise
                await self._clock.sleep(delay)
                continue
            self._fold.take(content[:-1], result.begin, result.end)
            self._changed.set()
            if self._fold.offset < result.end:
                await self._fetch()
            return True

    async def _restore(self) -> None:
        """Create the registers again after the brokers lost them. Earlier decisions can then no longer be applied."""
        if self._fold.state is None:
            return
        _log.warning("state_synchronizer.registers_lost", journal=self.journal, offset=self._fold.offset)
        token, content = self._record("state", self._model.states.dump_python(self._fold.state, mode="json"))
        await self._append(token, content, labels.label_selector(exclude=[(HELD_LABEL, "")]))

    async def _snapshot(self) -> None:
        token, content = self._record("state", self._model.states.dump_python(self.state, mode="json"))
        if not await self._append(token, content, self._unchanged()):
            return  # The process that was faster, or a later update, will write the snapshot.
        begin = self._fold.offset - len(content)
        listing = await self._client.list(labels.label_selector(include=[(labels.NAME, self.journal)]))
        for info in listing.journals:
            spec = pb.JournalSpec()
            spec.CopyFrom(info.spec)
            if int(labels.value_of(spec.labels, SNAPSHOT_LABEL, "0")) >= begin:
                continue
            spec.labels.CopyFrom(labels.with_value(spec.labels, SNAPSHOT_LABEL, str(begin)))
            try:
                await self._client.apply([pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=info.mod_revision)])
            except (EtcdTransactionFailed, ApplyOutcomeUnknown, PermissionDenied) as error:
                # The old offset works too; new processes only have to read more.
                _log.warning("state_synchronizer.snapshot_not_noted", journal=self.journal, reason=str(error))
