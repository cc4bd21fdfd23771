"""The blocking client: the same calls from plain code, threads and forked processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from coranto.client import Appended, SyncAppendService, SyncJournalClient
from coranto.client.loop import LoopThread, run_blocking
from coranto.errors import (
    AppendOutcomeUnknown,
    JournalNotFound,
    NotAllowed,
    OffsetJump,
    OffsetNotYetAvailable,
    Unavailable,
)
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker
from coranto.wire import protocol_pb2 as pb

NAME = "test/journal"


class Broker:
    """A fake broker in a separate thread."""

    def __init__(self) -> None:
        self.loop = LoopThread("fake-broker")
        self.fake = self.loop.run(self._start())
        self.endpoint = self.fake.endpoint

    async def _start(self) -> FakeBroker:
        broker = await FakeBroker().__aenter__()
        broker.create(NAME)
        return broker

    @property
    def content(self) -> bytes:
        return self.fake.journals[NAME].content

    def write(self, content: bytes) -> None:
        self.loop.run(self.fake.write(NAME, content))

    def reached(self, point: CallPoint, times: int = 1) -> None:
        self.loop.run(self.fake.reached(point, times))

    def cut(self) -> None:
        async def cut() -> None:
            self.fake.cut()

        self.loop.run(cut())

    def stop(self) -> None:
        self.loop.run(self.fake.__aexit__(None, None, None))
        self.loop.stop()


@pytest.fixture
def remote() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.stop()


@pytest.fixture
def sync(remote: Broker) -> Iterator[SyncJournalClient]:
    with SyncJournalClient(remote.endpoint, retry_timeout=60) as client:
        yield client


def test_every_call(sync: SyncJournalClient, remote: Broker) -> None:
    assert sync.list("name=test/journal").names == (NAME,)
    assert sync.append(NAME, b"hello ").end == 6
    with sync.appender(NAME) as append:
        append.write(b"wor")
        append.write(b"ld")
        assert append.length == 5
        assert append.commit().begin == 6
    with sync.appender(NAME) as append:
        append.write(b"never")
    assert remote.content == b"hello world"
    assert b"".join(chunk.content for chunk in sync.read(NAME, 4)) == b"o world"
    assert sync.read_all(NAME, 0, 5) == b"hello"
    assert sync.head(NAME) == 11
    assert [item.fragment.end for item in sync.fragments(NAME)] == [11]
    assert sync.apply([pb.ApplyRequest.Change(delete=NAME, expect_mod_revision=-1)]).etcd.revision > 0
    assert sync.list().names == ()


def test_errors_are_raised_to_the_caller(sync: SyncJournalClient, remote: Broker) -> None:
    with pytest.raises(JournalNotFound):
        sync.append("no/such/journal", b"x")
    with pytest.raises(OffsetNotYetAvailable):
        sync.read_all(NAME, 0, 5)
    with pytest.raises(OffsetNotYetAvailable):
        next(sync.read(NAME, 5))


def test_large_content_passes_the_bounded_queue(sync: SyncJournalClient, remote: Broker) -> None:
    content = os.urandom(1 << 20) * 30
    remote.write(content)
    assert b"".join(chunk.content for chunk in sync.read(NAME)) == content


def test_chunks_before_an_error_are_delivered_before_it(
    sync: SyncJournalClient, remote: Broker, tmp_path: Path
) -> None:
    journal = remote.fake.journals[NAME]
    for _ in range(3):
        remote.write(b"0123")
        journal.roll(tmp_path)
    del journal.stored[1]
    chunks = sync.read(NAME, fail_on_jump=True)
    assert next(chunks).content == b"0123"
    with pytest.raises(OffsetJump):
        next(chunks)


def test_leaving_a_read_early_ends_it(sync: SyncJournalClient, remote: Broker) -> None:
    remote.write(bytes(20 << 20))
    chunks = sync.read(NAME, block=True)
    assert next(chunks).offset == 0
    chunks.close()  # type: ignore[attr-defined]

    def write_later() -> None:
        remote.reached(CallPoint.READ_BEGUN, times=3)
        remote.write(b"later")

    # The first read, the second read's query of the write head, and the second read.
    tail = sync.read(NAME, -1, block=True)
    writer = threading.Thread(target=write_later)
    writer.start()
    assert next(tail).content == b"later"
    tail.close()  # type: ignore[attr-defined]
    writer.join()


def test_a_timeout_bounds_each_call(remote: Broker) -> None:
    with SyncJournalClient(remote.endpoint, timeout=1.5) as client:
        remote.fake.at(CallPoint.LIST, Break.HANG)
        with pytest.raises(Unavailable, match=r"1\.5 s"):
            client.list()
        remote.fake.at(CallPoint.APPEND_HALF_CLOSED, Break.HANG)
        with pytest.raises(AppendOutcomeUnknown, match=r"1\.5 s"):
            client.append(NAME, b"content")
        with pytest.raises(Unavailable, match=r"nothing arrived within 1\.5 s"):
            next(client.read(NAME, block=True))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore Python's handler of SIGINT, because Spark may have replaced it earlier in this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("interruptible")
def test_an_interruption_rolls_the_call_back(sync: SyncJournalClient, remote: Broker) -> None:
    main = threading.get_ident()

    def interrupt() -> None:
        remote.reached(CallPoint.APPEND_BEGUN)
        signal.pthread_kill(main, signal.SIGINT)

    remote.fake.at(CallPoint.APPEND_BEGUN, Break.HANG)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sync.append(NAME, b"never")
    thread.join()
    assert sync.append(NAME, b"content").begin == 0
    assert remote.content == b"content"


def test_threads_share_a_client(sync: SyncJournalClient, remote: Broker) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: sync.append(NAME, b"%d," % number), range(50)))
    assert sorted(remote.content.split(b",")[:-1], key=int) == [b"%d" % number for number in range(50)]
    assert sorted(result.begin for result in results)[0] == 0


def test_a_client_round_trips_through_pickle(sync: SyncJournalClient, remote: Broker) -> None:
    sync.append(NAME, b"content")
    copy = pickle.loads(pickle.dumps(sync))
    assert copy.config == sync.config
    assert copy.read_all(NAME, 0, 7) == b"content"
    copy.close()


def test_a_closed_client_reconnects(sync: SyncJournalClient) -> None:
    sync.close()
    sync.close()
    assert sync.head(NAME) == 0


def test_a_call_on_the_clients_own_loop_is_refused(sync: SyncJournalClient) -> None:
    async def call() -> None:
        sync.head(NAME)

    with pytest.raises(RuntimeError, match="its own event loop"):
        run_blocking(call())


def test_a_call_within_another_event_loop(sync: SyncJournalClient) -> None:
    async def call() -> int:
        return sync.head(NAME)

    assert asyncio.run(call()) == 0


def test_the_append_service(sync: SyncJournalClient, remote: Broker) -> None:
    with sync.append_service() as service:
        placed = [service.append(NAME, b"%d," % number) for number in range(1000)]
    assert remote.content == b"".join(b"%d," % number for number in range(1000))
    assert placed[-1].result(timeout=60).end == len(remote.content)
    assert remote.fake.count("Append") < 1000


def test_the_append_service_blocks_while_too_many_bytes_are_pending(sync: SyncJournalClient, remote: Broker) -> None:
    remote.fake.at(CallPoint.APPEND_BEGUN, Break.HANG)
    service = sync.append_service(pending_bytes=10)
    first = service.append(NAME, b"12345678")
    remote.reached(CallPoint.APPEND_BEGUN)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(service.append, NAME, b"9abcdef")
        with pytest.raises(TimeoutError):
            second.result(timeout=0.05)
        assert not first.cancel()
        remote.cut()
        assert second.result(timeout=60).result(timeout=60).begin == 8
    service.flush()
    assert remote.content == b"123456789abcdef"


def test_failures_of_the_append_service(sync: SyncJournalClient, remote: Broker) -> None:
    remote.fake.at(CallPoint.APPEND_BEGUN, pb.NOT_ALLOWED)
    service = sync.append_service()
    with pytest.raises(NotAllowed):
        service.append(NAME, b"content").result(timeout=60)
    with pytest.raises(NotAllowed):
        service.flush()
    service.reset(NAME)
    service.append(NAME, b"content").result(timeout=60)
    service.flush()
    remote.fake.at(CallPoint.APPEND_BEGUN, Break.HANG)
    dropped: list[Future[Appended]] = []
    with pytest.raises(ZeroDivisionError):
        _append_and_fail(service, dropped)
    with pytest.raises(CancelledError):
        dropped[0].result(timeout=60)
    assert remote.content == b"content"


def _append_and_fail(service: SyncAppendService, dropped: list[Future[Appended]]) -> None:
    with service:
        dropped.append(service.append(NAME, b"never"))
        raise ZeroDivisionError


# -- Processes -----------------------------------------------------------------------------------------------------

_CHILD = """
import os, sys
from coranto.client import SyncJournalClient
client = SyncJournalClient(sys.argv[1], retry_timeout=60)
before = sys.argv[2] == "connected"
if before:
    client.head("test/journal")
