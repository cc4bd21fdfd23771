"""`SyncJournalClient`: `JournalClient` for code that blocks, such as Spark tasks, Dagster assets and scripts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from coranto.auth import Auth
from coranto.client.append_service import (
    DEFAULT_BATCH_BYTES,
    DEFAULT_PENDING_BYTES,
    Appended,
    AppendService,
)
from coranto.client.append_service import DEFAULT_PATIENCE as SERVICE_PATIENCE
from coranto.client.appender import Appender
from coranto.client.client import JournalClient
from coranto.client.config import DEFAULT_PATIENCE, DEFAULT_ROUTE_CACHE, ClientConfig, ClientTls
from coranto.client.loop import Blocking, LoopThread, run_blocking, shared_loop
from coranto.client.values import AppendConditions, AppendResult, Chunk, FragmentInfo, Listing, Suspend
from coranto.errors import AppendOutcomeUnknown, CorantoError, Unavailable
from coranto.wire import protocol_pb2 as pb

T = TypeVar("T")

_AHEAD_BYTES = 8 << 20


class SyncJournalClient(Blocking):
    """A blocking client with the methods of `JournalClient`, which see for what they mean and raise.

    May be used by several threads, and pickled: its copy connects anew. So does a forked child, provided that its
    parent had not connected yet (as with Spark's workers); where it had, the child is told so by an error.
    `timeout` bounds each call in seconds; None leaves it to `patience`. For reads it bounds the wait for each chunk.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        file_root: Path | None = None,
        patience: float = DEFAULT_PATIENCE,
        timeout: float | None = None,
        auth: Auth | None = None,
        tls: ClientTls | None = None,
        zone: str = "",
        route_cache: int = DEFAULT_ROUTE_CACHE,
    ) -> None:
        self.config = ClientConfig(endpoint, file_root, patience, auth, tls, zone, route_cache)
        self.timeout = timeout
        self._lock = threading.Lock()
        self._pid = 0
        self._client = JournalClient.of(self.config)

    @classmethod
    def of(cls, config: ClientConfig, *, timeout: float | None = None) -> SyncJournalClient:
        return cls(
            config.endpoint,
            file_root=config.file_root,
            patience=config.patience,
            timeout=timeout,
            auth=config.auth,
            tls=config.tls,
            zone=config.zone,
            route_cache=config.route_cache,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.config, self.timeout)

    def close(self) -> None:
        """Close the connection. Using the client again connects anew."""
        with self._lock:
            if self._pid == os.getpid():
                self._pid = 0
                run_blocking(self._client.close())

    # -- The methods of JournalClient ------------------------------------------------------------------------------

    def list(self, selector: str | pb.LabelSelector = "") -> Listing:
        return self._run(self._here.list(selector))

    def watch(self, selector: str | pb.LabelSelector = "") -> Iterator[Listing]:
        """As `JournalClient.watch`; `timeout` does not bound it. Close the iterator when leaving it."""
        loop, snapshots = shared_loop(), self._here.watch(selector)
        try:
            while (listing := loop.run(_next(snapshots))) is not None:
                yield listing
        finally:
            loop.run(snapshots.aclose())

    def apply(self, changes: Sequence[pb.ApplyRequest.Change]) -> pb.Header:
        return self._run(self._here.apply(changes))

    def append(
        self,
        journal: str,
        content: bytes | Sequence[bytes],
        *,
        offset: int = 0,
        check_registers: pb.LabelSelector | None = None,
        union_registers: pb.LabelSet | None = None,
        subtract_registers: pb.LabelSet | None = None,
        suspend: Suspend = Suspend.RESUME,
        retry_unknown: bool = False,
        patience: float | None = None,
    ) -> AppendResult:
        work = self._here.append(
            journal,
            content,
            offset=offset,
            check_registers=check_registers,
            union_registers=union_registers,
            subtract_registers=subtract_registers,
            suspend=suspend,
            retry_unknown=retry_unknown,
            patience=patience,
        )
        return self._run(work, changes=f"append to {journal}")

    def appender(
        self,
        journal: str,
        *,
        offset: int = 0,
        check_registers: pb.LabelSelector | None = None,
        union_registers: pb.LabelSet | None = None,
        subtract_registers: pb.LabelSet | None = None,
    ) -> SyncAppender:
        conditions = AppendConditions(offset, check_registers, union_registers, subtract_registers)
        return SyncAppender(shared_loop(), self._here, journal, conditions)

    def read(
        self,
        journal: str,
        offset: int = 0,
        *,
        end_offset: int = 0,
        block: bool = False,
        begin_mod_time: int = 0,
        direct: bool = True,
        fail_on_jump: bool = False,
    ) -> Iterator[Chunk]:
        """As `JournalClient.read`. Up to 8 MiB is read ahead. Close the iterator when leaving it early."""
        chunks = self._here.read(
            journal,
            offset,
            end_offset=end_offset,
            block=block,
            begin_mod_time=begin_mod_time,
            direct=direct,
            fail_on_jump=fail_on_jump,
        )
        return _pull(shared_loop(), chunks, f"read of {journal}", self.timeout)

    def read_all(self, journal: str, begin: int, end: int) -> bytes:
        return self._run(self._here.read_all(journal, begin, end))

    def head(self, journal: str) -> int:
        return self._run(self._here.head(journal))

    def fragments(
        self, journal: str, *, begin_mod_time: int = 0, end_mod_time: int = 0, signature_seconds: int = 0
    ) -> Sequence[FragmentInfo]:
        return self._run(
            self._here.fragments(
                journal,
                begin_mod_time=begin_mod_time,
                end_mod_time=end_mod_time,
                signature_seconds=signature_seconds,
            )
        )

    def store_health(self, url: str, *, check_delete: bool = False, check_delete_prefix: str = "") -> None:
        self._run(self._here.store_health(url, check_delete=check_delete, check_delete_prefix=check_delete_prefix))

    def append_service(
        self,
        *,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        retry_unknown: bool = True,
        patience: float = SERVICE_PATIENCE,
    ) -> SyncAppendService:
        """A batching append service. Use as a context manager."""
        client = self._here

        async def make() -> AppendService:
            return AppendService(
                client,
                batch_bytes=batch_bytes,
                pending_bytes=pending_bytes,
                retry_unknown=retry_unknown,
                patience=patience,
            )

        return SyncAppendService(shared_loop(), self._run(make()), pending_bytes)

    # -- Running them ----------------------------------------------------------------------------------------------

    @property
    def _here(self) -> JournalClient:
        """The client of this process."""
        with self._lock:
            if self._pid != os.getpid():
                self._client = JournalClient.of(self.config)
                self._pid = os.getpid()
            return self._client

    def _run(self, work: Coroutine[Any, Any, T], *, changes: str = "") -> T:
        return run_blocking(_timed(work, self.timeout, changes) if self.timeout is not None else work)


