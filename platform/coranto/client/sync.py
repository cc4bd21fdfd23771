"""`SyncJournalClient`: `JournalClient` for blocking code, such as Spark tasks, Dagster assets and scripts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from coranto.client.append.appender import Appender
from coranto.client.append.service import (
    DEFAULT_BATCH_BYTES,
    DEFAULT_PENDING_BYTES,
    Appended,
    AppendService,
)
from coranto.client.append.spill import DEFAULT_SPILL_BYTES
from coranto.client.client import JournalClient
from coranto.client.config import DEFAULT_RETRY_TIMEOUT, DEFAULT_ROUTE_CACHE, ClientConfig, require_client
from coranto.client.disk_cache import DiskCache
from coranto.client.generated.wrappers import AppenderWrapper, AppendServiceWrapper, JournalClientWrapper
from coranto.client.handover import BoundedCalls, QueuedWrapper, copy_outcome, read_ahead
from coranto.client.loop import Blocking, run_blocking, shared_loop
from coranto.client.range_prefetch import JournalRange, RangePrefetch, read_in_turn
from coranto.client.values import AppendResult, Chunk, Suspend
from coranto.errors import AppendOutcomeUnknown, Unavailable
from coranto.security.tls import ClientTls
from coranto.security.tokens import Auth
from coranto.wire import protocol_pb2 as pb

T = TypeVar("T")


class SyncJournalClient(JournalClientWrapper, Blocking):
    """A blocking client. `JournalClient` documents the guarantees and errors of each method.

    A client is thread-safe. It can be pickled: the copy opens its own connection. A forked child also opens its own,
    but gets an error if its parent had already connected. `timeout` limits each call in seconds; None leaves the limit
    to `retry_timeout`. For reads it limits the wait for each chunk.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        file_root: Path | None = None,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
        timeout: float | None = None,
        auth: Auth | None = None,
        tls: ClientTls | None = None,
        zone: str = "",
        route_cache: int = DEFAULT_ROUTE_CACHE,
        disk_cache: DiskCache | None = None,
        append_streams: bool = True,
        name: str = "",
    ) -> None:
        self.config = ClientConfig(
            endpoint, file_root, retry_timeout, auth, tls, zone, route_cache, disk_cache, append_streams, name
        )
        self.timeout = timeout
        self._lock = threading.Lock()
        self._pid = 0
        self._client = JournalClient.of(self.config)

    @classmethod
    def of(cls, config: ClientConfig, *, timeout: float | None = None) -> SyncJournalClient:
        require_client(config)
        return cls(
            config.endpoint,
            file_root=config.file_root,
            retry_timeout=config.retry_timeout,
            timeout=timeout,
            auth=config.auth,
            tls=config.tls,
            zone=config.zone,
            route_cache=config.route_cache,
            disk_cache=config.disk_cache,
            append_streams=config.append_streams,
            name=config.name,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.config, self.timeout)

    def close(self) -> None:
        """Close the connection. The next call of the client reconnects."""
        with self._lock:
            if self._pid == os.getpid():
                self._pid = 0
                run_blocking(self._client.close())

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
        retry_timeout: float | None = None,
        min_etcd_revision: int = 0,
        at_start: bool = False,
    ) -> AppendResult:
        """Append content atomically, like `JournalClient.append`, but not from an iterator."""
        work = self._inner.append(
            journal,
            content,
            offset=offset,
            check_registers=check_registers,
            union_registers=union_registers,
            subtract_registers=subtract_registers,
            suspend=suspend,
            retry_unknown=retry_unknown,
            retry_timeout=retry_timeout,
            min_etcd_revision=min_etcd_revision,
            at_start=at_start,
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
        """Begin an append whose content is written in pieces."""
        appender = self._inner.appender(
            journal,
            offset=offset,
            check_registers=check_registers,
            union_registers=union_registers,
            subtract_registers=subtract_registers,
        )
        return SyncAppender(appender)

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
        journal_id: str = "",
    ) -> Iterator[Chunk]:
        """Yield content like `JournalClient.read`. Up to 8 MiB is read ahead. Close the iterator to leave it early."""
        chunks = self._inner.read(
            journal,
            offset,
            end_offset=end_offset,
            block=block,
            begin_mod_time=begin_mod_time,
            direct=direct,
            fail_on_jump=fail_on_jump,
            journal_id=journal_id,
        )
        return read_ahead(shared_loop(), chunks, f"read of {journal}", self.timeout)

    def read_each(
        self, ranges: Sequence[JournalRange], *, block: bool = False, fail_on_jump: bool = False
    ) -> Iterator[Sequence[Chunk]]:
        """Yield the content of each range in order, like `JournalClient.read`, and prefetch the next ranges.

        Use this for many small ranges: each is buffered completely, in total up to 8 MiB or one larger range. Up to 64
        MiB of fragments, or one larger fragment, are fetched at a time. The error of a range is raised when its turn
        comes, and ends the iterator. Close the iterator to leave it early.
        """
        loop = shared_loop()
        read = self._inner.prefetch_reads(block=block, fail_on_jump=fail_on_jump)
        reads = RangePrefetch(loop, ranges, read, timeout=self.timeout)
        return read_in_turn(reads, loop, len(ranges))

    def append_service(
        self,
        *,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        retry_unknown: bool = True,
        retry_timeout: float | None = None,
        spill: Path | str | None = None,
        spill_bytes: int = DEFAULT_SPILL_BYTES,
    ) -> SyncAppendService:
        """Return a batching append service. Use it as a context manager.

        Takes the arguments of `AppendService`. Raises the errors of opening `spill`.
        """
        client = self._inner

        async def make() -> AppendService:
            service = AppendService(
                client,
                batch_bytes=batch_bytes,
                pending_bytes=pending_bytes,
                retry_unknown=retry_unknown,
                retry_timeout=retry_timeout,
                spill=spill,
                spill_bytes=spill_bytes,
            )
            return await service.__aenter__()

        return SyncAppendService(self._run(make()), pending_bytes, has_spill=spill is not None)

    # -- Running calls ---------------------------------------------------------------------------------------------

    @property
    def _inner(self) -> JournalClient:
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
        raise Unavailable(f"no answer within {timeout} s; wait longer, or try again") from error


