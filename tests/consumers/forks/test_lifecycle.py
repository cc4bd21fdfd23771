"""A changed application runs next to the old one over forks, and is compared and promoted or dropped."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, MetaData, String, Table, inspect, select

from coranto.client import JournalClient
from coranto.coordination.etcd import EtcdHeader, KeyValue, TxnResult
from coranto.effects import SystemClock
from coranto.errors import InvalidInput, JournalNotFound, JournalRecreated
from coranto.forks import drop_fork, fork_journal, forks_of
from coranto.labels import CONTENT_TYPE, JSON_LINES, MESSAGE_TYPE
from coranto.messages.checkpoints import Checkpoint
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import Flags, ProducerClock, ProducerId, build_uuid
from coranto.streams import Streams, StreamWriter, default_template
from coranto.testing import Cluster
from coranto.testing.cluster import STORE_URL
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.comparison import TableOf, compare_tables
from coranto_consumers.forks import drop_consumer, fork_consumer, fork_status, lifecycle, promote_consumer
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.replica import ShardReplica
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.stores import SqlShardStore
from coranto_consumers.stores.sql import SqlStore

SOURCES = ("sales/part-000", "sales/part-001")
ALERTS = "alerts/large"
PRODUCER = ProducerId(b"\x01abcde")
TICKS = ProducerClock(lambda: 1_700_000_000 * 10**9)


def table(name: str) -> Table:
    columns = (Column("customer", String(100), primary_key=True), Column("cents", BigInteger, nullable=False))
    return Table(name, MetaData(), *columns)


class Totals(Application[Any]):
    """Keep totals, and publish each message of 100 cents or more."""

    def __init__(self, url: str, name: str, factor: int = 1, alerts: str = ALERTS) -> None:
        self._url, self._table, self._factor, self._alerts = url, table(name), factor, alerts

    def new_store(self, shard: Any) -> SqlShardStore:
        return SqlShardStore(self._url, self._table)

    def consume_message(self, shard: Any, store: SqlShardStore, message: Any, publisher: Any) -> None:
        order, where = message.message, self._table.c.customer == message.message["customer"]
        row = store.connection.execute(select(self._table).where(where)).one_or_none()
        cents = order["cents"] * self._factor + (row.cents if row else 0)
        if row:
            store.connection.execute(self._table.update().where(where).values(cents=cents))
        else:
            store.connection.execute(self._table.insert().values(customer=order["customer"], cents=cents))
        if order["cents"] >= 100:
            publisher.publish(self._alerts, {"customer": order["customer"]})


class Assigned:
    """A consumer process with a permanently assigned shard. It stores the errors of failed shards."""

    recovery_folder: Any = None
    entropy = staticmethod(os.urandom)

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.coordinator: Any = self

    async def txn(self, compares: Any, operations: Any) -> TxnResult:
        return TxnResult(True, EtcdHeader(1, 1, 1, 1))

    async def set_status(self, shard: str, status: pc.ReplicaStatus, is_due: Callable[[], bool]) -> None:
        self.errors += status.errors

    accept_changes = ""

    def fqn_of(self, shard: str) -> str:
        return shard

    def earlier_shards(self, shard: str) -> list[pc.ShardSpec]:
        return []

    def assignment_of(self, shard: str) -> KeyValue:
        return KeyValue(shard, b"")


class Died(Exception):
    """The process dies at a call."""


async def die(*_: object, **__: object) -> None:
    raise Died


def line(customer: str, cents: int, flags: Flags = Flags.OUTSIDE_TXN) -> bytes:
    return JsonLines().marshal({"customer": customer, "cents": cents}, build_uuid(PRODUCER, TICKS.tick(), flags))


def ack() -> bytes:
    return JsonLines().acknowledgement(build_uuid(PRODUCER, TICKS.tick(), Flags.ACK_TXN))


@pytest.fixture
async def client() -> AsyncIterator[JournalClient]:
    async with Cluster(brokers=1, lease_seconds=60) as cluster:
        for journal in (*SOURCES, ALERTS, "alerts/new"):
            await cluster.create(journal, labels={CONTENT_TYPE: JSON_LINES})
        yield cluster.client()


async def run(app: Totals, name: str, client: JournalClient, journals: tuple[str, ...]) -> None:
    """Run an application until it has read all content."""
    ends = {journal: await client.head(journal) for journal in journals}
    async with running_shard(app, shard_spec(name, journals, disable_wait_for_ack=True), client) as running:
        await running.read_through({journal: end for journal, end in ends.items() if end})
        await running.finish()


def forked(name: str) -> tuple[str, ...]:
    return tuple(f"{name}/{journal}" for journal in SOURCES)


def totals(store: SqlStore, name: str) -> dict[str, int]:
    with store.engine.connect() as connection:
        return {row.customer: row.cents for row in connection.execute(select(table(name)))}


async def alerts_in(client: JournalClient, journal: str) -> bytes:
    return await client.read_all(journal, 0, await client.head(journal))


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
async def test_a_changed_application_is_compared_and_takes_over(
    kind: str, new_store: Callable[[str], str], client: JournalClient
) -> None:
    url = new_store(kind)
    store, old, new = SqlStore(url), Totals(url, "totals"), Totals(url, "totals_2", alerts="alerts/new")
    await client.append(SOURCES[0], line("ada", 5) + line("bob", 100))
    await client.append(SOURCES[1], line("eve", 7, Flags.CONTINUE_TXN))  # It is acknowledged after the checkpoint.
    await run(old, "totals-old", client, SOURCES)
    before = await alerts_in(client, ALERTS)

    await client.append(SOURCES[1], ack())
    made = await fork_consumer(client, store, "totals-old", "totals-new", tables={"totals": "totals_2"})
    again = await fork_consumer(client, store, "totals-old", "totals-new", tables={"totals": "totals_2"})
    assert again == made, "a repetition changes nothing"
    assert made.checkpoint.ack_intents == {}
    await client.append(SOURCES[0], line("ada", 300))  # It is not in the fork.
    assert totals(store, "totals_2") == {"ada": 5, "bob": 100}

    await run(new, "totals-new", client, forked("totals-new"))
    assert totals(store, "totals_2") == {"ada": 5, "bob": 100, "eve": 7}, "pending messages before the checkpoint, too"
    assert await alerts_in(client, ALERTS) == before, "the copy acknowledges nothing for the original"
    standing = await fork_status(client, store, "totals-new")
    assert (standing.problem, standing.behind) == ("", {})
    assert not compare_tables(TableOf(store, "totals"), TableOf(store, "totals_2"), ["customer"]).is_equal

    host = Assigned()
    spec = shard_spec("totals-new", forked("totals-new"), disable_wait_for_ack=True)
    zombie = ShardReplica(new, spec, client, host, clock=SystemClock(), metrics=ConsumerMetrics())
    zombie.start()
    zombie.promote()
    assert await zombie.wait_serving()
    offsets = await promote_consumer(client, store, "totals-new", "totals-live")
    assert offsets == {journal: made.forks[journal].offset for journal in SOURCES}
    await client.append(forked("totals-new")[0], line("ada", 1))  # Its runtime restarts it once it is fenced off.
    await zombie.stopped.wait()
    await zombie.stop()
    assert "is promoted already: it continues as 'totals-live'" in host.errors[-1]
    for other in ("totals-other", "totals-live"):
        with pytest.raises(InvalidInput, match="is promoted already: it continues as 'totals-live'"):
            await promote_consumer(client, store, "totals-new", other)
    with pytest.raises(InvalidInput, match="'totals-live' is not a forked consumer"):
        await promote_consumer(client, store, "totals-live", "totals-later")

    with pytest.raises(InvalidInput, match=f"is a fork of {SOURCES[0]}, which the consumer has read"):
        await run(new, "totals-live", client, forked("totals-new"))
    await run(old, "totals-old", client, SOURCES)
    await run(new, "totals-live", client, SOURCES)
    with pytest.raises(InvalidInput, match="is promoted already"):
        await run(new, "totals-new", client, forked("totals-new"))
    found = compare_tables(TableOf(store, "totals"), TableOf(store, "totals_2"), ["customer"])
    assert found.is_equal, found.differences()
    assert totals(store, "totals_2") == {"ada": 305, "bob": 100, "eve": 7}

    with pytest.raises(InvalidInput, match="its tables belong to 'totals-live' now"):
        await drop_consumer(client, store, "totals-new", tables=["totals_2"])
    gone = await drop_consumer(client, store, "totals-new")
    assert sorted(gone["journals"]) == sorted(forked("totals-new"))
    assert await forks_of(client, SOURCES[0]) == ()
    kept = store.read("totals-live")
    assert kept is not None
    assert set(kept.checkpoint.sources) == set(SOURCES), "a promoted consumer keeps its checkpoint"
    with pytest.raises(InvalidInput, match="is promoted already"):
        store.raise_fence("totals-new")


async def test_a_changed_application_rereads_everything_up_to_the_old_checkpoint(
    tmp_path: Path, client: JournalClient
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store, old, new = SqlStore(url), Totals(url, "totals"), Totals(url, "totals_2", factor=2)
    for journal in SOURCES:
        await client.append(journal, line("ada", 5) + line("bob", 6))
    await run(old, "totals-old", client, SOURCES)
    for journal in SOURCES:
        await client.append(journal, line("ada", 1000))

    with pytest.raises(InvalidInput, match="--table: a consumer that reads its forks from the beginning counts again"):
        await fork_consumer(
            client, store, "totals-old", "sales-new", tables={"totals": "totals_2"}, from_beginning=True
        )
    assert not inspect(store.engine).has_table("totals_2")
    for _ in range(2):
        await fork_consumer(
            client, store, "totals-old", "sales-new", prefix="what-if", from_beginning=True, at_checkpoint=True
        )
        row = store.read("sales-new")
        assert row == (1, Checkpoint()), "a repetition changes nothing"
    standing = await fork_status(client, store, "sales-new")
    assert "has read nothing yet" in standing.problem
    assert len(standing.behind) == 2
    await run(new, "sales-new", client, forked("what-if"))
    found = compare_tables(TableOf(store, "totals"), TableOf(store, "totals_2"), ["customer"])
    assert (found.merged.in_both, found.merged.differing) == (2, 2)
    assert found.merged.right.sums["cents"].total == 2 * 22

    # Its forks diverge, so the sources lack content that it has read.
    await client.append(forked("what-if")[0], line("ada", 1))
    await run(new, "sales-new", client, forked("what-if"))
    with pytest.raises(InvalidInput, match="what-if/sales/part-000: differs from sales/part-000 beyond"):
        await promote_consumer(client, store, "sales-new", "sales-live")
    await fork_journal(client, forked("what-if")[0], "other/fork")
    with pytest.raises(InvalidInput, match="other/fork: is a fork of the consumer's forks"):
        await drop_consumer(client, store, "sales-new")
    assert store.read("sales-new") is not None, "a drop that is refused changes nothing"
    await drop_fork(client, "other/fork")
    with pytest.MonkeyPatch.context() as broken:  # It is killed before it deletes the forks.
        broken.setattr(lifecycle, "drop_forks", die)
        with pytest.raises(Died):
            await drop_consumer(client, store, "sales-new", tables=["totals_2"])
    with pytest.raises(InvalidInput, match="'sales-new' was a forked consumer, and is dropped"):
        await run(new, "sales-new", client, forked("what-if"))
    gone = await drop_consumer(client, store, "sales-new", tables=["totals_2"])
    assert gone == {"journals": sorted(forked("what-if")), "tables": ["totals_2"]}
    assert sorted(inspect(store.engine).get_table_names()) == ["gazette_checkpoints", "totals"]
    with pytest.raises(InvalidInput, match="'sales-new' is not a forked consumer"):
        await drop_consumer(client, store, "sales-new")
    with pytest.raises(InvalidInput, match="'sales-new' was a forked consumer, and is dropped"):
        store.raise_fence("sales-new")


async def test_a_consumer_is_not_promoted_to_a_source_with_other_content(tmp_path: Path, client: JournalClient) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = SqlStore(url)
    await client.append(SOURCES[0], line("ada", 5))
    await run(Totals(url, "totals"), "totals-old", client, SOURCES)
    made = await fork_consumer(client, store, "totals-old", "sales-new")
    (fork,) = made.forks.values()
    # Brokers refuse such a change while the fork shares its fragments, but other tools do not.
    other = line("eve", 6)[: fork.offset].ljust(fork.offset)
    changed = lifecycle.Fork(ALERTS, fork.name, fork.offset, fork.shared_end, fork.begin)
    await client.append(ALERTS, other)
    with pytest.raises(InvalidInput, match=f"has other content before {fork.offset} than {ALERTS}"):
        await lifecycle._require_same_content(client, changed, fork.offset)
    await lifecycle._require_same_content(client, fork, fork.offset)
    # A consumer that has read forks and other journals is neither promoted nor dropped.
    found = store.read("sales-new")
    assert found is not None
    mixed = Checkpoint({**found.checkpoint.sources, ALERTS: found.checkpoint.sources[fork.name]})
    with store.transaction("sales-new", found.fence) as transaction:
        transaction.commit(mixed)
    with pytest.raises(InvalidInput, match=f"has read {ALERTS}, which is not a complete fork that was made for it"):
        await promote_consumer(client, store, "sales-new", "sales-live")
    with pytest.raises(InvalidInput, match=f"has read {ALERTS} besides its forks"):
        await drop_consumer(client, store, "sales-new")
    assert store.read("sales-new") == (found.fence, mixed)


async def test_a_consumer_of_a_recreated_source_is_not_forked_at_its_checkpoint(
    tmp_path: Path, client: JournalClient
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = SqlStore(url)
    await client.append(SOURCES[0], line("ada", 5))
    await run(Totals(url, "totals"), "totals-old", client, SOURCES)
    (info,) = (await client.list(f"name={SOURCES[0]}")).journals
    await client.apply([pb.ApplyRequest.Change(delete=SOURCES[0], expect_mod_revision=info.mod_revision)])
    await client.apply([pb.ApplyRequest.Change(upsert=info.spec)])
    await client.append(SOURCES[0], line("eve", 6) * 9)
    with pytest.raises(JournalRecreated, match=SOURCES[0]):
        await fork_consumer(client, store, "totals-old", "sales-new")
    assert store.read("sales-new") is None
    assert await fork_consumer(client, store, "totals-old", "sales-new", from_beginning=True)


async def test_a_consumer_of_a_stream_is_forked_with_the_whole_stream(tmp_path: Path, client: JournalClient) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store, old, new = SqlStore(url), Totals(url, "totals"), Totals(url, "totals_2")
    stream = await Streams(client).create("shop/orders", 2, template=default_template(stores=[STORE_URL]))
    segments = tuple(each.journal for each in stream.segments.values())
    async with StreamWriter[Any](client, "shop/orders") as writer:
        for customer in ("ada", "bob", "customer-1"):
            await writer.write_event(customer, {"customer": customer, "cents": 3})
        await run(old, "totals-old", client, segments)
        with pytest.raises(InvalidInput, match="is a segment of a stream"):
            await fork_consumer(client, store, "totals-old", "sales-new", at_checkpoint=True)
        await fork_consumer(client, store, "totals-old", "sales-new", tables={"totals": "totals_2"})
        await writer.write_event("ada", {"customer": "ada", "cents": 4})
    forks = tuple(f"sales-new/{journal}" for journal in segments)
    assert (await Streams(client).describe("sales-new/shop/orders")).segments.keys() == {0, 1}
    await run(new, "sales-new", client, forks)
    assert totals(store, "totals_2") == {"ada": 3, "bob": 3, "customer-1": 3}
    await promote_consumer(client, store, "sales-new", "sales-live")
    await run(new, "sales-live", client, segments)
    assert totals(store, "totals_2")["ada"] == 7
    assert len((await drop_consumer(client, store, "sales-new"))["journals"]) == 2
    assert (await client.list("name:prefix=sales-new/")).journals == ()


async def test_an_interrupted_fork_continues_with_the_same_checkpoint(
    tmp_path: Path, client: JournalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store, old = SqlStore(url), Totals(url, "totals")
    await client.append(SOURCES[0], line("ada", 5))
    await run(old, "totals-old", client, SOURCES)

    with monkeypatch.context() as broken:
        broken.setattr(lifecycle, "fork_journals", die)
        with pytest.raises(Died):
            await fork_consumer(client, store, "totals-old", "sales-new", tables={"totals": "totals_2"})
    await client.append(SOURCES[0], line("ada", 6))
    await run(old, "totals-old", client, SOURCES)
    made = await fork_consumer(
        client, store, "totals-old", "sales-new", journals=SOURCES, tables={"totals": "totals_2"}
    )
    assert totals(store, "totals_2") == {"ada": 5}, "tables and checkpoint are consistent"
    await run(Totals(url, "totals_2"), "sales-new", client, forked("sales-new"))
    assert totals(store, "totals_2") == {"ada": 11}
    assert made.forks[SOURCES[0]].offset == await client.head(SOURCES[0])


async def test_invalid_forks_are_refused(tmp_path: Path, client: JournalClient) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store, old = SqlStore(url), Totals(url, "totals")
    with pytest.raises(InvalidInput, match="'totals-old' has no checkpoint"):
        await fork_consumer(client, store, "totals-old", "sales-new")
    await client.append(SOURCES[0], line("ada", 5))
    await run(old, "totals-old", client, SOURCES)
    with pytest.raises(InvalidInput, match="is the name of the consumer itself"):
        await fork_consumer(client, store, "totals-old", "totals-old")
    await fork_consumer(client, store, "totals-old", "sales-new")
    with pytest.raises(InvalidInput, match="'totals-old' has a checkpoint already"):
        await fork_consumer(client, store, "sales-new", "totals-old")
    with pytest.raises(InvalidInput, match="is not a forked consumer"):
        await fork_status(client, store, "totals-old")
    await drop_consumer(client, store, "sales-new")
    await fork_journal(client, SOURCES[0], "other/fork")
    with pytest.raises(JournalNotFound):
        await fork_journal(client, "gone", "other/gone")


async def test_labels_that_would_select_the_fork_for_the_old_consumer_are_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = SqlStore(url)
    async with Cluster(brokers=1, lease_seconds=60) as cluster:
        client = cluster.client()
        await cluster.create("sales/all", labels={CONTENT_TYPE: JSON_LINES, MESSAGE_TYPE: "Sale"})
        await client.append("sales/all", line("ada", 5))
        await run(Totals(url, "totals"), "totals-old", client, ("sales/all",))
        with pytest.raises(InvalidInput, match="message-type=Sale, and so has its fork"):
            await fork_consumer(client, store, "totals-old", "sales-new")
        assert store.read("sales-new") is None
        assert (await fork_consumer(client, store, "totals-old", "sales-new", same_labels=True)).forks.keys() == {
            "sales/all"
        }
