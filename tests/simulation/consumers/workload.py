"""Producers that publish single messages and transactions, roll back, go away during one, and repeat appends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from coranto.client import AppendResult, JournalClient
from coranto.errors import IndexHasGreaterOffset, StoreUnhealthy
from coranto.messages import JsonLines, ProducerClock, Publisher, new_producer_id

from .history import Fate, Sent
from .world import ConsumerWorld

_KEYS = ("ant", "bee", "cat", "dog", "eel")


class Workload:
    """All producers. Each message is recorded with its fate."""

    def __init__(self, world: ConsumerWorld) -> None:
        self._world = world
        self.closing: dict[str, int] = {}
        """The end of the last message of each input. Shards are done when they have read this far."""

    async def run(self) -> None:
        world = self._world
        work = [world.clients.start(_Producer(world, number).run()) for number in range(world.of_consumers.producers)]
        await asyncio.gather(*work)

    async def close(self) -> None:
        """Append a last message to each input, after all undecided content."""
        producer = _Producer(self._world, 0)
        for journal in self._world.inputs:
            self.closing[journal] = await producer.close(journal)


class _Producer:
    def __init__(self, world: ConsumerWorld, number: int) -> None:
        self._world = world
        self._rng = world.rng
        self._node = f"writer-{number}"
        self._client: JournalClient = world.journal_client(self._node, world.clients)
        self._publisher = self._new_publisher()
        self._end = 0

    def _new_publisher(self) -> Publisher[Mapping[str, Any]]:
        clock, skew = self._world.client_clock, self._rng.choice(self._world.of_consumers.producer_skews)
        self._world.coverage.sometimes("a producer's clock was off by a day or more", skew)
        return Publisher(
            self._append,
            producer=new_producer_id(self._rng.randbytes),
            clock=ProducerClock(lambda: int((clock.now() + skew) * 1e9)),
            framing=JsonLines(),
            max_batch_bytes=self._rng.choice((1, 300, 1 << 20)),
        )

    async def run(self) -> None:
        rng, options = self._rng, self._world.of_consumers
        for _ in range(options.transactions):
            await asyncio.sleep(rng.uniform(0, 1.6 * options.seconds / options.transactions))
            kind = rng.random()
            if kind < 0.3:
                await self._alone()
            elif kind < 0.7:
                await self._transaction(Fate.COMMITTED)
            elif kind < 0.85:
                await self._transaction(Fate.ROLLED_BACK)
            else:
                await self._transaction(Fate.ABANDONED)

    async def close(self, journal: str) -> int:
        sent = self._new_message(journal)
        await self._publisher.publish(journal, _content(sent))
        await self._publisher.flush()
        sent.fate = Fate.COMMITTED
        return self._end

    async def _alone(self) -> None:
        messages = [self._new_message(self._rng.choice(self._world.inputs)) for _ in range(self._rng.randint(1, 4))]
        for sent in messages:
            await self._publisher.publish(sent.journal, _content(sent))
        await self._publisher.flush()
        for sent in messages:
            sent.fate = Fate.COMMITTED

    async def _transaction(self, fate: Fate) -> None:
        rng, publisher = self._rng, self._publisher
        messages = []
        for _ in range(rng.randint(1, 6)):
            sent = self._new_message(rng.choice(self._world.inputs))
            messages.append(sent)
            await publisher.add(sent.journal, _content(sent))
            if rng.random() < 0.3:
                await publisher.flush()
                await asyncio.sleep(rng.choice((0.0, 0.05, 0.5)))
        self._world.coverage.sometimes(f"a producer's transaction was {fate.value}")
        if fate is Fate.COMMITTED:
            intents = await publisher.prepare()
            await publisher.acknowledge()
            if rng.random() < 0.2:
                for journal, intent in intents.items():
                    await self._append(journal, intent)
        elif fate is Fate.ROLLED_BACK:
            await publisher.rollback()
        else:
            if rng.random() < 0.7:
                await publisher.flush()
            await publisher.aclose()
            self._publisher = self._new_publisher()
        for sent in messages:
            sent.fate = fate

    def _new_message(self, journal: str) -> Sent:
        sent = self._world.record.sent
        rng = self._rng
        producer = self._publisher.producer.hex()
        message = Sent(f"m{len(sent)}", journal, producer, len(sent), rng.choice(_KEYS), rng.randint(1, 100))
        sent[message.id] = message
        return message

    async def _append(self, journal: str, content: bytes) -> AppendResult:
        """Append, and sometimes repeat the append, as after a lost answer."""
        result = await self._append_once(journal, content)
        if self._rng.random() < 0.15:
            self._world.coverage.sometimes("a producer repeated an append")
            result = await self._append_once(journal, content)
        return result

    async def _append_once(self, journal: str, content: bytes) -> AppendResult:
        while True:
            try:
                result = await self._client.append(journal, content, retry_unknown=True, retry_timeout=math.inf)
                self._end = result.end
                return result
            except (IndexHasGreaterOffset, StoreUnhealthy) as error:
                away = isinstance(error, IndexHasGreaterOffset)  # The brokers with the journal's end are away.
                self._world.coverage.sometimes(
                    f"a producer waited for {'brokers that are away' if away else 'the store'}"
                )
                await asyncio.sleep(0.5)


def _content(sent: Sent) -> Mapping[str, Any]:
    return {"id": sent.id, "key": sent.key, "amount": sent.amount}
