"""Blocking readers on in-process brokers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.loop import run_blocking
from coranto.messages.framing import JsonObject
from coranto.streams.blocking.reader import SyncReaderGroup, SyncStreamReader
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Split
from coranto.streams.model.positions import StreamPosition
from coranto.streams.model.watermarks import TimeWindow
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.testing import SyncCluster


@pytest.fixture(scope="module")
def client() -> Iterator[SyncJournalClient]:
    """A client of a cluster with stream `s`: ten events, a split, and five transactions of two events each."""

    async def prepare(endpoint: str) -> None:
        async with JournalClient(endpoint) as client:
            streams = Streams(client)
            await streams.create("s", template=default_template(stores=["file:///fragments/"]))
            async with StreamWriter[JsonObject](client, "s") as writer:
                writer.note_time(100)
                await writer.flush()
                for n in range(10):
                    writer.write_event(f"key{n}", {"n": n})
                await writer.flush()
                await streams.scale("s", [Split(0)])
                for n in range(10, 15):
                    async with writer.transaction(f"key{n}") as transaction:
                        transaction.write({"n": n})
                        transaction.write({"n": n})
            await streams.seal("s")

    with SyncCluster(brokers=1) as cluster:
        run_blocking(prepare(cluster.endpoint))
        yield cluster.client()


def test_a_script_reads_and_continues(client: SyncJournalClient) -> None:
    with SyncStreamReader[JsonObject](client, "s") as reader:
        read = [next(reader).data["n"] for _ in range(4)]
        position = StreamPosition.from_json(reader.position().to_json())
        assert reader.cut() == position
        assert reader.time_window() == TimeWindow(100, None)
    with SyncStreamReader[JsonObject](client, "s", begin=position, block=True, timeout=120) as reader:
        transactions = [[event.data["n"] for event in each.events] for each in reader.transactions()]
    assert sorted(read + [n for each in transactions for n in each]) == sorted([*range(15), *range(10, 15)])
    assert sorted(map(len, transactions)) == [1] * 6 + [2] * 5


def test_scripts_share_a_stream(client: SyncJournalClient) -> None:
    passed: list[str] = []
    with SyncReaderGroup(client, "s", "scripts") as group:
        assert group.create()
        with group.reader("one", on_checkpoint=passed.append, timeout=120) as reader:
            read = [next(reader).data["n"] for _ in range(4)]
            group.begin_checkpoint("c")
            # The reader passes the checkpoint at its next request for an event, if it has seen the checkpoint.
            with pytest.raises(TimeoutError):
                group.initiate_checkpoint("d", timeout=0.01)
            while not passed:
                read.append(next(reader).data["n"])
            read += [event.data["n"] for event in reader]
        assert sorted(read) == sorted([*range(15), *range(10, 15)])
        assert passed[0] == "c"
        found = group.checkpoint("c")
        assert found is not None
        assert found.is_complete
        group.reset(found.position)
        with group.reader("two", auto_commit=False, timeout=120) as reader:
            again = []
            while not reader.is_finished:
                again += [event.data["n"] for each in reader.transactions() for event in each.events]
                reader.commit()
        assert read[len(read) - len(again) :] == again or sorted(read[len(read) - len(again) :]) == sorted(again)
        group.release(found.position)
        assert group.released_cut() == dict(found.position)
        assert group.state().generation == 1
        group.reader_offline("two")
