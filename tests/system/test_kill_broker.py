"""The only broker is killed with SIGKILL while a publisher runs: nothing acknowledged is lost or duplicated."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from coranto.audit import audit_journal
from coranto.client import JournalClient, SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.cluster import EmbeddedCluster
from coranto.fragments.stores import StoreRegistry
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import JsonLines, ProducerClock, RendezvousMapping, SyncPublisher, new_producer_id
from coranto.wire import protocol_pb2 as pb

pytestmark = pytest.mark.timeout(900)

JOURNALS = ("kill/part-000", "kill/part-001")
KILLS = 3
TRANSACTIONS_BETWEEN_KILLS = 12
MESSAGES_PER_TRANSACTION = 25
TIMEOUT_S = 180
LEASE_S = 60


def spec(name: str) -> pb.JournalSpec:
    made = pb.JournalSpec(name=name, replication=1, labels=label_set({CONTENT_TYPE: JSON_LINES}))
    # Small fragments, so that kills hit rolled, persisting and growing ones.
    made.fragment.length = 16 << 10
    made.fragment.compression_codec = pb.GZIP
    made.fragment.stores.append("file:///")
    made.fragment.refresh_interval.FromSeconds(1)
    return made


class Publisher(threading.Thread):
    """A publisher of numbered messages in transactions, until stopped. `acknowledged` counts committed transactions."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="publisher", daemon=True)
        self._endpoint = endpoint
        self._stop_requested = threading.Event()
        self._progress = threading.Condition()
        self.acknowledged = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with SyncJournalClient(self._endpoint, retry_timeout=TIMEOUT_S) as client:
                self._publish(client)
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.error = error
        finally:
            with self._progress:
                self._progress.notify_all()

    def _publish(self, client: SyncJournalClient) -> None:
        mapping = RendezvousMapping(JOURNALS)

        def append(journal: str, content: bytes) -> object:
            # Messages carry UUIDs, so an append with an unknown outcome may be repeated.
            return client.append(journal, content, retry_unknown=True)

        publisher = SyncPublisher(
            append, producer=new_producer_id(os.urandom), clock=ProducerClock(time.time_ns), framing=JsonLines()
        )
        while not self._stop_requested.is_set():
            first = self.acknowledged * MESSAGES_PER_TRANSACTION
            for number in range(first, first + MESSAGES_PER_TRANSACTION):
                publisher.add(mapping(str(number).encode()), {"number": number, "padding": "x" * 200})
            publisher.commit()
            with self._progress:
                self.acknowledged += 1
                self._progress.notify_all()

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(TIMEOUT_S)
        assert not self.is_alive(), "the publisher did not finish its last transaction"
        if self.error is not None:
            raise self.error

    def wait_for(self, transactions: int) -> None:
        with self._progress:
            reached = self._progress.wait_for(
                lambda: self.acknowledged >= transactions or self.error is not None, TIMEOUT_S
            )
        if self.error is not None:
            raise self.error
        assert reached, f"{self.acknowledged} transactions acknowledged, {transactions} expected"


async def test_acknowledged_messages_are_stored_exactly_once(tmp_path: Path) -> None:
    with EmbeddedCluster(tmp_path / "cluster", lease_seconds=LEASE_S, etcd_fsync=False) as cluster:
        info = cluster.info
        with SyncJournalClient(info.endpoint, retry_timeout=TIMEOUT_S) as client:
            client.apply([pb.ApplyRequest.Change(upsert=spec(name)) for name in JOURNALS])
            registers = label_set({"owner": "test"})
            client.append(JOURNALS[0], b'{"number": -1}\n', union_registers=registers)

        publisher = Publisher(info.endpoint)
        publisher.start()
        try:
            for _ in range(KILLS):
                publisher.wait_for(publisher.acknowledged + TRANSACTIONS_BETWEEN_KILLS)
                cluster.kill_broker(0)
            publisher.wait_for(publisher.acknowledged + TRANSACTIONS_BETWEEN_KILLS)
        finally:
            publisher.stop()

        found: Counter[int] = Counter()
        with SyncJournalClient(info.endpoint, file_root=info.file_root) as client:
            for journal in JOURNALS:
                found.update(
                    envelope.message["number"] for envelope in committed_messages(client, journal, JsonLines())
                )
            assert client.append(JOURNALS[0], b"").registers == registers, "registers did not survive the kills"
        async with JournalClient(info.endpoint, file_root=info.file_root) as reader:
            for journal in JOURNALS:
                audit = await audit_journal(reader, StoreRegistry(info.file_root), journal, first_offset=0)
                assert audit.problems == []

        published = publisher.acknowledged * MESSAGES_PER_TRANSACTION
        assert publisher.acknowledged > KILLS * TRANSACTIONS_BETWEEN_KILLS
        assert found == Counter(range(-1, published))
