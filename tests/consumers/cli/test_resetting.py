"""`coranto consumer reset`, `skip` and `lag` on real brokers: the exact repeated and omitted messages."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, select

from coranto.audit import Depth, Kind, Report, Severity, run_checks
from coranto.cli import main
from coranto.client import JournalClient
from coranto.cluster import EmbeddedCluster
from coranto.errors import Fenced, InvalidInput
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import Checkpoint, Envelope, JsonLines, ProducerClock, TransactionBuilder, new_producer_id
from coranto.messages.checkpoints import Source
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.audit import ConsumerCheck, SqlEvidence, parse_expectation
from coranto_consumers.cli.resetting import begin_at
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.runtime.testing import RunningShard, running_shard, shard_spec
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.sql_shard import SqlShardStore
from tests.consumers.audit.conftest import Memories

NAME = "seen"
JOURNALS = ("in/one", "in/two")
SEEN = Table("seen", MetaData(), Column("n", BigInteger))


class Seen(Application[SqlShardStore]):
    """An application that stores every delivery of a message as a row, and republishes it."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def new_store(self, shard: Shard) -> SqlShardStore:
        return SqlShardStore(self._store, SEEN)

    def consume_message(
        self, shard: Shard, store: SqlShardStore, message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        store.insert(SEEN, {"n": message.message["n"]})
        publisher.publish("out/one", {"n": message.message["n"]})


class Scene:
    """A shard with two journals, and commands for it."""

    def __init__(self, client: JournalClient, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.client = client
        self.url = url
        self.store = SqlStore(url)
        self._capsys = capsys
        self.seconds_ago = 0
        self._clock = ProducerClock(lambda: time.time_ns() - self.seconds_ago * 10**9)
        self._memory = Memories()

    async def create(self, name: str) -> None:
        spec = pb.JournalSpec(name=name, replication=1, labels=label_set({CONTENT_TYPE: JSON_LINES}))
        spec.fragment.length = 1 << 20
        spec.fragment.compression_codec = pb.NONE
        spec.fragment.refresh_interval.FromSeconds(60)
        await self.client.apply([pb.ApplyRequest.Change(upsert=spec)])

    async def delete(self, name: str) -> None:
        await self.client.apply([pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1)])

    def producer(self) -> TransactionBuilder[Any]:
        return TransactionBuilder(new_producer_id(os.urandom), self._clock, JsonLines())

    async def pend(self, builder: TransactionBuilder[Any], journal: str, *numbers: int) -> None:
        for n in numbers:
            builder.add(journal, {"n": n})
        for name, batch in builder.take_batches(1 << 20):
            await self.client.append(name, batch)

    async def commit(self, builder: TransactionBuilder[Any]) -> None:
        builder.ack_intents()
        for journal, intent in builder.commit().items():
            await self.client.append(journal, intent)
        builder.finish()

    async def publish(self, journal: str, *numbers: int) -> int:
        """Publish a transaction, and return its end offset."""
        builder = self.producer()
        await self.pend(builder, journal, *numbers)
        await self.commit(builder)
        return int(await self.client.head(journal))

    def running(self) -> Any:
        return running_shard(Seen(self.store), shard_spec(NAME, JOURNALS, max_seconds=0.5), self.client)

    async def consume(self) -> list[int]:
        """Consume all messages, and return the new rows, sorted."""
        before = len(self.rows())
        async with self.running() as shard:
            await shard.read_through({name: int(await self.client.head(name)) for name in JOURNALS})
            await shard.finish()
        return sorted(self.rows()[before:])

    def rows(self) -> list[int]:
        self.store.create_tables(SEEN)
        with self.store.engine.connect() as connection:
            return [row.n for row in connection.execute(select(SEEN.c.n))]

    async def command(self, *words: str) -> tuple[int, str]:
        """Run `coranto consumer …`, and return its code and output."""
        self._capsys.readouterr()
        endpoint = self.client.config.endpoint
        arguments = ["consumer", *words, "--store", self.url, "--endpoint", endpoint]
        code = await asyncio.to_thread(main, arguments)
        captured = self._capsys.readouterr()
        return code, captured.out + captured.err

    async def refused(self, *words: str) -> str:
        before = self.store.read(NAME)
        code, said = await self.command(*words)
        assert code == 1, said
        assert self.store.read(NAME) == before, "the checkpoint changed"
        return said

    async def audit(self, *, accept: bool = False, expect: Sequence[str] = ()) -> Report:
        expectations = [parse_expectation(each) for each in expect]
        check = ConsumerCheck(
            NAME,
            self.client,
            SqlEvidence(self.store),
            expectations=expectations,
            memory=self._memory,
            accept=accept,
            timeout_s=0.5,
        )
        return await run_checks("test", [check], depth=Depth.DEEP)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), lease_seconds=60, etcd_fsync=False) as running:
        yield running


