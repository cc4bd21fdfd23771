"""Messages per second: published to brokers, and sequenced with and without parsing of their JSON.

The floor of publishing appends the same bytes, already framed, by the same client in batches of the same size. So the
ratio shows the cost of framing, UUIDs and transactions. The floor of sequencing parses the same lines into the same
columns with pyarrow, which is about the minimum for a consumer of JSON.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json

from benchmarks.runner import Figure, measure_pairs
from coranto.client import JournalClient
from coranto.client.publishing import publisher
from coranto.client.sync import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import (
    JsonLines,
    ProducerClock,
    Publisher,
    Sequencer,
    TransactionBuilder,
    iter_messages,
    new_producer_id,
)
from coranto.messages.batches import line_batch, parse_lines
from coranto.messages.columnar_sequencer import ColumnarSequencer
from coranto.messages.sequencer import read_committed
from coranto.wire import protocol_pb2 as pb

MESSAGES = 200_000
PRODUCERS = 4
PER_TRANSACTION = 1000
PUBLISHED = 100_000
PER_PUBLISHED_TRANSACTION = 10_000
BATCH_BYTES = 1 << 20
TABLE_ROWS = 1_000_000
TABLE_BATCH_BYTES = 16 << 20
CHUNK_BYTES = 4 << 20
LINES = JsonLines()
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("carrier", pa.string()),
        ("delay", pa.float64()),
        ("origin", pa.string()),
        ("at", pa.string()),
    ]
)


def _message(number: int) -> dict[str, object]:
    return {
        "id": number,
        "carrier": ("UA", "AA", "DL", "B6")[number % 4],
        "delay": (number % 97) / 4,
        "origin": ("JFK", "LGA", "EWR")[number % 3],
        "at": f"2013-{number % 12 + 1:02}-{number % 28 + 1:02}T{number % 24:02}:00:00Z",
    }


def message_content() -> bytes:
    """Return transactions of several producers whose messages alternate."""
    builders = [
        TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), LINES) for _ in range(PRODUCERS)
    ]
    content: list[bytes] = []
    for number in range(MESSAGES):
        builder = builders[number % PRODUCERS]
        builder.add("j", _message(number))
        content.append(builder.take("j", 1))
        if number // PRODUCERS % PER_TRANSACTION == PER_TRANSACTION - 1:
            builder.ack_intents()
            content.append(builder.commit()["j"])
            builder.finish()
    return b"".join(content)


def _whole_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield chunks of whole lines with their offsets."""
    at = 0
    while at < len(content):
        end = content.rfind(b"\n", at, at + CHUNK_BYTES) + 1
        yield at, content[at:end]
        at = end


def _rate(count: int, work: Callable[[], int], expected: int) -> Callable[[], float]:
    def once() -> float:
        begun = time.perf_counter()
        done = work()
        seconds = time.perf_counter() - begun
        assert done == expected, (done, expected)
        return count / seconds

    return once


def _sequencing(rounds: int) -> list[Figure]:
    content = message_content()
    lines = content.count(b"\n")

    def parsed_by_pyarrow() -> int:
        options = pyarrow.json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore")
        return sum(
            pyarrow.json.read_json(pa.BufferReader(chunk), parse_options=options).num_rows
            for _, chunk in _whole_lines(content)
        )

    def by_message(decode: bool) -> Callable[[], int]:
        def work() -> int:
            envelopes = iter_messages(LINES, "j", (chunk for _, chunk in _whole_lines(content)), 0)
            committed = read_committed(envelopes, Sequencer(), lambda _: ())
            if decode:
                return sum(1 for envelope in committed if envelope.message)
            return sum(1 for _ in committed)

        return work

    def by_column(parse: bool) -> Callable[[], int]:
        def work() -> int:
            sequencer = ColumnarSequencer(lambda _: ())
            rows = 0
            for offset, chunk in _whole_lines(content):
                committed = sequencer.feed(line_batch(LINES, "j", chunk, offset)[0])
                rows += parse_lines(committed, SCHEMA).num_rows if parse else committed.num_rows
            return rows

        return work

    floor = _rate(lines, parsed_by_pyarrow, lines)
    floor_name = "pyarrow parsing the same lines"
    figures = []
    for name, work in (
        ("sequenced message by message", by_message(False)),
        ("sequenced message by message, JSON decoded", by_message(True)),
        ("sequenced in columns", by_column(False)),
        ("sequenced in columns, parsed to a table", by_column(True)),
    ):
        subjects, floors = measure_pairs(rounds, floor, _rate(lines, work, MESSAGES))
        figures.append(Figure(name, "messages/s", subjects, floors, floor_name))
    return figures


