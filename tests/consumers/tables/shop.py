"""Messages of overlapping transactions, and a model of the resulting tables."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import random
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, Table, select

from coranto.client import ClientConfig
from coranto.labels import CONTENT_TYPE, JSON_LINES, MESSAGE_TYPE, label_set
from coranto.messages import JsonLines, ProducerClock, TransactionBuilder, new_producer_id
from coranto.streams import SyncStreams, SyncStreamWriter, default_template
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.tables import RunOptions, TableReport, TableSpec, read_table, run_table
from tests.consumers.conftest import needs_mariadb

_numbers = itertools.count(1)

COLUMNS = "id BIGINT, name STRING, cents INT, price DECIMAL(10, 2), open BOOLEAN, at TIMESTAMP, op STRING"
KEYS = (1, 2, 3, 4, 5, 6, -7, 2**40)
NAMES = ("ada", "grün", "a\tb\n", "", "\\N", "'q\"", "日本")
MODES = ("append", "upsert", "changes")
PLACES = {"sqlite": "append", "postgresql": "upsert", "mariadb": "changes", "iceberg": "changes"}
"""The kinds of stores, each with its mode in `make test`. `make test-all` runs all modes in all stores."""


def place_param(kind: str, *more: str, sampled: bool) -> Any:
    """Return a parameter `place` and further ones. Only `make test-all` runs it if it is not `sampled`."""
    marks = [needs_mariadb] if kind == "mariadb" else []
    return pytest.param(kind, *more, marks=marks if sampled else [*marks, pytest.mark.exhaustive])


def places(*sample: str) -> pytest.MarkDecorator:
    """Return a mark for tests of one mode. `make test` runs them in some stores."""
    return pytest.mark.parametrize(
        "place", [place_param(kind, sampled=kind in sample) for kind in PLACES], indirect=True
    )


places_and_modes = pytest.mark.parametrize(
    ("place", "mode"),
    [place_param(kind, mode, sampled=mode == PLACES[kind]) for kind in PLACES for mode in MODES],
    indirect=["place"],
)


class Shop:
    """Journals of a cluster, and writes to them."""

    def __init__(self, cluster: SyncCluster) -> None:
        self.client = cluster.client()
        self.streams = SyncStreams(self.client)
        self.name = f"shop-{next(_numbers)}"
        self._clock = ProducerClock(time.time_ns)

    @property
    def config(self) -> ClientConfig:
        return self.client.config

    @property
    def endpoint(self) -> str:
        return self.config.endpoint.removeprefix("http://")

    def create(self, *names: str, message_type: str = "") -> None:
        """Create journals of lines of JSON."""
        typed = [(MESSAGE_TYPE, message_type)] if message_type else []
        for name in names:
            spec = pb.JournalSpec(name=name, replication=1, labels=label_set([(CONTENT_TYPE, JSON_LINES), *typed]))
            spec.fragment.length = 1 << 24
            spec.fragment.refresh_interval.FromSeconds(300)
            spec.fragment.stores.append(STORE_URL)
            spec.fragment.compression_codec = pb.GZIP
            self.client.apply([pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=-1)])

    def stream(self, segments: int = 1) -> str:
        name = f"{self.name}/events-{next(_numbers)}"
        self.streams.create(name, segments, template=default_template(stores=[STORE_URL]))
        return name

    def write(self, stream: str, *events: Mapping[str, Any], key: str = "id") -> None:
        """Write events to a stream, with the routing key from a field."""
        with SyncStreamWriter(self.client, stream) as writer:
            for event in events:
                writer.write_event(str(event[key]), dict(event))
            writer.flush()

    def producer(self) -> TransactionBuilder[Any]:
        return TransactionBuilder(new_producer_id(os.urandom), self._clock, JsonLines())

    def pend(self, builder: TransactionBuilder[Any], journal: str, *messages: Mapping[str, Any]) -> None:
        """Append messages of a transaction that stays open."""
        for message in messages:
            builder.add(journal, dict(message))
        for name, batch in builder.take_batches(1 << 20):
            self.client.append(name, [batch])

    def commit(self, builder: TransactionBuilder[Any]) -> None:
        builder.ack_intents()
        for name, content in builder.commit().items():
            self.client.append(name, [content])
        builder.finish()

    def publish(self, journal: str, *messages: Mapping[str, Any]) -> None:
        """Publish a transaction."""
        builder = self.producer()
        self.pend(builder, journal, *messages)
        self.commit(builder)


def message(chance: random.Random) -> dict[str, Any]:
    """Return a random message: all fields but the key may be null or absent."""
    made: dict[str, Any] = {"id": chance.choice(KEYS), "extra": {"deep": [1]}}
    if chance.random() < 0.8:
        made["name"] = chance.choice((None, *NAMES))
    if chance.random() < 0.8:
        made["cents"] = chance.choice((None, 0, -5, 2**31 - 1, chance.randrange(1000)))
    if chance.random() < 0.7:
        made["price"] = chance.choice((None, 0.5, 12345678.25, -1, 3))
    if chance.random() < 0.7:
        made["open"] = chance.choice((None, True, False))
    if chance.random() < 0.7:
        made["at"] = chance.choice((None, "2026-05-01T10:11:12.123456Z", "1969-12-31T23:59:59Z"))
    if chance.random() < 0.7:
        made["op"] = chance.choice((None, "u", "c", "d", "delete"))
    return made


def row_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a message, without its operation."""
    price, at = message.get("price"), message.get("at")
    return {
        "id": message["id"],
        "name": message.get("name"),
        "cents": message.get("cents"),
        "price": None if price is None else Decimal(str(price)).quantize(Decimal("0.01")),
        "open": message.get("open"),
        "at": None if at is None else dt.datetime.fromisoformat(at),
    }