@pytest.fixture
async def scene(
    cluster: EmbeddedCluster,
    store_url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Scene]:
    monkeypatch.setattr("coranto.cli.connect.RETRY_TIMEOUT", 120.0)
    async with JournalClient(cluster.info.endpoint) as client:
        made = Scene(client, store_url, capsys)
        for name in (*JOURNALS, "out/one"):
            await made.create(name)
        yield made
        for name in (*JOURNALS, "out/one"):
            await made.delete(name)


async def test_a_reset_repeats_exactly_the_announced_messages(scene: Scene) -> None:
    middle = await scene.publish("in/one", 1, 2)
    await scene.publish("in/one", 3)
    await scene.publish("in/two", 10, 11)
    assert await scene.consume() == [1, 2, 3, 10, 11]
    said = await scene.refused("reset", NAME, "--to", "earliest")
    assert "confirm it with --yes" in said
    assert "repeated" in said

    code, said = await scene.command("reset", NAME, "--to", "earliest", "--yes")
    assert code == 0, said
    assert await scene.consume() == [1, 2, 3, 10, 11]
    code, said = await scene.command("reset", NAME, "--to", f"in/one={middle}", "--yes")
    assert code == 0, said
    assert await scene.consume() == [3]
    code, said = await scene.command("reset", NAME, "--to", f"in/one={await scene.client.head('in/one')}", "--yes")
    assert (code, "nothing to move" in said) == (0, True)


async def test_a_transaction_open_at_the_position_is_repeated_as_a_whole(scene: Scene) -> None:
    builder = scene.producer()
    await scene.pend(builder, "in/one", 1)
    middle = await scene.publish("in/one", 2)
    await scene.pend(builder, "in/one", 3)
    await scene.commit(builder)
    await scene.publish("in/two", 10)
    assert await scene.consume() == [1, 2, 3, 10]
    code, said = await scene.command("reset", NAME, "--to", f"in/one={middle}", "--yes")
    assert code == 0, said
    (line,) = [each.split() for each in said.splitlines() if each.startswith("in/one ")]
    assert line[3:5] + line[6:] == [
        "repeated",
        "2",
        "1",
    ]  # Two messages of one open transaction.
    assert await scene.consume() == [1, 3]


async def test_a_skip_omits_exactly_the_announced_messages(scene: Scene) -> None:
    first = await scene.publish("in/one", 1)
    await scene.publish("in/two", 10)
    assert await scene.consume() == [1, 10]
    open_one = scene.producer()
    await scene.pend(open_one, "in/one", 2)
    at = await scene.publish("in/one", 3, 4)
    await scene.pend(open_one, "in/one", 5)
    await scene.commit(open_one)
    said = await scene.refused("skip", NAME, "--to", f"in/one={at}")
    (line,) = [each.split() for each in said.splitlines() if each.startswith("in/one ")]
    assert line == ["in/one", str(first), str(at), "omitted", "2", str(at - first), "1"]
    code, said = await scene.command("skip", NAME, "--to", f"in/one={at}", "--yes")
    assert code == 0, said
    assert await scene.consume() == [2, 5]
    code, said = await scene.command("skip", NAME, "--to", f"in/one={at}", "--yes")
    assert (code, "nothing to move" in said) == (0, True), "a skip repeats nothing"

    await scene.publish("in/two", 11)
    code, said = await scene.command("reset", NAME, "--to", "latest", "--journal", "in/two", "--yes")
    assert code == 0, said
    assert await scene.consume() == []


async def test_a_reset_to_a_time_repeats_later_messages(scene: Scene) -> None:
    scene.seconds_ago = 7200
    await scene.publish("in/one", 1)
    scene.seconds_ago = 0
    await scene.publish("in/one", 2)
    await scene.publish("in/two", 10)
    assert await scene.consume() == [1, 2, 10]
    code, said = await scene.command("reset", NAME, "--to", "1h", "--yes")
    assert code == 0, said
    assert await scene.consume() == [2, 10]


async def test_a_reset_fences_a_running_shard_with_a_reason(scene: Scene) -> None:
    await scene.publish("in/one", 1)
    shard: RunningShard
    async with scene.running() as shard:
        await shard.read_through({"in/one": int(await scene.client.head("in/one"))})
        code, said = await scene.command("reset", NAME, "--to", "earliest", "--journal", "in/one", "--yes")
        assert code == 0, said
        await scene.publish("in/one", 2)
        with pytest.raises(Fenced, match=r"by `coranto consumer reset` or `skip`: in/one was reset from \d+ to 0 at"):
            await shard.task
    assert await scene.consume() == [1, 2]


