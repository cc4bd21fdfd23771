"""Gateways commit each request once: repeated, reordered, at two gateways, and across restarts."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import aiohttp
import pytest

from coranto.client import JournalClient
from coranto.errors import CorruptData, InvalidInput, Unavailable
from coranto.ingest.gateway.service import WebhookIngest
from coranto.streams.writer.multi_key.batch_writer import BatchWriter
from tests.platform.ingest.gateway.posting import STREAM, found, gateway, post, spec
from tests.platform.ingest.lists import Lists, Unreliable, events, ingest, until
from tests.platform.ingest.lists import spec as lists_spec


async def test_a_request_is_committed_before_it_is_answered(client: JournalClient) -> None:
    async with gateway(client) as ingest, aiohttp.ClientSession() as session:
        status, answer = await post(session, ingest.url, {"id": 1})
        assert (status, answer["events"], answer["duplicate"]) == (200, 1, False)
        [event] = await events(client, STREAM)
        assert (event["id"], event["_meta"]["request"], event["_meta"]["item"]) == (1, answer["request"], 0)
        assert set(event["_meta"]) == {"uuid", "request", "item"}


async def test_a_repeated_key_is_committed_once_even_after_a_restart(client: JournalClient) -> None:
    async with aiohttp.ClientSession() as session:
        async with gateway(client) as ingest:
            first = await post(session, ingest.url, [{"id": 1}, {"id": 2}], key="a")
            again = await post(session, ingest.url, [{"id": 1}, {"id": 2}], key="a")
        assert again == (200, {**first[1], "duplicate": True})
        async with gateway(client) as ingest:
            assert await post(session, ingest.url, [{"id": 1}, {"id": 2}], key="a") == again
            status, answer = await post(session, ingest.url, [{"id": 3}], key="a")
            assert (status, set(answer)) == (409, {"error"})
    assert await found(client) == [{"id": 1}, {"id": 2}]


async def test_two_gateways_commit_a_key_once(client: JournalClient) -> None:
    chance = random.Random(3)
    async with gateway(client) as one, gateway(client) as other, aiohttp.ClientSession() as session:
        requests = [(url, number) for number in range(150) for url in (one.url, other.url, one.url)]
        chance.shuffle(requests)
        room = asyncio.Semaphore(16)

        async def send(url: str, number: int) -> tuple[int, bool]:
            async with room:
                status, answer = await post(session, url, {"id": number}, key=f"key-{number}")
                return status, answer["duplicate"]

        answers = await asyncio.gather(*(send(*each) for each in requests))
        assert {status for status, _ in answers} == {200}
        assert sum(not duplicate for _, duplicate in answers) <= 150
        overtaken = sum(
            sample.value
            for each in (one, other)
            for family in each.metrics.overtaken.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        )
        batches = one.report.batches + other.report.batches
        assert one.report.batches
        assert other.report.batches
        assert overtaken < 6 + batches / 4, "gateways that compete take turns"
    assert sorted(each["id"] for each in await found(client)) == list(range(150))


@pytest.mark.parametrize("seed", range(3))
async def test_requests_without_a_key_are_committed_once_despite_lost_answers(client: JournalClient, seed: int) -> None:
    async with gateway(client) as other, gateway(cast(JournalClient, Unreliable(client, seed))) as ingest:
        async with aiohttp.ClientSession() as session:
            room = asyncio.Semaphore(4)

            async def send(number: int) -> None:
                async with room:
                    url = other.url if number % 10 == 0 else ingest.url
                    status, _ = await post(session, url, {"id": number})
                    assert status == 200

            await asyncio.gather(*(send(number) for number in range(120)))
    assert sorted(each["id"] for each in await found(client)) == list(range(120))


class Switched:
    """A client whose brokers are down while `is_off`."""

    def __init__(self, client: JournalClient) -> None:
        self._client = client
        self.is_off = False

    def __getattr__(self, name: str) -> Any:
        if self.is_off and name in ("append", "list"):
            raise Unavailable("no broker answers")
        return getattr(self._client, name)


async def test_requests_wait_for_unavailable_brokers(client: JournalClient) -> None:
    switched = Switched(client)
    async with gateway(cast(JournalClient, switched), spec("timeout: 0.5")) as ingest:
        async with aiohttp.ClientSession() as session:
            assert (await post(session, ingest.url, {"id": 0}))[0] == 200
            switched.is_off = True
            async with session.post(ingest.url, json={"id": 1}, headers={"Idempotency-Key": "a"}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert "was not committed within 0.5 s" in (await response.json())["error"]
            async with session.get(f"{ingest.url}ready") as response:
                assert response.status == 503
            switched.is_off = False

            async def is_committed() -> bool:
                return (await post(session, ingest.url, {"id": 1}, key="a"))[0] == 200

            await until(is_committed)
            assert ingest.held_bytes == 0
    assert sorted(each["id"] for each in await found(client)) == [0, 1]


async def test_a_gateway_that_died_during_its_turn_is_skipped(client: JournalClient) -> None:
    async with gateway(client) as ingest, aiohttp.ClientSession() as session:
        assert (await post(session, ingest.url, {"id": 1}))[0] == 200
        async with BatchWriter[Any](client, STREAM) as writer:
            last = await writer.last_batch("hooks")
            taken = await writer.take_turn(last, "hooks", "dead")
            assert taken is not None
            assert taken.turn.startswith("2.dead.")
            again = await writer.take_turn(last, "hooks", "other")
            assert again is not None
            assert again.turn == taken.turn
            assert (await post(session, ingest.url, {"id": 2}))[0] == 200
            assert await writer.take_turn(last, "hooks", "other") is None
    assert sorted(each["id"] for each in await found(client)) == [1, 2]


async def test_a_source_of_another_kind_is_refused(client: JournalClient) -> None:
    with pytest.raises(InvalidInput, match="run it with --follow"):
        await WebhookIngest(client, spec()).run()
    await ingest(client, Lists({"a": [1]}), given=lists_spec(name="hooks", stream=STREAM)).run()
    with pytest.raises(CorruptData, match="another ingest wrote it"):
        async with gateway(client):
            pass
