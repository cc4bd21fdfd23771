"""A journal whose head fell has another id. Positions behind that point are refused, also by waiting reads."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.errors import JournalRecreated
from coranto.journal_ids import is_same, shared_through
from coranto.recovery.heads import reset_head
from coranto.testing import Cluster
from coranto.testing.sim.timeline import Process
from tests.broker.handlers.test_heads import PIECE, J, fill, one, spec_of, virtually


async def lose_disks(cluster: Cluster, brokers: int) -> None:
    for number in range(brokers):
        await cluster.kill(number, expire=True)
        machine = cluster._machine(number)
        disk = machine.disk.for_process(Process(cluster._world.timeline, "wiper"))
        for path in machine.disk.paths():
            disk.remove(Path(path))
    await asyncio.gather(*(cluster.start(number) for number in range(brokers)))


async def content(client: JournalClient, offset: int, journal_id: str, end: int) -> bytes:
    chunks = client.read(J, offset, end_offset=end, journal_id=journal_id)
    return b"".join([chunk.content async for chunk in chunks])


@pytest.mark.parametrize("replication", [1, 3])
def test_positions_behind_the_fall_are_refused_and_others_stay_valid(replication: int) -> None:
    async def main() -> None:
        async with Cluster(brokers=replication) as cluster:
            await cluster.create(spec_of(J, replication))
            client = cluster.client(retry_timeout=30)
            end = await fill(client, J)
            before = (await one(client)).journal_id
            await asyncio.sleep(5)
            await lose_disks(cluster, replication)
            await cluster.ready(J)
            fell_to = end - len(PIECE)
            assert not (await one(client)).is_end

            async def wait_at_the_old_head() -> None:
                async with contextlib.aclosing(
                    cluster.client(name="waiting").read(J, end, block=True, journal_id=before)
                ) as chunks:
                    await anext(chunks)

            waiting = asyncio.ensure_future(wait_at_the_old_head())
            await asyncio.sleep(2)
            assert await reset_head(client, J) == f"reset to {fell_to}"
            head = await one(client)
            assert head.journal_id != before
            assert shared_through(before, head.journal_id) == fell_to
            for _ in range(3):
                grown = (await client.append(J, b"x" * 1000)).end
            assert grown > end
            with pytest.raises(JournalRecreated, match=f"lost its content from offset {fell_to} on") as caught:
                await waiting
            assert (caught.value.offset, caught.value.same_through) == (end, fell_to)
            for attempt in range(4):  # Any broker may answer.
                reader = cluster.client(name=f"reader-{attempt}")
                with pytest.raises(JournalRecreated):
                    await content(reader, end, before, grown)
                assert await content(reader, fell_to, before, grown) == b"x" * 3000
                assert len(await content(reader, 0, before, grown)) == grown
            assert await reset_head(client, J) == f"healthy, at {grown}"
            assert (await one(client)).journal_id == head.journal_id

            await asyncio.sleep(5)
            for number in range(replication):  # All brokers know the new id after a restart.
                await cluster.kill(number, expire=True)
            await asyncio.gather(*(cluster.start(number) for number in range(replication)))
            await cluster.ready(J)
            assert (await client.append(J, b"y")).begin == grown
            assert (await one(client)).journal_id == head.journal_id

            await lose_disks(cluster, replication)
            await cluster.ready(J)
            await reset_head(client, J)
            again = (await one(client)).journal_id
            assert again != head.journal_id
            assert is_same(before, fell_to, again)
            assert not is_same(before, fell_to + 1, again)
            assert not is_same(head.journal_id, grown + 1, again)

    virtually(main)


def test_a_journal_that_lost_nothing_keeps_its_positions() -> None:
    """All content was stored, but no broker is known to hold all of it."""

    async def main() -> None:
        async with Cluster(brokers=1) as cluster:
            await cluster.create(spec_of(J, 1))
            client = cluster.client(retry_timeout=30)
            end = await fill(client, J)
            before = (await one(client)).journal_id
            await cluster.kill(0, expire=True)
            await cluster.start(0)
            await cluster.ready(J)
            assert (await one(client)).journal_id == before, "its disk is there"
            await client.append(J, PIECE)
            await asyncio.sleep(5)
            await lose_disks(cluster, 1)
            await cluster.ready(J)
            assert await reset_head(client, J) == f"reset to {end}"
            assert (await client.append(J, b"more")).begin == end
            assert await content(client, end, before, end + 4) == b"more"

    virtually(main)
