"""A consumer on a real cluster, while its only broker is killed."""

import os
import time
from collections import Counter

import pytest
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, MetaData, Table, Text, select

from coranto.client import ClientConfig, SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages.framing import JsonLines, iter_messages
from coranto.messages.publisher import SyncPublisher
from coranto.messages.sequencer import Sequencer, read_committed
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.spark import Add, Hooks, JournalOutput, Outputs, SparkConsumer, Step, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.stores import SqlStore

pytestmark = pytest.mark.system

SOURCES = ("words/in/part-000", "words/in/part-001")
SINK = "words/out/part-000"
COUNTS = Table("counts", MetaData(), Column("word", Text, primary_key=True), Column("n", BigInteger, nullable=False))


class Words:
    """An application that counts words, and republishes each."""

    name = "words"
    sources = "name:prefix=words/in/"
    value_schema = "id BIGINT, word STRING"

    def outputs(self, committed):
        counts = committed.groupBy("word").agg(F.count("*").alias("n"))
        passed_on = committed.selectExpr("word AS key", "struct(id, word) AS value")
        return Outputs(
            tables=[TableOutput(COUNTS, counts, keys=["word"], merge={"n": Add()})],
            journals=[JournalOutput(passed_on, [SINK])],
        )


class KillsTheBroker(Hooks):
    """Hooks that kill the broker before messages are read, before any is published, and before acknowledgements."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self._cluster = cluster
        self._due = {Step.PLANNED, Step.STAGED, Step.COMMITTED}

    def on_step(self, step: Step) -> None:
        if step in self._due:
            self._due.discard(step)
            self._cluster.kill_broker()


def spec(name: str) -> pb.JournalSpec:
    fragment = pb.JournalSpec.Fragment(length=16 << 10, compression_codec=pb.GZIP, stores=["file:///"])
    fragment.refresh_interval.FromSeconds(1)
    return pb.JournalSpec(
        name=name, replication=1, flags=4, labels=label_set([(CONTENT_TYPE, JSON_LINES)]), fragment=fragment
    )


def test_a_consumer_is_exact_while_its_broker_is_killed(spark, tmp_path):
    # The lease must outlast a restart of the broker on a busy machine.
    with EmbeddedCluster(tmp_path / "data", lease_seconds=30, etcd_fsync=False) as cluster:
        # Next to other tests, a broker may take longer to start than clients wait by default.
        config = ClientConfig(cluster.info.endpoint, cluster.info.file_root, retry_timeout=300.0)
        with SyncJournalClient.of(config) as client:
            client.apply([pb.ApplyRequest.Change(upsert=spec(name)) for name in (*SOURCES, SINK)])

            def append(journal: str, content: bytes) -> None:
                client.append(journal, content, retry_unknown=True)

            publisher = SyncPublisher(
                append,
                producer=new_producer_id(os.urandom),
                clock=ProducerClock(time.time_ns),
                framing=JsonLines(),
                max_batch_bytes=8 << 10,
            )
            words = [f"word-{n % 7}" for n in range(2_000)]
            for n, word in enumerate(words):
                publisher.add(SOURCES[n % 2], {"id": n, "word": word})
            publisher.commit()

            store_url = f"sqlite:///{tmp_path}/store.db"
            consumer = SparkConsumer(
                Words(),
                config,
                store_url,
                spark,
                ConsumerOptions(max_transaction_bytes=120_000),
                hooks=KillsTheBroker(cluster),
            )
            report = consumer.run_until_caught_up()

            head = client.head(SINK)
            out = iter_messages(JsonLines(), SINK, [client.read_all(SINK, 0, head)], 0)
            passed_on = [message.message for message in read_committed(out, Sequencer(), lambda wanted: [])]
    assert report.transactions > 1
    assert (report.messages, report.published, report.lag_bytes) == (len(words), len(words), 0)
    assert sorted(message["id"] for message in passed_on) == list(range(len(words)))
    with SqlStore(store_url).engine.connect() as connection:
        assert {row.word: row.n for row in connection.execute(select(COUNTS))} == Counter(words)
