"""The blocking writer on an in-process broker."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.loop import run_blocking
from coranto.errors import InvalidInput, PreconditionFailed, TransactionStateError, WriterClosed
from coranto.streams import Streams, SyncMultiKeyWriter, SyncStreamWriter, TransactionState, default_template
from coranto.streams.blocking.reader import SyncStreamReader
from coranto.testing import SyncCluster


@pytest.fixture
def client() -> Iterator[SyncJournalClient]:
    async def prepare(endpoint: str) -> None:
        async with JournalClient(endpoint) as client:
            await Streams(client).create("s", 2, template=default_template(stores=["file:///fragments/"]))

    with SyncCluster(brokers=1) as cluster:
        run_blocking(prepare(cluster.endpoint))
        with SyncJournalClient(cluster.endpoint) as client:
            yield client


def read(client: SyncJournalClient) -> list[Any]:
    with SyncStreamReader[Any](client, "s") as reader:
        return [event.data for event in reader]


def test_events_and_transactions_from_threads(client: SyncJournalClient) -> None:
    with SyncStreamWriter[Any](client, "s", writer_id="script") as writer:
        with ThreadPoolExecutor(4) as threads:
            keys = [f"key {number}" for number in range(8)]

            def work(key: str) -> list[int]:
                given = [writer.write_event(key, {"key": key, "n": n}) for n in range(20)]
                with writer.transaction(key) as txn:
                    txn.write({"key": key, "n": 20})
                    txn.write({"key": key, "n": 21})
                    assert txn.size > 0
                    result = txn.commit()
                assert txn.state is TransactionState.COMMITTED
                pipelined = writer.write_events(key, [{"key": key, "n": 22}]).result()
                ends = [each.result().end for each in given]
                return [*ends, result.end, pipelined.end]

            for ends in threads.map(work, keys):
                assert ends == sorted(set(ends))
        writer.flush()
        assert writer.last_sequence("key 0") > 0
    found = read(client)
    assert {key: [event["n"] for event in found if event["key"] == key] for key in keys} == {
        key: list(range(23)) for key in keys
    }


def test_errors_are_raised_at_the_failed_call(client: SyncJournalClient) -> None:
    with SyncStreamWriter[Any](client, "s") as writer:
        assert isinstance(writer.write_event("key", "no object").exception(), InvalidInput)
        fence = writer.raise_fence("key", "owner")
        writer.raise_fence("key", "owner")
        assert isinstance(writer.write_events("key", [{}], fence=fence).exception(), PreconditionFailed)
        with writer.transaction("key") as txn:
            txn.write({"n": 1})
            txn.abort()
        with pytest.raises(TransactionStateError):
            txn.commit()
        writer.note_time(1)
        assert writer.write_event("key", {"n": 2}).result().end > 0
        assert writer.metrics.registry.get_sample_value("coranto_stream_transactions_open") == 0
    assert isinstance(writer.write_event("key", {}).exception(), WriterClosed)
    assert [event["n"] for event in read(client)] == [2]


def test_a_multi_key_transaction_commits_all_events_or_none(client: SyncJournalClient) -> None:
    with SyncMultiKeyWriter[Any](client, "s") as writer:
        with writer.transaction() as txn:
            txn.write("a", {"n": 1})
            txn.write("b", {"n": 2})
        assert txn.state is TransactionState.COMMITTED

        def fail_within() -> None:
            with writer.transaction() as txn:
                txn.write("a", {"n": 3})
                raise LookupError("the application fails")

        with pytest.raises(LookupError):
            fail_within()
    assert sorted(event["n"] for event in read(client)) == [1, 2]
