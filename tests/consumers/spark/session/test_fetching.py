"""Each stored fragment is fetched once for any number of tasks, passes and transactions."""

import json
import os
import time

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, select

from coranto.fragments.fragment import Codec
from coranto.messages.framing import JsonLines
from coranto.messages.publisher import TransactionBuilder
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto.testing.http_store import HttpStore
from coranto_consumers.spark import Outputs, SparkConsumer, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.session import fetching
from coranto_consumers.stores import SqlStore

JOURNAL = "stored/one"
MESSAGES = 3000
COPIES = Table("copies", MetaData(), Column("n", BigInteger, nullable=False))


class Copies:
    """Copy each message's number to a table."""

    name = "copies"
    sources = f"name={JOURNAL}"
    value_schema = "n BIGINT"

    def outputs(self, committed):
        return Outputs(tables=[TableOutput(COPIES, committed.select("n"))])


@pytest.fixture
def stored(broker):
    """A journal with three stored fragments, which end within lines, and a tail on the broker."""
    with HttpStore() as store:
        broker.create(JOURNAL)
        builder = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())
        for n in range(MESSAGES):
            builder.add(JOURNAL, {"n": n, "text": os.urandom(50).hex()})
        content = builder.take(JOURNAL, 1 << 30)
        builder.ack_intents()
        content += b"".join(builder.commit().values())
        piece = len(content) // 4
        for number, codec in enumerate((Codec.ZSTANDARD, Codec.GZIP, Codec.NONE)):
            broker.write(JOURNAL, content[number * piece : (number + 1) * piece])
            broker.fake.journals[JOURNAL].roll_to(store, codec)
        broker.write(JOURNAL, content[3 * piece :])
        yield store


def numbers(frame) -> list[int]:
    return sorted(json.loads(row.value)["n"] for row in frame.select("value", "flags").where("flags != 2").collect())


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_a_read_fetches_each_fragment_once(spark, broker, stored, isolation):
    frame = spark.read.format("journal").options(
        endpoint=broker.endpoint,
        subscribe=JOURNAL,
        isolation=isolation,
        maxBytesPerPartition=str(broker.head(JOURNAL) // 16),
    )

    assert numbers(frame.load()) == list(range(MESSAGES))
    assert sorted(stored.fetched.values()) == [1, 1, 1]


def test_a_series_of_transactions_fetches_each_fragment_once(spark, broker, stored, new_store):
    url = new_store("sqlite")
    consumer = SparkConsumer(
        Copies(),
        broker.config,
        url,
        spark,
        ConsumerOptions(
            max_transaction_bytes=broker.head(JOURNAL) // 5, max_partition_bytes=broker.head(JOURNAL) // 40
        ),
    )

    assert consumer.run_until_caught_up().transactions > 3
    with SqlStore(url).engine.connect() as connection:
        assert sorted(connection.execute(select(COPIES.c.n)).scalars()) == list(range(MESSAGES))
    assert sorted(stored.fetched.values()) == [1, 1, 1]


def test_reads_continue_without_a_fragment_cache(spark, broker, stored):
    frame = spark.read.format("journal").options(
        endpoint=broker.endpoint, subscribe=JOURNAL, fragmentCacheBytes="0", minPartitions="4"
    )

    assert numbers(frame.load()) == list(range(MESSAGES))
    assert min(stored.fetched.values()) >= 2


@pytest.mark.parametrize(
    ("folders", "local", "is_shared"),
    [
        (("work/app-20261123110344-0000/0", "work/app-20261123110344-0000/1"), "", False),  # Kept for a week.
        (("work/app-20261123110344-0000/0", "work/app-20261123110344-0000/1"), "spark-1/executor-1", True),
        (
            ("appcache/application_1763893800000_0001/container_1", "appcache/application_1763893800000_0001/x/y"),
            "",
            True,
        ),
        (("appcache/application_1763893800000_0001/c", "appcache/application_1763893800000_0002/c"), "", False),
        (("app-data/spark-1/userFiles-1", "app-data/spark-1/userFiles-2"), "", False),
    ],
)
def test_executors_of_one_application_on_a_machine_share_a_folder(folders, local, is_shared, tmp_path, monkeypatch):
    found = []
    if local:
        (tmp_path / local).mkdir(parents=True)
        monkeypatch.setenv("SPARK_EXECUTOR_DIRS", f"{tmp_path / local}:{tmp_path}/another")
    else:
        monkeypatch.delenv("SPARK_EXECUTOR_DIRS", raising=False)
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        monkeypatch.setattr(fetching, "executor_folder", lambda folder=folder: tmp_path / folder)
        found.append(fetching.machine_folder())
    assert (found[0] == found[1]) == is_shared
    assert not local or found[0].parent == tmp_path / local, "a worker removes this one when the application ends"

    monkeypatch.setattr(fetching.socket, "gethostname", lambda: "another")
    assert not is_shared or fetching.machine_folder() not in found, "a network drive may hold the folder"
