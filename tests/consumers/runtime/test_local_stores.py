"""Shards with stores in recovery logs: playback, standbys, and takeovers."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from coranto.coordination.etcd import Delete, Put
from coranto.labels import CONTENT_TYPE, RECOVERY_LOG, label_set
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.recoverylog import Hints
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.testing import shard_spec
from coranto_consumers.stores.json_file import JsonFileStore
from coranto_consumers.stores.sqlite_file import SqliteStore


class JsonSums(Application[JsonFileStore[dict[str, int]]]):
    """Sums in a JSON file."""

    def new_store(self, shard: Any) -> JsonFileStore[dict[str, int]]:
        return JsonFileStore(shard.recorder, {})

    def consume_message(self, shard: Any, store: Any, message: Any, publisher: Any) -> None:
        content = message.message
        if content["key"] == "fail":
            raise ZeroDivisionError("boom")
        store.state[content["key"]] = store.state.get(content["key"], 0) + content["n"]
        publisher.publish("out/one", {"total": store.state[content["key"]]})


class SqliteSums(Application[SqliteStore]):
    """Sums in a local database."""

    def new_store(self, shard: Any) -> SqliteStore:
        return SqliteStore(shard.recorder, "CREATE TABLE IF NOT EXISTS sums (key TEXT PRIMARY KEY, total INTEGER)")

    def consume_message(self, shard: Any, store: SqliteStore, message: Any, publisher: Any) -> None:
        content = message.message
        store.connection.execute(
            "INSERT INTO sums VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET total = total + excluded.total",
            (content["key"], content["n"]),
        )
        (total,) = store.connection.execute("SELECT total FROM sums WHERE key = ?", (content["key"],)).fetchone()
        publisher.publish("out/one", {"total": total})


@pytest.fixture(params=[JsonSums, SqliteSums])
def app(request: pytest.FixtureRequest) -> Application[Any]:
    return request.param()


@pytest.fixture
def spec(journals: Any) -> pc.ShardSpec:
    journals.fake.create("recovery/shard-sums", labels=label_set([(CONTENT_TYPE, RECOVERY_LOG)]))
    return shard_spec(
        "shard-sums",
        ["in/one"],
        max_seconds=600,
        recovery_log_prefix="recovery",
        hint_prefix="/test/hints",
        hint_backups=1,
    )


@pytest.fixture(autouse=True)
def own_hints(spec: pc.ShardSpec, consumer: Any) -> None:
    """Use separate hints for each test, as etcd outlives it."""
    spec.hint_prefix = f"{consumer.settings.etcd_prefix}-hints"


async def totals(journals: Any) -> list[int]:
    return [each["total"] for each in journals.committed("out/one")]


async def test_a_log_is_played_by_the_next_owner(journals, consumer, app, spec):
    process = await consumer.start(app)
    await consumer.apply(process, spec)
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    assert (await consumer.stat(process, one=head)).status == pc.OK
    await consumer.status(process, "PRIMARY")

    for n in (10, 100):
        assert (await consumer.stub(process).Unassign(pc.UnassignRequest(shards=["shard-sums"]))).status == pc.OK
        await consumer.status(process, "PRIMARY")
        head = await journals.publish("in/one", {"key": "a", "n": n})
        assert (await consumer.stat(process, one=head)).status == pc.OK
    assert await totals(journals) == [1, 11, 111]

    hints = await consumer.stub(process).GetHints(pc.GetHintsRequest(shard="shard-sums"))
    assert hints.status == pc.OK
    assert hints.primary_hints.hints.log == "recovery/shard-sums"
    assert len(hints.backup_hints) == 1
    assert hints.backup_hints[0].hints.live_nodes


async def test_ids_that_are_paths_have_separate_folders(journals, consumer, app, spec):
    for name in ("team-a/sums", f"team-a/sums/{'x' * 300}"):
        journals.fake.create(f"recovery/{name}", labels=label_set([(CONTENT_TYPE, RECOVERY_LOG)]))
    process = await consumer.start(app)
    specs = [pc.ShardSpec.FromString(spec.SerializeToString()) for _ in range(2)]
    specs[0].id, specs[1].id = "team-a/sums", f"team-a/sums/{'x' * 300}"
    await consumer.apply(process, *specs)
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    for each in specs:
        assert (await consumer.stat(process, each.id, one=head)).status == pc.OK


async def test_a_standby_follows_the_log_and_takes_over(journals, consumer, app, spec):
    first = await consumer.start(app, zone="zone-a")
    second = await consumer.start(app, "process-b", zone="zone-b")
    spec.hot_standbys = 1
    await consumer.apply(first, spec)
    await consumer.status(first, "PRIMARY", "STANDBY")
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(first, one=head)

    primary = next(each for each in first.keyspace.state.assignments("shard-sums") if each.slot == 0).member
    leaving, staying = (first, second) if primary == first.member else (second, first)
    await leaving.exit_gracefully()
    await leaving.session.close()
    await consumer.status(staying, "PRIMARY")
    head = await journals.publish("in/one", {"key": "a", "n": 2})
    await consumer.stat(staying, one=head)
    assert await totals(journals) == [1, 3]


async def test_a_failed_transaction_leaves_nothing_in_the_log(journals, consumer, spec):
    app = JsonSums()
    process = await consumer.start(app)
    await consumer.apply(process, spec)
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(process, one=head)
    await journals.publish("in/one", {"key": "a", "n": 1000}, {"key": "fail", "n": 0})
    await consumer.status(process, "FAILED")
    app.consume_message = lambda shard, store, message, publisher: publisher.publish(
        "out/one", {"total": dict(store.state)}
    )
    await consumer.stub(process).Unassign(pc.UnassignRequest(shards=["shard-sums"], only_failed=True))
    await consumer.stat(process, one=journals.head("in/one"))
    assert await totals(journals) == [1, {"a": 1}, {"a": 1}]


async def refused(consumer, process) -> tuple[str, str]:
    """Return the error of the failed shard, and the code in it."""
    await consumer.status(process, "FAILED")
    (text,) = (await consumer.shard(process)).status[0].errors
    assert text.startswith("ConsumerChanged")
    return text, text.rpartition("--accept-changes ")[2].partition(" ")[0]


async def test_a_log_records_the_outputs_of_its_shard_and_refuses_other_applications(journals, consumer, spec):
    app = SqliteSums()
    app.publishes = ["out/one"]
    process = await consumer.start(app)
    await consumer.apply(process, spec)
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    assert (await consumer.stat(process, one=head)).status == pc.OK
    head = await journals.publish("in/one", {"key": "a", "n": 10})
    assert (await consumer.stat(process, one=head)).status == pc.OK
    await process.exit_gracefully()
    await process.session.close()

    other = SqliteSums()
    other.publishes = app.publishes
    other.new_store = lambda shard: SqliteStore(shard.recorder, "CREATE TABLE IF NOT EXISTS counts (n INTEGER)")
    other.consume_message = lambda shard, store, message, publisher: store.connection.execute(
        "INSERT INTO counts VALUES (?)", (message.message["n"],)
    )
    process = await consumer.start(other, "process-b")
    await journals.publish("in/one", {"key": "a", "n": 100})
    text, code = await refused(consumer, process)
    assert "table sums gets nothing any more, table counts gets nothing of the earlier messages (in/one " in text
    await process.exit_gracefully()
    await process.session.close()

    app.publishes = ()
    process = await consumer.start(app, "process-c", accept_changes=code)
    text, _ = await refused(consumer, process)
    assert "journals out/one gets nothing any more" in text
    await process.exit_gracefully()
    await process.session.close()
    process = await consumer.start(other, "process-d", accept_changes=code)
    assert (await consumer.stat(process, one=journals.head("in/one"))).status == pc.OK
    assert await totals(journals) == [1, 11]


async def test_a_copy_of_a_log_is_refused(journals, consumer, app, spec):
    process = await consumer.start(app)
    await consumer.apply(process, spec)
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    assert (await consumer.stat(process, one=head)).status == pc.OK
    await process.exit_gracefully()
    await process.session.close()

    log = journals.fake.journals["recovery/shard-sums"]
    journals.fake.create("copies/shard-sums", labels=label_set([(CONTENT_TYPE, RECOVERY_LOG)]))
    await journals.fake.write("copies/shard-sums", log.content)
    copied = pc.ShardSpec.FromString(spec.SerializeToString())
    copied.recovery_log_prefix, copied.hint_prefix = "copies", f"{spec.hint_prefix}-of-copy"
    process = await consumer.start(app, "process-b")
    found = await consumer.shard(process)
    await consumer.apply(process, copied, revision=found.mod_revision)
    await consumer.stub(process).Unassign(pc.UnassignRequest(shards=["shard-sums"]))
    text, _ = await refused(consumer, process)
    assert "store: recorded recovery log recovery/shard-sums, now recovery log copies/shard-sums;" in text
    assert await totals(journals) == [1]


async def test_a_journal_that_is_not_a_recovery_log_fails_the_shard(journals, consumer, app, spec):
    spec.recovery_log_prefix = "in"
    journals.fake.create("in/shard-sums", labels=label_set([(CONTENT_TYPE, "text/plain")]))
    process = await consumer.start(app)
    await consumer.apply(process, spec)
    await consumer.status(process, "FAILED")
    assert "text/plain" in (await consumer.shard(process)).status[0].errors[0]


async def test_a_local_store_without_a_log_fails_the_shard(consumer, app):
    process = await consumer.start(app)
    await consumer.apply(process, shard_spec("shard-sums", ["in/one"]))
    await consumer.status(process, "FAILED")
    assert "has no recovery log" in (await consumer.shard(process)).status[0].errors[0]


async def test_hints_can_be_set(consumer, app, spec):
    process = await consumer.start(app, shard_limit=0)
    change = pc.ApplyRequest.Change(upsert=spec)
    change.primary_hints.log = "recovery/shard-sums"
    change.primary_hints.properties.add(path="/IDENTITY", content="x")
    assert (await consumer.stub(process).Apply(pc.ApplyRequest(changes=[change]))).status == pc.OK
    hints = await consumer.stub(process).GetHints(pc.GetHintsRequest(shard="shard-sums"))
    assert hints.primary_hints.hints == change.primary_hints


@pytest.mark.parametrize("prefix", ["/gazette/cluster/items", "/gazette/cluster/assign/x", "/members"])
async def test_hints_among_the_keys_of_a_cluster_are_refused(consumer, spec, prefix):
    """A shard's hints must not overwrite or delete specs or assignments of journals."""
    process = await consumer.start(JsonSums(), shard_limit=0)
    spec.hint_prefix = prefix
    with pytest.raises(grpc.aio.AioRpcError, match=f"upsert.hint_prefix: '{prefix}' leads into"):
        await consumer.apply(process, spec)
    # A shard stored by an earlier version is refused there, too.
    key = process.keyspace.layout.item_key(spec.id)
    result = await process.consumer.coordinator.txn([], [Put(key, spec.SerializeToString())])
    await process.keyspace.wait_for_revision(result.header.revision)
    with pytest.raises(grpc.aio.AioRpcError, match="leads into"):
        await consumer.stub(process).GetHints(pc.GetHintsRequest(shard=spec.id))


