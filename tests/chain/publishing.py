"""Publishers of streams of numbers, which commit, roll back, repeat appends and vanish, and record expected results."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from typing import Any, Final

from coranto.client import JournalClient
from coranto.messages import JsonLines, ProducerClock, TransactionBuilder, new_producer_id
from tests.chain.model import RAW, ExpectedStream, journal_of

_FOREVER: Final = 24 * 3600.0
_PAUSE_SECONDS: Final = 0.1
_BATCH_BYTES: Final = 1 << 20


class StreamPublisher:
    """Publishes the numbers of some streams in transactions across all partitions.

    It sometimes leaves a transaction open and continues as another producer, like a process that crashed. It repeats
    each append until it is known to be applied, so content may be appended more than once.
    """

    def __init__(self, client: JournalClient, streams: list[str], rng: random.Random, ending: asyncio.Event) -> None:
        self.expected = {stream: ExpectedStream(stream) for stream in streams}
        self.transactions = {"committed": 0, "rolled back": 0, "left open": 0}
        self._client = client
        self._rng = rng
        self._builder = self._new_builder()
        self._ending = ending

    @property
    def numbers(self) -> int:
        return sum(each.count for each in self.expected.values())

    async def run(self) -> None:
        """Publish until `ending` is set, and then publish the last number of each stream."""
        while not self._ending.is_set():
            await self._transaction([self._rng.choice(list(self.expected)) for _ in range(self._rng.randint(1, 40))])
            await asyncio.sleep(self._rng.uniform(0, 2 * _PAUSE_SECONDS))
        await self._transaction(list(self.expected), last=True)

    async def _transaction(self, streams: list[str], *, last: bool = False) -> None:
        numbers: list[tuple[str, int | None]] = []
        for stream in streams:
            n = None if not last and self._rng.random() < 0.1 else self._rng.randint(-20, 100)
            numbers.append((stream, n))
            content: dict[str, Any] = {"stream": stream, "n": "none" if n is None else n, "last": last}
            self._builder.add(journal_of(stream, RAW), content)
        fate = 1.0 if last else self._rng.random()
        batches = dict(self._builder.take_batches(_BATCH_BYTES))
        await self._append(batches)
        if self._rng.random() < 0.1:
            await self._append(batches)  # Readers discard duplicates.
        if fate < 0.05:
            self._builder = self._new_builder()
            self.transactions["left open"] += 1
        elif fate < 0.15:
            await self._append(self._builder.rollback_intents())
            self._builder.finish()
            self.transactions["rolled back"] += 1
        else:
            self._builder.ack_intents()
            await self._append(self._builder.commit())
            self._builder.finish()
            self.transactions["committed"] += 1
            for stream, n in numbers:
                if n is None:
                    self.expected[stream].noise()
                else:
                    self.expected[stream].number(n, last=last)

    async def _append(self, contents: Mapping[str, bytes]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for journal, content in contents.items():
                tasks.create_task(self._client.append(journal, content, retry_unknown=True, retry_timeout=_FOREVER))

    @staticmethod
    def _new_builder() -> TransactionBuilder[Any]:
        return TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())