async def test_a_reset_fences_an_idle_running_shard(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coranto_consumers.runtime.primary.FENCE_SECONDS", 0.1)
    await scene.publish("in/one", 1)
    async with scene.running() as shard:
        await shard.read_through({"in/one": int(await scene.client.head("in/one"))})
        code, said = await scene.command("reset", NAME, "--to", "earliest", "--journal", "in/one", "--yes")
        assert code == 0, said
        with pytest.raises(Fenced, match="coranto consumer reset"):
            await asyncio.wait_for(shard.task, 60)


async def test_messages_published_before_a_reset_are_acknowledged_once(scene: Scene) -> None:
    await scene.publish("in/one", 1)
    await scene.publish("in/two", 10)
    await scene.consume()
    before = scene.store.read(NAME)
    assert before is not None
    assert before.checkpoint.ack_intents
    await scene.command("reset", NAME, "--to", "earliest", "--yes")
    after = scene.store.read(NAME)
    assert after is not None
    assert after.checkpoint.ack_intents == before.checkpoint.ack_intents
    assert after.fence == before.fence + 1


async def test_hostile_arguments_change_nothing(scene: Scene, tmp_path: Path) -> None:
    end = await scene.publish("in/one", 1)
    await scene.publish("in/two", 10)
    await scene.consume()
    code, said = await scene.command("reset", "stranger", "--to", "earliest", "--yes")
    assert (code, "consumer 'stranger' has no checkpoint" in said) == (1, True)
    assert scene.store.read("stranger") is None, "an unknown name gets no row"
    for to, reason in {
        f"in/one={end + 1}": f"offset {end + 1} is beyond the end of in/one, which is {end}",
        "in/one=5": "offset 5 of in/one is within a message: give 0, where it begins, or",
        "in/three=0": "the consumer does not read in/three",
        "in/one=-1": "is not JOURNAL=OFFSET",
        "in/one": "is not a time",
        "1024": "names no journal",
        "2999-01-01": "is in the future",
        '{"in/one": {"offset": 5, "journal_id": "other-1f"}}': "journal",
        "{": "is not JSON",
        str(tmp_path / "missing.json"): "there is no file",
    }.items():
        assert reason in await scene.refused("reset", NAME, "--to", to, "--yes"), to
    assert "the consumer does not read" in await scene.refused(
        "skip", NAME, "--to", "latest", "--journal", "in/three", "--yes"
    )


async def test_a_consumer_is_reset_to_a_recreated_journal(scene: Scene) -> None:
    await scene.publish("in/one", 1)
    await scene.publish("in/two", 10)
    await scene.consume()
    await scene.delete("in/one")
    await scene.create("in/one")
    await scene.publish("in/one", 2)
    code, said = await scene.command("reset", NAME, "--to", "earliest", "--journal", "in/one", "--yes")
    assert code == 0, said
    assert "from an earlier journal" in said
    assert await scene.consume() == [2]


async def test_an_audit_reports_a_reset_as_intended(scene: Scene) -> None:
    expect = ("SELECT COUNT(*) FROM seen == messages",)
    await scene.publish("in/one", 1, 2)
    await scene.publish("in/two", 10)
    await scene.consume()
    assert (await scene.audit(expect=expect)).sound
    await scene.command("reset", NAME, "--to", "earliest", "--yes")
    for _ in range(2):  # Before and after the consumer restarts.
        report = await scene.audit(expect=expect)
        kinds = {each.kind for each in report.findings}
        assert Kind.CHECKPOINT_RESET in kinds
        assert Kind.CHECKPOINT_SET_BACK not in kinds
        assert report.sound, report.findings
        assert all(each.severity is not Severity.ERROR for each in report.findings)
        await scene.consume()
    assert any("[0, " in each.message and "repeated on purpose" in each.message for each in report.findings)
    assert (await scene.audit(accept=True, expect=expect)).findings
    await scene.publish("in/one", 3)
    await scene.consume()
    report = await scene.audit(expect=expect)
    assert report.sound
    assert {each.kind for each in report.findings} <= {Kind.FIRST_AUDIT}


async def test_an_audit_reports_a_skip_as_intended(scene: Scene) -> None:
    await scene.publish("in/one", 1)
    await scene.publish("in/two", 10)
    await scene.consume()
    assert (await scene.audit()).sound
    await scene.publish("in/one", 2)
    await scene.command("skip", NAME, "--to", "latest", "--yes")
    report = await scene.audit()
    assert report.sound
    assert any(each.kind is Kind.CHECKPOINT_RESET and "omitted on purpose" in each.message for each in report.findings)
    assert not [each for each in (await scene.audit()).findings if each.kind is Kind.CHECKPOINT_RESET]


async def test_lag_counts_bytes_and_messages(scene: Scene) -> None:
    await scene.publish("in/one", 1)
    await scene.publish("in/two", 10)
    await scene.consume()
    begin = int(await scene.client.head("in/one"))
    end = await scene.publish("in/one", 2, 3, 4)
    code, said = await scene.command("lag", NAME, "-o", "json")
    assert code == 0, said
    one, two = json.loads(said)
    assert (one["journal"], one["position"], one["head"], one["behind"]) == ("in/one", begin, end, end - begin)
    assert (one["messages"], one["is_estimate"], one["problem"]) == (3, False, "")
    assert one["seconds"] >= 0
    assert (two["behind"], two["messages"]) == (0, 0)
    code, said = await scene.command("lag", NAME)
    assert code == 0, said
    assert "3 messages behind, in 2 journals" in said
    code, said = await scene.command("lag", "stranger")
    assert (code, "consumer 'stranger' has no checkpoint in the store" in said) == (1, True)


async def test_a_new_consumer_begins_at_the_given_position(scene: Scene) -> None:
    open_one = scene.producer()
    await scene.pend(open_one, "in/one", 1)
    await scene.publish("in/one", 2)
    await scene.publish("in/two", 10)
    said = await scene.refused("reset", NAME, "--to", "latest", "--sources", "name:prefix=nothing/", "--yes")
    assert "no journal matches" in said
    said = await scene.refused("reset", NAME, "--to", "latest", "--sources", "name:prefix=in/")
    assert "omitted" in said
    code, said = await scene.command("reset", NAME, "--to", "latest", "--sources", "name:prefix=in/", "--yes")
    assert code == 0, said
    await scene.commit(open_one)
    await scene.publish("in/two", 11)
    assert await scene.consume() == [1, 11], "an open transaction is delivered as a whole"
    assert (await scene.audit()).sound


async def test_only_the_first_run_of_a_consumer_sets_first_positions(scene: Scene) -> None:
    async def start(to: str) -> None:
        await asyncio.to_thread(begin_at, NAME, to, scene.url, "name:prefix=in/", scene.client.config.endpoint)

    await scene.publish("in/one", 1)
    with pytest.raises(InvalidInput, match="--start"):
        await start("7")
    with pytest.raises(InvalidInput, match="no journal matches"):
        await asyncio.to_thread(begin_at, NAME, "latest", scene.url, "name=none", scene.client.config.endpoint)
    assert scene.store.read(NAME) is None
    await start("earliest")
    assert scene.store.read(NAME) is None, "the default needs no checkpoint"
    open_one = scene.producer()
    await scene.pend(open_one, "in/one", 2)
    await start("latest")
    await scene.commit(open_one)
    await scene.publish("in/two", 10)
    before = scene.store.read(NAME)
    await start("latest")
    assert scene.store.read(NAME) == before, "existing positions stay"
    assert await scene.consume() == [2, 10], "an open transaction is delivered as a whole"


async def test_start_latest_omits_nothing_for_a_consumer_that_has_already_run(scene: Scene) -> None:
    scene.store.raise_fence(NAME)  # The first run found empty journals.
    await scene.publish("in/one", 1)
    await asyncio.to_thread(begin_at, NAME, "latest", scene.url, "name:prefix=in/", scene.client.config.endpoint)
    assert await scene.consume() == [1]


async def test_a_new_consumer_begins_at_a_time(scene: Scene) -> None:
    scene.seconds_ago = 7200
    await scene.publish("in/one", 1)
    scene.seconds_ago = 0
    await scene.publish("in/one", 2)
    await scene.publish("in/two", 10)
    code, said = await scene.command("reset", NAME, "--to", "1h", "--sources", "name:prefix=in/", "--yes")
    assert code == 0, said
    assert await scene.consume() == [2, 10]


async def test_a_checkpoint_of_a_query_or_of_windows_cannot_be_moved(scene: Scene) -> None:
    fence, _ = scene.store.raise_fence("query")
    with scene.store.transaction("query", fence) as transaction:
        transaction.commit(Checkpoint({"in/one": Source(0)}, batch="{}"))
    code, said = await scene.command("reset", "query", "--to", "earliest", "--yes")
    assert (code, "is a streaming query" in said) == (1, True)
    scene.store.raise_fence("monthly@")
    code, said = await scene.command("reset", "monthly", "--to", "earliest", "--yes")
    assert (code, "is a consumer by windows" in said) == (1, True)