def _in_loop(
    endpoint: str, work: Callable[[JournalClient], Coroutine[Any, Any, None]], messages: int = PUBLISHED
) -> Callable[[], float]:
    async def once() -> float:
        async with JournalClient(endpoint) as client:
            begun = time.perf_counter()
            await work(client)
            return messages / (time.perf_counter() - begun)

    return lambda: asyncio.run(once())


def _publishing(rounds: int) -> list[Figure]:
    messages = [_message(number) for number in range(PUBLISHED)]
    builder = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), LINES)
    for message in messages:
        builder.add("j", message)
    framed = [batch for _, batch in builder.take_batches(BATCH_BYTES)]

    def publish(journal: str, is_committed: bool) -> Callable[[JournalClient], Coroutine[Any, Any, None]]:
        async def work(client: JournalClient) -> None:
            async with Publisher(
                client.append,
                producer=new_producer_id(os.urandom),
                clock=ProducerClock(time.time_ns),
                framing=LINES,
                max_batch_bytes=BATCH_BYTES,
            ) as publishing:
                for number, message in enumerate(messages, 1):
                    if is_committed:
                        await publishing.publish(journal, message)
                        continue
                    await publishing.add(journal, message)
                    if number % PER_PUBLISHED_TRANSACTION == 0:
                        await publishing.commit()

        return work

    table = pa.Table.from_pylist([_message(number) for number in range(TABLE_ROWS)], SCHEMA)
    table_bytes = [b"".join(framed)] * (TABLE_ROWS // PUBLISHED)

    def publish_table(journal: str) -> Callable[[JournalClient], Coroutine[Any, Any, None]]:
        async def work(client: JournalClient) -> None:
            async with publisher(client, LINES, max_batch_bytes=TABLE_BATCH_BYTES) as publishing:
                await publishing.add_table(journal, table)
                await publishing.commit()

        return work

    def append_again(journal: str) -> Callable[[JournalClient], Coroutine[Any, Any, None]]:
        async def work(client: JournalClient) -> None:
            for content in table_bytes:
                for at in range(0, len(content), TABLE_BATCH_BYTES):
                    await client.append(journal, content[at : at + TABLE_BATCH_BYTES])

        return work

    def append(journal: str) -> Callable[[JournalClient], Coroutine[Any, Any, None]]:
        async def work(client: JournalClient) -> None:
            for batch in framed:
                await client.append(journal, batch)

        return work

    figures = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedCluster(Path(folder), brokers=3) as cluster:
        endpoint = cluster.info.endpoint
        specs = []
        for replication in (1, 3):
            labels = label_set({CONTENT_TYPE: JSON_LINES})
            spec = pb.JournalSpec(name=f"bench/messages/r{replication}", replication=replication, labels=labels)
            spec.fragment.length = 1 << 30
            spec.fragment.compression_codec = pb.NONE
            spec.fragment.refresh_interval.FromSeconds(3600)
            specs.append(pb.ApplyRequest.Change(upsert=spec))
        with SyncJournalClient(endpoint) as client:
            client.apply(specs)
            for replication in (1, 3):
                client.append(
                    f"bench/messages/r{replication}", LINES.marshal({}, "00000000-0000-0000-0000-000000000000")
                )
        floor_name = "the same bytes, framed beforehand, appended by the same client"
        for replication in (1, 3):
            journal = f"bench/messages/r{replication}"
            floor = _in_loop(endpoint, append(journal))
            for name, is_committed in (("alone", True), (f"{PER_PUBLISHED_TRANSACTION:,} to a transaction", False)):
                subjects, floors = measure_pairs(rounds, floor, _in_loop(endpoint, publish(journal, is_committed)))
                figures.append(
                    Figure(f"published, R={replication}, {name}", "messages/s", subjects, floors, floor_name)
                )
            floor = _in_loop(endpoint, append_again(journal), TABLE_ROWS)
            subject = _in_loop(endpoint, publish_table(journal), TABLE_ROWS)
            subjects, floors = measure_pairs(rounds, floor, subject)
            figures.append(Figure(f"a table published, R={replication}", "messages/s", subjects, floors, floor_name))
    return figures


def run(rounds: int) -> list[Figure]:
    return [*_sequencing(rounds), *_publishing(rounds)]
