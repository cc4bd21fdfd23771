"""A source made of lists, and helpers that read its ingested events."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coranto.client import JournalClient
from coranto.client.retry import RetryPolicy
from coranto.errors import AppendOutcomeUnknown, SourceChanged, Unavailable
from coranto.ingest.engine import Ingest
from coranto.ingest.source import Poison, Positions, Read, SourceRow
from coranto.ingest.spec import IngestSpec, NewStream
from coranto.messages.framing import Envelope
from coranto.messages.reading import ReadCommitted
from coranto.streams.model.events import JsonEvents
from coranto.streams.model.stream import dead_letters_journal
from coranto.streams.reader.stream_reader import StreamReader
from coranto.testing.cluster import STORE_URL
from coranto.types.kinds import TypeField

STREAM = "shop/orders"
QUICK = RetryPolicy(5.0, seed=1, scale=0.02)


def spec(**changes: Any) -> IngestSpec:
    new = NewStream(2, 1, (STORE_URL,))
    return IngestSpec(**{"name": "loads", "stream": STREAM, "kind": "lists", "options": None, "create": new} | changes)


@dataclass
class Lists:
    """A source whose splits are lists of rows. Each read returns a few rows of one split."""

    rows: dict[str, list[Any]]
    identity: str = "lists"
    at_once: int = 3
    outages: int = 0
    changed: bool = False
    schema: tuple[TypeField, ...] | None = None
    kept: int | None = None
    opened: int = 0
    follow: bool = False
    positions: dict[str, int] = field(default_factory=dict)
    confirmed: list[dict[str, int]] = field(default_factory=list)

    async def open(self, after: Positions, *, follow: bool) -> str:
        self.positions, self.follow = dict(after), follow
        self.opened += 1
        return self.identity

    async def read(self, max_bytes: int) -> Sequence[Read] | None:
        await asyncio.sleep(0)
        if self.outages:
            self.outages -= 1
            raise Unavailable("the source does not answer")
        for split, rows in self.rows.items():
            at = self.positions.get(split, 0)
            if at < len(rows):
                found = rows[at : at + self.at_once]
                self.positions[split] = at + len(found)
                return [Read(split, [row_of(split, at + n, each) for n, each in enumerate(found)], at + len(found))]
        if self.follow:
            await asyncio.sleep(0.01)
            return []
        return None

    async def fields(self) -> tuple[TypeField, ...] | None:
        return self.schema

    async def confirm(self) -> None:
        if self.changed:
            raise SourceChanged("the source changed")

    async def committed(self, positions: Positions) -> None:
        self.confirmed.append(dict(positions))

    async def lag(self, positions: Positions) -> Mapping[str, int]:
        return {split: len(rows) - positions.get(split, 0) for split, rows in self.rows.items()}

    async def retained(self) -> int | None:
        return self.kept

    async def close(self) -> None:
        return None


class Unreliable:
    """A client some of whose appends fail or lose their answers."""

    def __init__(self, client: JournalClient, seed: int) -> None:
        self._client = client
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def append(self, journal: str, content: Any, **options: Any) -> Any:
        fate = self._random.random()
        if fate < 0.05:
            raise Unavailable("no broker answers")
        if fate < 0.1:
            raise AppendOutcomeUnknown("the answer is lost")
        result = await self._client.append(journal, content, **options)
        if fate > 0.95:
            raise AppendOutcomeUnknown("the answer is lost")
        return result


def row_of(split: str, at: int, value: Any) -> SourceRow | Poison:
    """Return a row for a number, with one of five keys, and a poison row for anything else."""
    if not isinstance(value, int):
        return Poison(f"place {at}", "is no number", b"k", str(value).encode())
    return SourceRow(f"key-{value % 5}", {"split": split, "n": value}, None, b'"at":%d' % at)


def ingest(client: JournalClient, source: Any, *, given: IngestSpec | None = None, **options: Any) -> Ingest:
    return Ingest(client, given or spec(), source, **{"policy": QUICK} | options)


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait for a condition, which may be asynchronous."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)


async def events(client: JournalClient, stream: str = STREAM) -> list[Any]:
    """Return the events of a stream in reading order."""
    async with StreamReader[Any](client, stream) as reader:
        return [event.data async for event in reader]


async def numbers(client: JournalClient) -> list[tuple[str, int]]:
    return sorted((each["split"], each["n"]) for each in await events(client))


async def dead_letters(client: JournalClient, stream: str = STREAM) -> list[Any]:
    journal = dead_letters_journal(stream)
    content = await client.read_all(journal, 0, await client.head(journal))

    def read(begin: int, end: int | None) -> Any:
        return JsonEvents().decoder(journal, begin).feed(content[begin:end], begin)

    found: list[Envelope[Any]] = list(ReadCommitted(read, journal))
    return [{name: value for name, value in each.message.items() if name != "_meta"} for each in found]