async def test_a_stored_shard_whose_hints_are_among_the_keys_of_a_cluster_fails(consumer, spec):
    process = await consumer.start(JsonSums())
    spec.hint_prefix = f"{consumer.settings.etcd_prefix}/items"
    key = process.keyspace.layout.item_key(spec.id)
    await process.consumer.coordinator.txn([], [Put(key, spec.SerializeToString())])
    await consumer.status(process, "FAILED")
    assert "leads into 'items'" in (await consumer.shard(process)).status[0].errors[0]
    assert [item.id for item in process.keyspace.state.items] == [spec.id]


async def test_hints_among_the_consumers_keys_or_at_existing_keys_are_refused(journals, consumer, app, spec):
    process = await consumer.start(app, shard_limit=0)
    place = spec.hint_prefix
    spec.hint_prefix = f"{consumer.settings.etcd_prefix}/hints"
    with pytest.raises(grpc.aio.AioRpcError, match="among the keys of this consumer"):
        await consumer.apply(process, spec)

    spec.hint_prefix = place
    put = Put(f"{place}/{spec.id}.primary", Hints("recovery/of-another").to_json())
    await process.consumer.coordinator.txn([], [put])
    with pytest.raises(grpc.aio.AioRpcError, match="has hints of recovery/of-another"):
        await consumer.apply(process, spec)
    await process.consumer.coordinator.txn([], [Put(put.key, b"{}, or whatever it is")])
    with pytest.raises(grpc.aio.AioRpcError, match="something else than hints"):
        await consumer.apply(process, spec)
    await process.consumer.coordinator.txn([], [Delete(put.key)])
    await consumer.apply(process, spec)

    # A shard keeps its present prefix with any content: the shard itself reports the problem.
    await process.consumer.coordinator.txn([], [put])
    spec.hint_backups = 3
    await consumer.apply(process, spec, revision=-1)