child = os.fork()
if child == 0:
    code = 1
    try:
        result = client.append("test/journal", b"from the child;")
        code = 0 if result.end == result.begin + 15 else 2
    except Exception as error:
        sys.stderr.write(str(error))
        code = 3
    finally:
        sys.stderr.flush()
        os._exit(code)
_, status = os.waitpid(child, 0)
client.append("test/journal", b"from the parent;")
client.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def _fork(remote: Broker, state: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _CHILD, remote.endpoint, state], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_forked_child_opens_its_own_connection(remote: Broker) -> None:
    done = _fork(remote, "not connected")
    assert done.returncode == 0, done.stderr
    assert remote.content == b"from the child;from the parent;"


def test_a_child_forked_after_connecting_gets_an_error(remote: Broker) -> None:
    done = _fork(remote, "connected")
    assert done.returncode == 3, done.stderr
    assert "forked from one that had already connected" in done.stderr
    assert remote.content == b"from the parent;"


def test_a_process_that_does_not_close_its_client_still_ends(remote: Broker) -> None:
    program = (
        "import sys; from coranto.client import SyncJournalClient\n"
        "client = SyncJournalClient(sys.argv[1]); client.head('test/journal')\n"
        "reading = client.read('test/journal', block=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, remote.endpoint], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