def _restore(config: ClientConfig, timeout: float | None) -> SyncJournalClient:
    return SyncJournalClient.of(config, timeout=timeout)


async def _timed(work: Coroutine[Any, Any, T], timeout: float | None, changes: str) -> T:
    try:
        async with asyncio.timeout(timeout):
            return await work
    except TimeoutError as error:
        if changes:
            raise AppendOutcomeUnknown(f"{changes}: no answer within {timeout} s") from error
        raise Unavailable(f"no answer within {timeout} s") from error


async def _next(snapshots: AsyncGenerator[Listing]) -> Listing | None:
    return await anext(snapshots, None)


class SyncAppender:
    """A blocking `Appender`. Use as `with client.appender(journal) as append:`; leaving without a commit rolls back."""

    def __init__(self, loop: LoopThread, client: JournalClient, journal: str, conditions: AppendConditions) -> None:
        self._loop = loop
        self._appender: Appender = client.appender(
            journal,
            offset=conditions.offset,
            check_registers=conditions.check_registers,
            union_registers=conditions.union_registers,
            subtract_registers=conditions.subtract_registers,
        )

    def __enter__(self) -> SyncAppender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def length(self) -> int:
        return self._appender.length

    def write(self, content: bytes) -> None:
        self._loop.run(self._appender.write(content))

    def commit(self) -> AppendResult:
        return self._loop.run(self._appender.commit())

    def abort(self) -> None:
        self._loop.run(_abort(self._appender))


async def _abort(appender: Appender) -> None:
    appender.abort()


