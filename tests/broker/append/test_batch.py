"""Batches of appends in real brokers: round trips, errors and slow clients."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest

from coranto import labels
from coranto.fragments.fragment import sum_from_wire, sum_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.batch import Batch, BatchPlan
from coranto_broker.append.fsm import HeldPipeline
from coranto_broker.append.host import AppendHost
from coranto_broker.append.queue import JournalQueue, queue_of
from coranto_broker.replication.peers import PeerStream
from coranto_broker.replication.pipeline import Pipeline
from coranto_broker.replication.replica import Replica
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, create, eventually, running_broker

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


class Messages(Counter[str]):
    """Records the messages sent on streams to peers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        send, received = PeerStream._send, PeerStream._received

        def counted_send(stream: PeerStream, request: pb.ReplicateRequest, size: int) -> None:
            self["requests"] += 1
            send(stream, request, size)

        def counted_received(stream: PeerStream, response: pb.ReplicateResponse) -> None:
            self["acknowledgements"] += 1
            received(stream, response)

        monkeypatch.setattr(PeerStream, "_send", counted_send)
        monkeypatch.setattr(PeerStream, "_received", counted_received)


def primary_of(journal: str, *processes: BrokerProcess) -> tuple[BrokerProcess, Replica]:
    for process in processes:
        state = process.broker.keyspace.state
        route = state.route_of(journal)
        member = route.members[route.primary]
        if member.suffix == process.broker.member.suffix:
            found = next(each for each in process.broker.resolver.local_replicas if each.journal == journal)
            return process, found
    raise AssertionError("none of these is the primary")


async def together(
    client: RawClient, replica: Replica, appends: list[bytes]
) -> list[pb.AppendResponse | BaseException]:
    """Run appends that are all received before the first of them gets the pipeline."""
    queue = queue_of(replica)
    pipeline = await replica.pipeline.take()
    tasks = [asyncio.create_task(client.append(J, content)) for content in appends]
    await eventually(lambda: len(queue) == len(appends))
    replica.pipeline.put(pipeline)
    return await asyncio.gather(*tasks, return_exceptions=True)


async def brokers(
    stack: AsyncExitStack, settings: BrokerSettings, count: int
) -> tuple[list[BrokerProcess], list[RawClient]]:
    """Start the brokers of one cluster, and a client of each."""
    found = []
    for number in range(count):
        own = settings.model_copy(update={"id": f"broker-{number}", "data_dir": settings.data_dir / str(number)})
        found.append(await stack.enter_async_context(running_broker(own)))
    return [process for process, _ in found], [client for _, client in found]


