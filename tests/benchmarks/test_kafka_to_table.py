"""Records of `kafka_to_table`, and the merge of its floor. Neither Kafka nor Spark runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import psycopg
import pytest

from benchmarks.kafka_foreach_batch import TABLES, merge
from benchmarks.kafka_to_table import PARTITIONS, RECORD_BYTES, Target, records
from tests.servers.sql import PostgresServer


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with PostgresServer("track_commit_timestamp=on") as server:
        yield Target(server)


def test_records_have_140_bytes_and_each_key_once() -> None:
    lines = [line for part in range(PARTITIONS) for line in records(part, 5000, 1000)]
    keys, values = zip(*(line.rstrip(b"\n").split(b"\t") for line in lines), strict=True)
    assert sorted(map(int, keys)) == list(range(1000))
    assert {len(value) for value in values} == {RECORD_BYTES}
    rows = [json.loads(value) for value in values]
    assert [(row["id"], row["n"]) for row in rows] == [(int(key), 5000 + int(key)) for key in keys]


def test_a_batch_is_merged_once_and_its_commit_has_a_time(target: Target) -> None:
    with psycopg.connect(target.url, autocommit=True) as connection:
        connection.execute(TABLES.encode())
        connection.execute("INSERT INTO staged SELECT n, n, 'ada', 5, '', '' FROM generate_series(0, 9) n")
        before = time.time()
        merge(target.url, 0)
        assert before <= target.completed([], 0, 10) <= time.time()
        connection.execute("UPDATE staged SET n = n + 10")
        merge(target.url, 0)
        assert connection.execute("SELECT count(*) FROM orders WHERE n >= 10").fetchone() == (0,)
        merge(target.url, 1)
        assert before <= target.completed([], 10, 10) <= time.time()


def test_spark_gets_the_address_of_the_database(target: Target) -> None:
    assert target.jdbc["url"].startswith("jdbc:postgresql://127.0.0.1:")
    assert (target.jdbc["user"], target.jdbc["password"]) == ("postgres", "secret")