class SyncAppendService:
    """A blocking `AppendService`. Leaving the `with` block flushes, or drops what is pending after an exception.

    May be used by several threads. Handing over content does not wait for the loop's thread, only for room.
    """

    def __init__(self, loop: LoopThread, service: AppendService, pending_bytes: int) -> None:
        self._loop = loop
        self._service = service
        self._capacity = pending_bytes
        self._room = threading.Condition()
        self._pending_bytes = 0
        self._handed: deque[tuple[str, bytes, concurrent.futures.Future[Appended]]] = deque()
        self._awake = False

    def __enter__(self) -> SyncAppendService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.flush()
        else:
            self._loop.run(self._cancel())

    def append(self, journal: str, content: bytes) -> concurrent.futures.Future[Appended]:
        """Take in content, blocking while too much is pending, and return a future of its commit."""
        done: concurrent.futures.Future[Appended] = concurrent.futures.Future()
        # Content that was taken in is not recalled by cancelling its future.
        done.set_running_or_notify_cancel()
        with self._room:
            while self._pending_bytes and self._pending_bytes + len(content) > self._capacity:
                self._room.wait()
            self._pending_bytes += len(content)
            self._handed.append((journal, content, done))
            wake = not self._awake
            self._awake = True
        if wake:
            self._loop.call(self._take_over)
        return done

    def flush(self) -> None:
        """Return once everything taken in is committed. Raises the first failure of a journal that is not reset."""
        self._loop.run(self._flush())

    def reset(self, journal: str) -> None:
        """Accept appends to a journal again after a failure that its callers have dealt with."""
        self._loop.run(self._reset(journal))

    # -- On the loop's thread --------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        with self._room:
            handed, self._handed, self._awake = self._handed, deque(), False
        for journal, content, done in handed:
            self._service.append_nowait(journal, content).add_done_callback(
                functools.partial(self._settle, len(content), done)
            )

    def _settle(
        self, size: int, done: concurrent.futures.Future[Appended], committed: asyncio.Future[Appended]
    ) -> None:
        with self._room:
            self._pending_bytes -= size
            self._room.notify_all()
        if committed.cancelled():
            done.set_exception(concurrent.futures.CancelledError())
        elif error := committed.exception():
            done.set_exception(error)
        else:
            done.set_result(committed.result())

    async def _flush(self) -> None:
        self._take_over()
        await self._service.flush()

    async def _cancel(self) -> None:
        self._take_over()
        await self._service.cancel()

    async def _reset(self, journal: str) -> None:
        self._service.reset(journal)


class _Handover:
    """Chunks on their way from the loop's thread to the one that iterates, at most about 8 MiB of them.

    The iterating thread takes all that is there at once, so that the cost of waking it is shared by many chunks.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._bytes = 0
        self._error: BaseException | None = None
        self._ended = False
        self._room = asyncio.Event()
        self._waits_for_room = False

    async def fill(self, chunks: AsyncGenerator[Chunk]) -> None:
        error: BaseException | None = None
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    await self._put(chunk)
        except CorantoError as caught:
            error = caught
        except BaseException as caught:
            error = caught
            raise
        finally:
            with self._ready:
                self._error, self._ended = error, True
                self._ready.notify()

    async def _put(self, chunk: Chunk) -> None:
        with self._ready:
            self._chunks.append(chunk)
            self._bytes += len(chunk.content)
            self._ready.notify()
            full = self._waits_for_room = self._bytes >= _AHEAD_BYTES
            self._room.clear()
        if full:
            await self._room.wait()

    def take(self, timeout: float | None) -> deque[Chunk]:
        """All chunks that are there, waiting for one; none at the end. Raises what ended the read."""
        with self._ready:
            if not self._ready.wait_for(lambda: self._chunks or self._ended, timeout):
                raise TimeoutError
            taken, self._chunks, self._bytes = self._chunks, deque(), 0
            if self._waits_for_room:
                self._waits_for_room = False
                self._loop.call_soon_threadsafe(self._room.set)
            if not taken and self._error is not None:
                raise self._error
            return taken


async def _handover() -> _Handover:
    return _Handover(asyncio.get_running_loop())


def _pull(loop: LoopThread, chunks: AsyncGenerator[Chunk], subject: str, timeout: float | None) -> Iterator[Chunk]:
    handover = loop.run(_handover())
    filling = loop.submit(handover.fill(chunks))
    try:
        while taken := handover.take(timeout):
            yield from taken
    except TimeoutError as error:
        raise Unavailable(f"{subject}: nothing came within {timeout} s") from error
    finally:
        filling.cancel()