async def test_appends_cost_one_round_trip_to_each_peer(
    broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = Messages(monkeypatch)  # Before streams exist.
    async with AsyncExitStack() as stack:
        processes, clients = await brokers(stack, broker_settings, 3)
        wanted = spec()
        wanted.replication = 3
        await create(clients[0], wanted)
        process, replica = primary_of(J, *processes)
        client = clients[processes.index(process)]
        for content in (b"first", b"second"):  # The second completes the journal's first fragment.
            assert (await client.append(J, content)).status == pb.OK

        messages.clear()
        alone = await client.append(J, b"alone")
        assert (alone.commit.begin, alone.commit.end) == (11, 16)
        assert messages == {"requests": 2, "acknowledgements": 2}

        messages.clear()
        contents = [b"%d" % number * (number + 1) for number in range(20)]
        responses = [each for each in await together(client, replica, contents) if isinstance(each, pb.AppendResponse)]
        assert messages == {"requests": 2, "acknowledgements": 2}

        whole = b"firstsecondalone"
        for response in sorted(responses, key=lambda response: response.commit.begin):
            content = contents[responses.index(response)]
            assert (response.status, response.commit.begin) == (pb.OK, len(whole))
            assert (sum_from_wire(response.commit.sum), response.total_chunks) == (sum_of(content), 1)
            whole += content
        for member in clients:
            assert await member.content(J, do_not_proxy=True) == whole


@pytest.mark.parametrize("replication", [1, 3])
@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (JournalQueue, "_take"),
        (BatchPlan, "_snapshot"),
        (Batch, "_question"),
        (Pipeline, "extend"),
        (AppendHost, "proposed"),
        (HeldPipeline, "hand_over"),
        (Pipeline, "gather_ok"),
        (Batch, "_outcomes"),
    ],
)
async def test_each_append_of_a_batch_is_answered_despite_unexpected_errors(
    broker_settings: BrokerSettings,
    spec: MakeSpec,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    step: str,
    replication: int,
) -> None:
    real, failures = getattr(owner, step), list[RuntimeError]()

    def fails(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*args, **options)

    monkeypatch.setattr(owner, step, fails)
    contents = [b"<%d>" % number for number in range(20)]
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        processes, clients = await brokers(stack, broker_settings, replication)
        wanted = spec()
        wanted.replication = replication
        await create(clients[0], wanted)
        process, replica = primary_of(J, *processes)
        client = clients[processes.index(process)]
        for content in (b"first", b"second"):
            assert (await client.append(J, content)).status == pb.OK
        failures.append(RuntimeError("planted"))
        found = await together(client, replica, contents)
        assert not failures
        answered = [each for each in found if not isinstance(each, BaseException)]
        assert len(answered) < len(found) or step == "_snapshot", "an error of one append, or of all that it is with"
        assert (await client.append_when_ready(J, b"after")).status == pb.OK
        content = await client.content(J)
        assert content.endswith(b"after")
        for each in answered:
            assert each.status == pb.OK
            assert content[each.commit.begin : each.commit.end] in contents
        assert all(content.count(each) <= 1 for each in contents)


async def test_a_slow_small_append_delays_no_other_append(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    patient = broker_settings.model_copy(update={"min_append_rate": 0})  # The client may be slow indefinitely.
    async with running_broker(patient) as (_, client):
        await create(client, spec())
        call = client.stub.Append()
        await call.write(pb.AppendRequest(journal=J, union_registers=labels.label_set(author="slow")))
        await call.write(pb.AppendRequest(content=b"slow"))
        async with asyncio.timeout(60):
            for number in range(10):
                assert (await client.append(J, b"quick")).commit.begin == 5 * number
        await call.write(pb.AppendRequest())
        await call.done_writing()
        response = await call
        assert (response.commit.begin, response.registers) == (50, labels.label_set(author="slow"))


async def test_invalid_appends_are_refused_as_without_batches(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    first, content, commit = pb.AppendRequest(journal=J), pb.AppendRequest(content=b"abc"), pb.AppendRequest()
    for messages, reason in (
        ((first, content), "unexpected EOF"),
        ((first, content, commit, content), "expected the end of the stream"),
        ((first, content, pb.AppendRequest(journal=J, content=b"x"), commit), "only the first message"),
        (
            (pb.AppendRequest(journal=J, union_registers=labels.label_set(author="me")), commit),
            "append at least one byte",
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.append_messages(*messages)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason in str(raised.value.details())
    after = await client.append(J, b"fine")
    assert after.commit.begin == 0


async def test_batches_can_be_turned_off(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    settings = broker_settings.model_copy(update={"group_append_bytes": 0})
    async with running_broker(settings) as (process, client):
        await create(client, spec())
        responses = await asyncio.gather(*(client.append(J, b"x") for _ in range(10)))
        assert sorted(response.commit.begin for response in responses) == list(range(10))
        assert process.broker.metrics.group_appends.sum == 0


async def test_large_messages_between_small_ones_are_hashed_in_order(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    rng = random.Random(1)
    chunks = [rng.randbytes(size) for size in (10, 300_000, 5, 200_000, 500_000, 131_072, 1)]
    response = await client.append(J, *chunks)
    assert sum_from_wire(response.commit.sum) == sum_of(b"".join(chunks))
    assert await client.content(J) == b"".join(chunks)
