"""Helpers for tests of brokers: a manual clock, a disk that fails on demand, a broker in this process."""

from __future__ import annotations

import asyncio
import errno
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from coranto.client.peer_status import PeerStatus
from coranto.effects import Bytes, DiskFile, LocalDisk
from coranto.fragments.fragment import Fragment, parse_content_path
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc
from coranto_broker.replication.replica import Replica
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings


class ManualClock:
    """A clock that advances only by `advance`. Waiting only lets other tasks run."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 100.0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._monotonic += seconds


class FaultyDisk(LocalDisk):
    """This machine's disk, with faults.

    Writes to files that contain `full` in their name fail midway; if `stuck`, truncating them fails, too. Syncs of
    files that contain `failing` in their name fail. `room` is the reported free space.
    """

    def __init__(self) -> None:
        self.full: str | None = None
        self.room = 1 << 40
        self.stuck = False
        self.failing: str | None = None
        self.syncs: list[str] = []
        self.folder_syncs: list[str] = []

    def sync_folder(self, folder: Path) -> None:
        self.folder_syncs.append(folder.name)
        super().sync_folder(folder)

    def free_bytes(self, folder: Path) -> int:
        return self.room

    def open(self, path: Path) -> Any:
        return _FaultyFile(self, path, super().open(path))


class _FaultyFile:
    def __init__(self, disk: FaultyDisk, path: Path, file: DiskFile) -> None:
        self._disk = disk
        self._path = path
        self._file = file

    def write(self, data: Bytes) -> None:
        if self._disk.full is not None and self._disk.full in self._path.name:
            self._file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "no space left on device", str(self._path))
        self._file.write(data)

    def sync(self) -> None:
        self._disk.syncs.append(self._path.name)
        if self._disk.failing is not None and self._disk.failing in self._path.name:
            raise OSError(errno.EIO, "the disk cannot write", str(self._path))
        self._file.sync()

    def read_at(self, offset: int, length: int) -> bytes:
        return self._file.read_at(offset, length)

    def truncate(self, length: int) -> None:
        if self._disk.stuck and self._disk.full is not None and self._disk.full in self._path.name:
            raise OSError(errno.EIO, "cannot truncate", str(self._path))
        self._file.truncate(length)

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()


class RawClient:
    """The broker's plain RPCs: the test creates every message."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            endpoint.removeprefix("http://"), options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub: pb_grpc.JournalAsyncStub = pb_grpc.JournalStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def apply(self, *specs: pb.JournalSpec, revision: int = 0) -> pb.ApplyResponse:
        """Create journals or, with a revision, change them."""
        changes = [pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=revision) for spec in specs]
        response: pb.ApplyResponse = await self.stub.Apply(pb.ApplyRequest(changes=changes))
        return response

    async def listing(self, **request: Any) -> list[pb.ListResponse]:
        return [response async for response in self.stub.List(pb.ListRequest(**request))]

    async def append_messages(self, *messages: pb.AppendRequest) -> pb.AppendResponse:
        """Send exactly these messages, close, and return the response."""

        async def stream() -> AsyncIterator[pb.AppendRequest]:
            for message in messages:
                yield message

        call = self.stub.Append(stream())
        ended = PeerStatus(call)
        try:
            response: pb.AppendResponse = await call
        except grpc.aio.AioRpcError as error:
            raise await ended.error_of(error) from error
        return response

    async def append(self, journal: str, *chunks: bytes, **parameters: Any) -> pb.AppendResponse:
        """Send one well-formed append."""
        return await self.append_messages(
            pb.AppendRequest(journal=journal, **parameters),
            *(pb.AppendRequest(content=chunk) for chunk in chunks),
            pb.AppendRequest(),
        )

    async def append_when_ready(self, journal: str, *chunks: bytes, **parameters: Any) -> pb.AppendResponse:
        """Append, and repeat it until the journal is assigned to its brokers."""
        async with asyncio.timeout(60):
            while True:
                response = await self.append(journal, *chunks, **parameters)
                if response.status not in (pb.NO_JOURNAL_PRIMARY_BROKER, pb.INSUFFICIENT_JOURNAL_BROKERS):
                    return response
                await asyncio.sleep(0.01)

    async def read(self, journal: str, offset: int = 0, **parameters: Any) -> list[pb.ReadResponse]:
        request = pb.ReadRequest(journal=journal, offset=offset, **parameters)
        return [response async for response in self.stub.Read(request)]

    async def content(self, journal: str, offset: int = 0, **parameters: Any) -> bytes:
        """Return the content from `offset` on. Fails if it has a gap."""
        pieces: list[bytes] = []
        for response in await self.read(journal, offset, **parameters):
            if response.content:
                assert response.offset == offset, (response.offset, offset)
                pieces.append(response.content)
                offset += len(response.content)
        return b"".join(pieces)


async def eventually(condition: Callable[[], object | Awaitable[object]], seconds: float = 60.0) -> None:
    """Wait until `condition` holds. Raises TimeoutError after `seconds`, which allow for a stalled machine."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)  # Poll: files and other processes send no notifications.


async def listed_again(replicas: Sequence[Replica]) -> None:
    """Wait until these replicas have begun and completed another listing of their stores."""

    async def begins() -> None:
        before = {each: each._refreshed_at for each in replicas}
        await eventually(lambda: all(each._refreshed_at > at for each, at in before.items()))

    await begins()
    await begins()  # The listing before is complete.


async def create(client: RawClient, spec: pb.JournalSpec) -> None:
    """Create a journal and wait until it can be appended to."""
    response = await client.apply(spec)
    assert response.status == pb.OK
    ready = await client.append_when_ready(spec.name)
    assert ready.status == pb.OK


def stored_files(settings: BrokerSettings, journal: str = "test/journal") -> dict[Path, Fragment]:
    """Return the files of a journal in the store `file:///frags/`, with the fragments that their names denote."""
    assert settings.file_root is not None
    folder = settings.file_root / "frags" / journal
    return {
        path: parse_content_path(journal, str(path.relative_to(folder)))
        for path in sorted(folder.rglob("*-*"))
        if path.is_file() and not path.name.startswith(".")
    }


GRACE_SECONDS = 0.5
"""The time for active calls at the end. Brokers that replicate to one another always have some."""


@asynccontextmanager
async def running_broker(settings: BrokerSettings) -> AsyncIterator[tuple[BrokerProcess, RawClient]]:
    """Run a broker in this process, on a free port. Yields it and a raw client."""
    process = BrokerProcess(settings)
    process.grace_seconds = GRACE_SECONDS
    async with process:
        client = RawClient(process.endpoint)
        try:
            yield process, client
        finally:
            await client.close()
