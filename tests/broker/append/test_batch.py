"""Batches between brokers and clients in this process: what they cost, and who holds up whom."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack

import grpc.aio
import pytest

from coranto import labels
from coranto.fragments.fragment import sum_from_wire, sum_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.queue import queue_of
from coranto_broker.replication.peers import PeerStream
from coranto_broker.replication.replica import Replica
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, create, eventually, running_broker

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


class Messages(Counter[str]):
    """Records the messages on streams to peers from now on."""

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


async def together(client: RawClient, replica: Replica, appends: list[bytes]) -> list[pb.AppendResponse]:
    """Appends that are all received before the first of them gets the pipeline."""
    queue = queue_of(replica)
    pipeline = await replica.pipeline.take()
    tasks = [asyncio.create_task(client.append(J, content)) for content in appends]
    await eventually(lambda: len(queue) == len(appends))
    replica.pipeline.put(pipeline)
    return await asyncio.gather(*tasks)


async def test_appends_cost_one_round_trip_to_each_peer(
    broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = Messages(monkeypatch)  # Before there are streams.
    async with AsyncExitStack() as stack:
        processes: dict[str, tuple[BrokerProcess, RawClient]] = {}
        for number in range(3):
            settings = broker_settings.model_copy(
                update={"id": f"broker-{number}", "data_dir": broker_settings.data_dir / str(number)}
            )
            processes[settings.id] = await stack.enter_async_context(running_broker(settings))
        wanted = spec()
        wanted.replication = 3
        any_client = processes["broker-0"][1]
        await create(any_client, wanted)
        process, replica = primary_of(J, *(process for process, _ in processes.values()))
        client = processes[process.broker.member.suffix][1]
        for content in (b"first", b"second"):  # The second completes the journal's first fragment.
            assert (await client.append(J, content)).status == pb.OK

        messages.clear()
        alone = await client.append(J, b"alone")
        assert (alone.commit.begin, alone.commit.end) == (11, 16)
        assert messages == {"requests": 2, "acknowledgements": 2}

        messages.clear()
        contents = [b"%d" % number * (number + 1) for number in range(20)]
        responses = await together(client, replica, contents)
        assert messages == {"requests": 2, "acknowledgements": 2}

        whole = b"firstsecondalone"
        for response in sorted(responses, key=lambda response: response.commit.begin):
            content = contents[responses.index(response)]
            assert (response.status, response.commit.begin) == (pb.OK, len(whole))
            assert (sum_from_wire(response.commit.sum), response.total_chunks) == (sum_of(content), 1)
            whole += content
        for _, member in processes.values():
            assert await member.content(J, do_not_proxy=True) == whole


async def test_a_small_append_that_dawdles_holds_up_nobody(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    patient = broker_settings.model_copy(update={"min_append_rate": 0})  # It may dawdle for ever.
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


async def test_what_breaks_a_rule_is_refused_as_without_batches(client: RawClient, spec: MakeSpec) -> None:
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
