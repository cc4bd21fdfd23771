"""Small appends over one stream: their order, their outcomes when the stream breaks, and hostile clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from coranto.client import JournalClient
from coranto.client.append import stream as client_stream
from coranto.client.append.stream import AppendStream
from coranto.errors import AppendOutcomeUnknown, CorantoError, StatusError
from coranto.labels import label_selector, label_set
from coranto.testing import Cluster, SyncCluster
from coranto.testing.cluster import STORE_URL
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.transport.calls import GrpcCall
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswer, AppendAnswers, AppendBatch, StreamedAppend
from coranto_broker.append.queue import JournalQueue
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.handlers import append_stream

J, OTHER = "test/journal", "test/other"
FRAGMENT = pb.JournalSpec.Fragment(
    length=1 << 20, compression_codec=pb.NONE, stores=[STORE_URL], refresh_interval=Duration(seconds=30)
)


def in_cluster(main: Callable[[Cluster, SimLoop], Awaitable[None]], **options: Any) -> None:
    """Run `main` with a cluster of three brokers, in virtual time."""

    async def run(loop: SimLoop) -> None:
        async with Cluster(brokers=3, **options) as cluster:
            await main(cluster, loop)

    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(run(loop))
        assert not loop.problems


async def append_numbers(client: JournalClient, journal: str, count: int) -> list[int]:
    """Append numbers concurrently, and return those that committed, by their order in the journal."""

    async def one(number: int) -> tuple[int, int] | None:
        try:
            return (await client.append(journal, f"{number:06}\n".encode(), retry_timeout=0)).begin, number
        except CorantoError:
            return None

    done = await asyncio.gather(*(one(number) for number in range(count)))
    return [number for _, number in sorted(each for each in done if each is not None)]


async def numbers_in(client: JournalClient, journal: str) -> list[int]:
    return [int(line) for line in (await client.read_all(journal, 0, await client.head(journal))).split()]


@pytest.mark.parametrize("replication", [1, 3])
def test_appends_of_a_stream_commit_once_and_in_order(replication: int) -> None:
    async def main(cluster: Cluster, loop: SimLoop) -> None:
        client = cluster.client()
        for journal in (J, OTHER):
            await cluster.create(journal, replication=replication)
        found = await asyncio.gather(*(append_numbers(client, journal, 500) for journal in (J, OTHER)))
        for journal, committed in zip((J, OTHER), found, strict=True):
            assert committed == list(range(500)) == await numbers_in(client, journal)
        # The first appends are sent to any broker, and all others to the primaries.
        assert cluster.calls("Append") == 0
        assert cluster.calls("AppendStream") <= 3

    in_cluster(main)


@pytest.mark.parametrize("replication", [1, 3])
def test_an_answer_that_cannot_be_encoded_fails_one_append(replication: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = AppendOutcome.encode, iter(range(1000))

    def fails(outcome: AppendOutcome) -> bytes:
        if next(calls) == 40:
            raise RuntimeError("planted")
        return encode(outcome)

    async def main(cluster: Cluster, loop: SimLoop) -> None:
        await cluster.create(J, replication=replication)
        client = cluster.client()
        await append_numbers(client, J, 1)
        monkeypatch.setattr(AppendOutcome, "encode", fails)
        async with asyncio.timeout(60):
            committed = await append_numbers(client, J, 100)
        assert committed == [*range(40), *range(41, 100)]
        assert await numbers_in(client, J) == [0, *range(100)]

    in_cluster(main)


def test_a_queue_that_reorders_appends_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = JournalQueue._commit_next

    async def commit_reversed(queue: JournalQueue, head: QueuedAppend) -> None:
        queue._waiting = dict(reversed(queue._waiting.items()))
        await real(queue, next(iter(queue._waiting)))

    async def main(cluster: Cluster, loop: SimLoop) -> None:
        await cluster.create(J, replication=3)
        client = cluster.client()
        await client.append(J, b"000000\n")
        assert await append_numbers(client, J, 100) != list(range(100))

    monkeypatch.setattr(JournalQueue, "_commit_next", commit_reversed)
    in_cluster(main)


def test_appends_that_wait_to_be_resolved_keep_their_order() -> None:
    """The first appends go to a broker that forwards them, or that has not resolved the journal."""

    async def main(cluster: Cluster, loop: SimLoop) -> None:
        for number in range(6):
            journal = f"test/order/{number}"
            await cluster.create(journal, replication=1 + number % 3)
            assert await append_numbers(cluster.client(), journal, 200) == list(range(200))

    in_cluster(main)


def test_appends_keep_their_order_while_brokers_exit() -> None:
    async def main(cluster: Cluster, loop: SimLoop) -> None:
        await cluster.create(J, replication=2)
        client, orders = cluster.client(), []
        for number in range(3):
            appending = asyncio.create_task(append_numbers(client, J, 300))
            await asyncio.sleep(0.001 * number)
            (listed,) = (await client.list()).journals
            primary = listed.route.members[listed.route.primary].suffix
            await cluster.stop(int(primary.rpartition("-")[2]))
            orders.append(await appending)
            await cluster.start(int(primary.rpartition("-")[2]))
            await cluster.ready(J)
        assert all(order == sorted(order) for order in orders)

    in_cluster(main)


@pytest.mark.parametrize("replication", [1, 3])
def test_appends_of_a_batch_have_their_own_conditions_and_registers(replication: int) -> None:
    async def main(cluster: Cluster, loop: SimLoop) -> None:
        await cluster.create(J, replication=replication)
        client = cluster.client()
        await client.append(J, b"0\n", union_registers=label_set(epoch="0"))

        async def raise_epoch(epoch: int) -> object:
            expected, then = label_selector(include=[("epoch", str(epoch - 1))]), label_set(epoch=str(epoch))
            try:
                done = await client.append(J, f"{epoch}\n".encode(), check_registers=expected, union_registers=then)
            except StatusError as error:
                return error.status
            return {label.name: label.value for label in done.registers.labels}["epoch"]

        # The third does not match the register, and is refused alone.
        found = await asyncio.gather(*(raise_epoch(epoch) for epoch in (1, 2, 9, 3, 4)))
        assert found == ["1", "2", pb.REGISTER_MISMATCH, "3", "4"]
        assert await numbers_in(client, J) == [0, 1, 2, 3, 4]

    in_cluster(main)


def test_only_unanswered_appends_of_a_broken_stream_have_an_unknown_outcome() -> None:
    async def main(cluster: Cluster, loop: SimLoop) -> None:
        await cluster.create(J, replication=3)
        client = cluster.client(retry_timeout=30)
        await client.append(J, b"first\n")
        rpc = cluster._world.rpc
        under_way = [asyncio.create_task(client.append(J, b"x\n")) for _ in range(20)]
        await asyncio.sleep(0)
        for call in [call for call in rpc.live if call.method.name == "AppendStream" and call.node == "client"]:
            rpc.break_call(call)
        outcomes = await asyncio.gather(*under_way, return_exceptions=True)
        unknown = [each for each in outcomes if isinstance(each, AppendOutcomeUnknown)]
        assert len(unknown) == len([each for each in outcomes if isinstance(each, BaseException)])
        # The client opens another stream.
        await client.append(J, b"last\n")
        content = await client.read_all(J, 0, await client.head(J))
        assert content.count(b"x\n") >= 20 - len(unknown)

    in_cluster(main)


def test_no_append_has_an_unknown_outcome_when_a_broker_exits_gracefully() -> None:
    async def main(cluster: Cluster, loop: SimLoop) -> None:
        await cluster.create(J, replication=3)
        client = cluster.client(retry_timeout=60)
        stop, sent = asyncio.Event(), 0

        async def writer() -> None:
            nonlocal sent
            while not stop.is_set():
                await client.append(J, b"x\n")
                sent += 1
                await asyncio.sleep(0.2)

        writers = [asyncio.create_task(writer()) for _ in range(4)]
        for number in range(2):
            await asyncio.sleep(2)
            await cluster.stop(number)
            await asyncio.sleep(2)
            await cluster.start(number)
        stop.set()
        await asyncio.gather(*writers)
        assert await client.head(J) == 2 * sent

    in_cluster(main)


async def refused(cluster: Cluster, *batches: AppendBatch) -> str:
    """Return the details of the error that ends a stream with these messages."""
    stub: Any = cluster._world.rpc.stub("hostile", cluster.endpoint.split(",")[0])
    call = stub.AppendStream()
    for batch in batches:
        await call.write(batch)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(await call.details())


async def answers_to(cluster: Cluster, *appends: StreamedAppend) -> dict[int, AppendAnswer]:
    stub: Any = cluster._world.rpc.stub("hostile", cluster.endpoint.split(",")[0])
    call = stub.AppendStream()
    for batch in (AppendBatch(), AppendBatch(appends=appends)):
        await call.write(batch)
    await call.done_writing()
    found: dict[int, AppendAnswer] = {}
    while (answers := await call.read()) is not grpc.aio.EOF:
        found.update((answer.id, answer) for answer in answers.answers)
    return found


def test_streams_of_hostile_clients_are_refused() -> None:
    async def main(cluster: Cluster, loop: SimLoop) -> None:
        await cluster.create(J, replication=1)
        good = StreamedAppend(id=1, request=pb.AppendRequest(journal=J), content=b"x\n")
        assert "first message of the stream must be empty" in await refused(cluster, AppendBatch(appends=[good]))
        twice = await refused(cluster, AppendBatch(), AppendBatch(appends=[good, *[good] * 3]))
        assert "append 1 of this stream is not answered yet" in twice

        appends = [
            StreamedAppend(
                id=2, request=pb.AppendRequest(journal=J), content=b"x" * (append_stream.MAX_CONTENT_BYTES + 1)
            ),
            StreamedAppend(id=3, request=pb.AppendRequest(journal=J, content=b"x")),
            StreamedAppend(id=4, content=b"x"),
            StreamedAppend(id=5, request=pb.AppendRequest(journal="no/such/journal"), content=b"x"),
            StreamedAppend(id=6, request=pb.AppendRequest(journal=J, union_registers=label_set(epoch="1"))),
            good,
        ]
        found = await answers_to(cluster, *appends)
        assert sorted(found) == [1, 2, 3, 4, 5, 6]
        invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert [found[number].code for number in (2, 3, 4, 6)] == [invalid] * 4
        assert pb.AppendResponse.FromString(found[5].response).status == pb.JOURNAL_NOT_FOUND
        assert pb.AppendResponse.FromString(found[1].response).status == pb.OK

    in_cluster(main)


def test_a_client_that_reads_no_answers_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_stream, "STREAM_APPENDS", 10)
    taken = 0
    real = append_stream._Stream.take

    def take(stream: Any, append: StreamedAppend, size: int, refusal: None) -> None:
        nonlocal taken
        taken += 1
        real(stream, append, size, refusal)

    async def stalled(*_: object) -> None:
        await asyncio.Event().wait()

    async def main(cluster: Cluster, loop: SimLoop) -> None:
        await cluster.create(J, replication=1)
        stub: Any = cluster._world.rpc.stub("hostile", cluster.endpoint.split(",")[0])
        call = stub.AppendStream()
        await call.write(AppendBatch())
        for number in range(100):
            append = StreamedAppend(id=number + 1, request=pb.AppendRequest(journal=J), content=b"x\n")
            await call.write(AppendBatch(appends=[append]))
        await asyncio.sleep(5)
        assert taken == 11
        call.cancel()

    monkeypatch.setattr(append_stream._Stream, "take", take)
    monkeypatch.setattr(append_stream._Stream, "send", stalled)
    in_cluster(main)


def test_an_unexpected_error_ends_only_its_append(monkeypatch: pytest.MonkeyPatch) -> None:
    real = JournalQueue._commit_inline

    def commit(queue: JournalQueue, append: QueuedAppend) -> bool:
        if append.content == b"bad\n":
            raise RuntimeError("a bug")
        return real(queue, append)

    async def main(cluster: Cluster, loop: SimLoop) -> None:
        await cluster.create(J, replication=1)
        client = cluster.client()
        await client.append(J, b"first\n")
        await client.append(J, b"second\n")
        done = await asyncio.gather(
            *(client.append(J, content) for content in (b"good\n", b"bad\n", b"good\n")), return_exceptions=True
        )
        assert isinstance(done[1], AppendOutcomeUnknown)
        assert (done[0].end, done[2].end) == (18, 23)  # type: ignore[union-attr]

    monkeypatch.setattr(JournalQueue, "_commit_inline", commit)
    in_cluster(main)


def test_a_stalled_journal_blocks_no_other_journal_of_the_stream() -> None:
    async def main(cluster: Cluster, loop: SimLoop) -> None:
        slow = pb.JournalSpec(name=J, replication=1, flags=pb.JournalSpec.O_RDWR, max_append_rate=100)
        slow.fragment.CopyFrom(FRAGMENT)
        await cluster.create(slow)
        for number in range(3):
            await cluster.create(f"{OTHER}/{number}", replication=1)
        client = cluster.client()
        await client.append(J, b"x" * 100)
        delayed = [asyncio.create_task(client.append(J, b"x" * 100)) for _ in range(2000)]
        await asyncio.sleep(1)
        began = loop.time()
        await asyncio.gather(*(client.append(f"{OTHER}/{n % 3}", b"x\n") for n in range(1000)))
        assert loop.time() - began < 5
        assert sum(each.done() for each in delayed) < 100
        for each in delayed:
            each.cancel()
        await asyncio.gather(*delayed, return_exceptions=True)

    in_cluster(main)


def test_all_journals_of_a_stream_get_their_turn() -> None:
    sent: list[str] = []

    class Call:
        async def write(self, batch: AppendBatch) -> None:
            sent.extend(append.request.journal for append in batch.appends)
            await asyncio.sleep(0.1)
            answers.put_nowait(AppendAnswers(answers=[AppendAnswer(id=append.id) for append in batch.appends]))

        async def read(self) -> Any:
            return await answers.get()

        async def done_writing(self) -> None:
            answers.put_nowait(grpc.aio.EOF)

        def cancel(self) -> None:
            return

    async def main() -> None:
        nonlocal answers
        answers = asyncio.Queue()
        stream = AppendStream(GrpcCall(Call()))
        journals = [f"test/{number}" for number in range(8)]
        # Each journal has more than its share, and all have more than the window.
        content = b"x" * client_stream.MAX_CONTENT_BYTES
        work = [stream.append(pb.AppendRequest(journal=journal), content, None) for journal in journals * 40]
        await asyncio.gather(*work)
        await stream.close()

    answers: asyncio.Queue[Any]
    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(main())
    first_half = Counter(sent[: len(sent) // 2])
    assert len(first_half) == 8
    share = client_stream.JOURNAL_BYTES // client_stream.MAX_CONTENT_BYTES
    assert max(first_half.values()) - min(first_half.values()) <= share


def test_large_answers_are_sent_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_stream, "ANSWER_BYTES", 4 << 10)

    async def main(cluster: Cluster, loop: SimLoop) -> None:
        await cluster.create(J, replication=3)
        client = cluster.client()
        await client.append(J, b"first\n", union_registers=label_set(large="x" * 1000))
        sizes: list[int] = []

        def record(call: Any, to_server: bool, message: tuple[Any, ...]) -> bool:
            if call.method.name == "AppendStream" and not to_server and message[0] == "message":
                sizes.append(len(message[1]))
            return True

        cluster._world.rpc.on_delivery = record
        done = await asyncio.gather(*(client.append(J, b"x\n") for _ in range(100)))
        assert len({each.end for each in done}) == 100
        assert sum(sizes) > 100_000
        assert max(sizes) < 8 << 10

    in_cluster(main)


CLIENT = """
import asyncio, logging, sys
from coranto.client import JournalClient

async def main():
    async with JournalClient(sys.argv[1]) as client:
        await asyncio.gather(*(client.append(sys.argv[2], b"x\\n") for _ in range(20)))

logging.basicConfig()
for _ in range(5):
    asyncio.run(main())
"""


def test_grpc_reports_no_errors_to_consecutive_event_loops() -> None:
    with SyncCluster() as cluster:
        cluster.create(J)
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, cluster.endpoint, J], capture_output=True, text=True, check=True
        )
        assert (done.stdout, done.stderr) == ("", "")
        assert cluster.client().head(J) == 200
