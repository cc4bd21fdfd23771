"""Journals of lines refuse appends that end within a line, on each path to a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from coranto import labels
from coranto.client import JournalClient
from coranto.client.append.service import AppendService
from coranto.errors import TornAppend
from coranto.labels import CONTENT_TYPE, CSV, FIXED_FRAMES, JSON_LINES, LINES, label_selector, label_set
from coranto.testing import Cluster
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.host import AppendHost
from coranto_broker.append.queue import queue_of
from coranto_broker.append.states import ProposalPath
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, create, eventually, running_broker

J = "test/journal"
TORN = b'{"customer":"torn"}'
WHOLE = b'{"customer":"whole"}\n'
MakeSpec = Callable[..., pb.JournalSpec]


def in_cluster(main: Callable[[Cluster], Awaitable[None]], brokers: int = 3) -> None:
    async def run(loop: SimLoop) -> None:
        async with Cluster(brokers=brokers) as cluster:
            await main(cluster)

    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(run(loop))
        assert not loop.problems


async def streamed(client: JournalClient, *pieces: bytes) -> int:
    async with client.appender(J) as append:
        for piece in pieces:
            await append.write(piece)
        return (await append.commit()).end


async def content_of(client: JournalClient) -> bytes:
    return await client.read_all(J, 0, await client.head(J))


@pytest.mark.parametrize("append_streams", [True, False])
@pytest.mark.parametrize("replication", [1, 3])
@pytest.mark.parametrize("content_type", [JSON_LINES, CSV])
def test_a_torn_append_is_refused_and_its_neighbours_are_not(
    content_type: str, replication: int, append_streams: bool
) -> None:
    async def main(cluster: Cluster) -> None:
        await cluster.create(J, replication=replication, labels={CONTENT_TYPE: content_type})
        clients = [cluster.client(append_streams=append_streams) for _ in range(4)]
        whole = 0
        for client in clients:  # The first appends are forwarded, unless they reached the primary.
            with pytest.raises(TornAppend, match=r"does not end with a newline.*coranto\.dev/lines=any"):
                await client.append(J, TORN)
            assert (await client.append(J, WHOLE)).begin == whole * len(WHOLE)
            whole += 1
        for _ in range(5):
            contents = [TORN if number % 3 == 1 else WHOLE for number in range(100)]
            found = await asyncio.gather(
                *(clients[number % 4].append(J, each) for number, each in enumerate(contents)), return_exceptions=True
            )
            assert [isinstance(each, TornAppend) for each in found] == [each == TORN for each in contents]
            whole += contents.count(WHOLE)
        assert await content_of(clients[0]) == WHOLE * whole

    in_cluster(main)


@pytest.mark.parametrize("replication", [1, 3])
def test_only_the_end_of_a_whole_append_counts(replication: int) -> None:
    async def main(cluster: Cluster) -> None:
        await cluster.create(J, replication=replication, labels={CONTENT_TYPE: JSON_LINES})
        client = cluster.client()
        large = b'{"a":"' + b"x" * (1 << 20) + b'"}\n'
        assert await streamed(client, large[:-1], b"\n") == len(large)
        for pieces in ((large, large[:-1]), (WHOLE, b"{"), (large[:-1],)):
            with pytest.raises(TornAppend):
                await streamed(client, *pieces)
        assert await streamed(client, b"{", b"}", b"\n", WHOLE) == len(large) + 3 + len(WHOLE)
        # An aborted append leaves nothing.
        async with client.appender(J) as append:
            await append.write(b"{")
        assert await content_of(client) == large + b"{}\n" + WHOLE

    in_cluster(main)


def test_registers_change_only_with_whole_lines_and_empty_appends_are_unchanged() -> None:
    async def main(cluster: Cluster) -> None:
        await cluster.create(J, replication=1, labels={CONTENT_TYPE: JSON_LINES})
        client = cluster.client()
        assert (await client.append(J, b"")).end == 0
        mine = label_set(author="me")
        with pytest.raises(TornAppend):
            await client.append(J, TORN, union_registers=mine)
        assert not (await client.append(J, b"")).registers.labels
        await client.append(J, WHOLE, union_registers=mine)
        assert (await client.append(J, b"", check_registers=label_selector(include=mine_pairs(mine)))).registers == mine

    in_cluster(main)


def mine_pairs(found: pb.LabelSet) -> tuple[tuple[str, str], ...]:
    return labels.as_pairs(found)


@pytest.mark.parametrize(
    ("told", "refuses"),
    [
        ({}, False),
        ({CONTENT_TYPE: "text/plain"}, False),
        ({CONTENT_TYPE: FIXED_FRAMES}, False),
        ({CONTENT_TYPE: "text/plain", LINES: "whole"}, True),
        ({LINES: "whole"}, True),
        ({CONTENT_TYPE: JSON_LINES, LINES: "any"}, False),
        ({CONTENT_TYPE: CSV, LINES: "whole"}, True),
    ],
)
def test_labels_say_which_journals_have_whole_lines(told: dict[str, str], refuses: bool) -> None:
    async def main(cluster: Cluster) -> None:
        await cluster.create(J, replication=1, labels=told)
        client = cluster.client()
        await client.append(J, WHOLE)
        if refuses:
            with pytest.raises(TornAppend):
                await client.append(J, TORN)
        else:
            await client.append(J, TORN)

    in_cluster(main, brokers=1)


def test_a_changed_label_applies_from_the_next_append() -> None:
    async def main(cluster: Cluster) -> None:
        await cluster.create(J, replication=1)
        client = cluster.client()
        for told, refuses in (({CONTENT_TYPE: JSON_LINES}, True), ({LINES: "any"}, False), ({LINES: "whole"}, True)):
            await client.append(J, WHOLE)
            [info] = (await client.list(f"name={J}")).journals
            for name, value in told.items():
                info.spec.labels.CopyFrom(labels.with_value(info.spec.labels, name, value))
            change = pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)
            await client.apply([change])
            if refuses:
                with pytest.raises(TornAppend):
                    await client.append(J, TORN)
            else:
                await client.append(J, TORN)

    in_cluster(main, brokers=1)


def test_a_service_appends_no_content_to_an_incomplete_line() -> None:
    async def main(cluster: Cluster) -> None:
        await cluster.create(J, replication=1, labels={CONTENT_TYPE: JSON_LINES})
        client = cluster.client()
        service = AppendService(client)
        found = [service.append_nowait(J, each) for each in (WHOLE, WHOLE, TORN, WHOLE)]
        with pytest.raises(TornAppend):
            await service.flush()
        assert [each.exception() is None for each in found] == [True, True, False, False]
        service.reset(J)
        await service.append(J, WHOLE)
        await service.flush()
        assert await content_of(client) == WHOLE * 3
        # Other journals accept the same appends, in as few calls.
        await cluster.create("test/bytes", replication=1)
        before = cluster.appends()
        for _ in range(100):
            service.append_nowait("test/bytes", b"bytes")
        await service.flush()
        assert cluster.appends() - before <= 3

    in_cluster(main)


# -- Real brokers: Gazette's protocol by raw calls, and HTTP ----------------------------------------------------------


def _spec_of_lines(spec: MakeSpec, **more: str) -> pb.JournalSpec:
    made: pb.JournalSpec = spec()
    made.labels.CopyFrom(label_set({CONTENT_TYPE: JSON_LINES, **more}))
    return made


async def test_clients_of_gazette_get_a_status_that_they_do_not_retry(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec
) -> None:
    _, client = broker
    await create(client, _spec_of_lines(spec))
    for chunks in ((TORN,), (WHOLE, TORN), (TORN, b" "), (b"x" * 300_000,)):
        refused = await client.append(J, *chunks)
        assert refused.status == pb.NOT_ALLOWED
        assert "does not end with a newline" in refused.store_health_error
    assert (await client.append(J, TORN, b"\n")).commit.end == len(TORN) + 1
    assert await client.content(J) == TORN + b"\n"


async def test_a_torn_append_in_the_queue_is_refused_alone(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, client = broker
    await create(client, _spec_of_lines(spec))
    for _ in range(2):  # The second completes the journal's first fragment.
        assert (await client.append(J, WHOLE)).status == pb.OK
    paths: list[tuple[ProposalPath, int]] = []
    proposed = AppendHost.proposed

    def noted(self: AppendHost, path: ProposalPath, appends: int) -> None:
        paths.append((path, appends))
        proposed(self, path, appends)

    monkeypatch.setattr(AppendHost, "proposed", noted)
    [replica] = [each for each in process.broker.resolver.local_replicas if each.journal == J]
    queue = queue_of(replica)
    pipeline = await replica.pipeline.take()
    contents = [WHOLE, WHOLE, TORN, WHOLE, WHOLE]
    tasks = []
    for number, each in enumerate(contents, 1):
        tasks.append(asyncio.create_task(client.append(J, each)))
        await eventually(lambda number=number: len(queue) == number)  # type: ignore[misc]
    replica.pipeline.put(pipeline)
    answers = await asyncio.gather(*tasks)
    assert [answer.status for answer in answers] == [pb.OK, pb.OK, pb.NOT_ALLOWED, pb.OK, pb.OK]
    assert paths == [(ProposalPath.BATCH, 2), (ProposalPath.BATCH, 2)]
    assert await client.content(J) == WHOLE * 6


async def test_the_gateway_refuses_a_torn_body_with_the_reason(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    settings = broker_settings.model_copy(update={"http_port": 0})
    async with running_broker(settings) as (process, client), aiohttp.ClientSession() as session:
        await create(client, _spec_of_lines(spec))
        url = f"{process.http_endpoint}/{J}"

        async def put(body: Any) -> tuple[int, str]:
            async with session.put(url, data=body) as response:
                return response.status, await response.text()

        status, told = await put(TORN)
        assert status == 403
        assert told.startswith("NOT_ALLOWED: the append does not end with a newline")
        assert "flags" not in told
        assert (await put(WHOLE * 50_000 + b"{"))[0] == 403
        assert (await put(WHOLE * 50_000))[0] == 204
        assert (await put(b""))[0] == 204
        assert await client.content(J) == WHOLE * 50_000
