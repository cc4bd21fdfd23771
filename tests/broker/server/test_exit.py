"""SIGTERM to a broker process under load: it hands over, stores, gives up its lease, and disturbs no client."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.lease import LeaseRecord
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild
from tests.broker.running import eventually

pytestmark = pytest.mark.system

JOURNALS = 6
MakeSpec = Callable[..., pb.JournalSpec]


@pytest.fixture
async def children(broker_settings: BrokerSettings, tmp_path: Path) -> AsyncIterator[list[BrokerChild]]:
    """Three brokers of two zones."""
    async with AsyncExitStack() as stack:
        children = []
        for number in range(3):
            own = {
                "id": f"broker-{number}",
                "zone": f"zone-{number % 2}",
                "data_dir": tmp_path / f"data-{number}",
                "metrics_port": 0,
            }
            child = BrokerChild(broker_settings.model_copy(update=own), tmp_path / f"broker-{number}.log")
            stack.callback(child.close)
            child.start()
            children.append(child)
        for child in children:
            await child.ready()
        yield children


class Load:
    """One writer and one blocking reader of each journal, which tolerate no failure."""

    def __init__(self, client: JournalClient, journals: list[str]) -> None:
        self.written = dict.fromkeys(journals, b"")
        self._read = dict.fromkeys(journals, b"")
        self._client = client
        self._stop = asyncio.Event()
        self._writers = [asyncio.create_task(self._write(journal)) for journal in journals]
        self._readers = [asyncio.create_task(self._read_on(journal)) for journal in journals]

    async def done(self) -> None:
        """Stop writing, and wait until readers have read everything. Raises their errors."""
        self._stop.set()
        await asyncio.gather(*self._writers)
        await eventually(lambda: self._unharmed() and self._read == self.written)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def _unharmed(self) -> bool:
        for task in (*self._writers, *self._readers):
            if task.done():
                task.result()
        return True

    async def more(self, appends: int) -> None:
        """Wait until every journal has had this many further appends."""
        counts = {journal: content.count(b"\n") for journal, content in self.written.items()}

        def enough() -> bool:
            return self._unharmed() and all(
                self.written[journal].count(b"\n") >= count + appends for journal, count in counts.items()
            )

        await eventually(enough)

    async def _write(self, journal: str) -> None:
        number = 0
        while not self._stop.is_set():
            content = f"{journal} {number} {'x' * (number * 997 % 5000)}\n".encode()
            result = await self._client.append(journal, content)
            assert result.begin == len(self.written[journal])
            self.written[journal] += content
            number += 1

    async def _read_on(self, journal: str) -> None:
        async with aclosing(self._client.read(journal, 0, block=True, fail_on_jump=True)) as chunks:
            async for chunk in chunks:
                assert chunk.offset == len(self._read[journal])
                self._read[journal] += chunk.content


async def test_an_exit_under_load_disturbs_no_client(children: list[BrokerChild], spec: MakeSpec) -> None:
    leaving = children[0]
    endpoints = ",".join([str((await child.ready())["endpoint"]).removeprefix("http://") for child in children])
    async with JournalClient(endpoints, retry_timeout=120) as client:
        names = [f"test/journal-{number}" for number in range(JOURNALS)]
        changes = []
        for number, name in enumerate(names):
            made = spec(name, stores=("file:///frags/",), fragment={"refresh_interval": 1})
            made.replication = 1 + number % 2
            changes.append(pb.ApplyRequest.Change(upsert=made))
        await client.apply(changes)
        for name in names:
            await client.append(name, b"")
        load = Load(client, names)
        await load.more(5)
        remembered = LeaseRecord.within(leaving.settings.data_dir).load()
        assert remembered is not None
        leaving.process.send_signal(signal.SIGTERM)
        await load.more(5)
        assert await asyncio.to_thread(leaving.process.wait, 120) == 0
        async with EtcdCoordinator(leaving.settings.etcd) as coordinator:
            assert (await coordinator.lease_status(remembered[1])).remaining == 0
        spools = list((leaving.settings.data_dir / "spools").rglob("*.content"))
        assert [path for path in spools if path.stat().st_size] == [], "everything is in the store"
        for given_up in (
            "member.handover_timed_out",
            "fragment.left_in_local_files",
        ):
            assert not leaving.events(given_up)
        leaving.start()
        await leaving.ready()
        await load.more(5)
        await load.done()
        for name, content in load.written.items():
            assert await client.read_all(name, 0, len(content)) == content
    assert not [line for child in children for line in child.log().splitlines() if "Traceback" in line]