def model(mode: str, committed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the expected rows of a table, for messages in commit order."""
    if mode == "append":
        return [row_of(each) | {"op": each.get("op")} for each in committed]
    rows: dict[int, dict[str, Any]] = {}
    for each in committed:
        if mode == "changes" and each.get("op") in ("d", "delete"):
            rows.pop(each["id"], None)
        else:
            rows[each["id"]] = row_of(each) | ({"op": each.get("op")} if mode == "upsert" else {})
    return list(rows.values())


def table_file(
    input: str, store: str, mode: str = "append", *, name: str = "", table: str = "items", **more: str
) -> str:
    """Return the file of a table for messages of `message`."""
    fields = {"name": name or f"items-{next(_numbers)}", "input": input, "columns": COLUMNS, "store": store}
    fields |= {"table": table, "mode": mode}
    if mode != "append":
        fields["key"] = "[id]"
    if mode == "changes":
        fields["operation"] = "{column: op, deletes: [d, delete]}"
    return "".join(f"{field}: {value}\n" for field, value in (fields | more).items() if value)


def run(shop: Shop, text: str, **options: Any) -> TableReport:
    """Run a table once."""
    return run_table(shop.config, read_table(text), RunOptions(once=True, **options))


def rows_in(spec: TableSpec) -> list[dict[str, Any]]:
    """Return the rows of a table, ordered by their values."""
    if spec.is_iceberg:
        from coranto_consumers.stores.iceberg.urls import IcebergHome

        found = IcebergHome.at(spec.store_url).load().scan().to_arrow().to_pylist()
    else:
        store = SqlStore(spec.store)
        table = Table(spec.table, MetaData())
        with store.engine.connect() as connection:
            table = Table(spec.table, MetaData(), autoload_with=connection)
            found = [dict(row._mapping) for row in connection.execute(select(table))]
    return ordered(found)


def ordered(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with comparable values, ordered by these."""
    return sorted(({name: _plain(name, value) for name, value in row.items()} for row in rows), key=repr)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, dt.datetime):  # SQLite and MariaDB store times in UTC, without zones.
        return value.replace(tzinfo=None) if value.tzinfo is None else value.astimezone(dt.UTC).replace(tzinfo=None)
    if name == "open" and value is not None:
        return bool(value)
    return Decimal(value).quantize(Decimal("0.01")) if name == "price" and value is not None else value


def yaml_in(folder: Path, text: str, name: str = "table.yaml") -> str:
    """Write a file, and return its path."""
    (folder / name).write_text(text)
    return str(folder / name)