class SyncAppender(AppenderWrapper):
    """A blocking `Appender`. Use as `with client.appender(journal) as append:`; leaving without a commit rolls back."""

    def __init__(self, appender: Appender) -> None:
        self._appender = appender

    @property
    def _inner(self) -> Appender:
        return self._appender

    def __enter__(self) -> SyncAppender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._run(self._appender.__aexit__(kind, error, traceback))


class SyncAppendService(AppendServiceWrapper, QueuedWrapper):
    """A blocking `AppendService`. Leaving the `with` block flushes, or drops pending content after an exception.

    A service is thread-safe. `append` does not wait for the loop's thread, only while too much is pending.
    """

    def __init__(self, service: AppendService, pending_bytes: int, *, has_spill: bool = False) -> None:
        self._service = service
        self._has_spill = has_spill
        self._calls = BoundedCalls(pending_bytes)

    @property
    def _inner(self) -> AppendService:
        return self._service

    def __enter__(self) -> SyncAppendService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self._run_after_calls(self._service.close)

    def append(self, journal: str, content: bytes) -> concurrent.futures.Future[Appended]:
        """Accept content, and return a future of its commit. Blocks while too much is pending.

        With a spill, blocks until the content is written to it, and raises SpillFailed if that fails.
        """
        if self._has_spill:
            return self._run(_accepted(self._service, journal, content))
        return self._submit(lambda: self._service.append_nowait(journal, content), len(content))

    def flush(self) -> None:
        """Wait until all accepted content is committed. Raises the first failure of a journal that is not reset."""
        self._run_after_calls(self._service.flush)

    def cancel(self) -> None:
        """Drop pending content; a spill keeps its content. The outcome of in-flight appends is unknown."""
        self._run_after_calls(self._service.cancel)


async def _accepted(service: AppendService, journal: str, content: bytes) -> concurrent.futures.Future[Appended]:
    """Return a future of the commit, for other threads, once the service has accepted content."""
    done = await service.append(journal, content)
    result: concurrent.futures.Future[Appended] = concurrent.futures.Future()

    def resolve(done: asyncio.Future[Appended]) -> None:
        if result.set_running_or_notify_cancel():
            copy_outcome(result, done)

    done.add_done_callback(resolve)
    return result
