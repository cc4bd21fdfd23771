"""Registered types of a shard's sources in columns."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy import BigInteger, Column, MetaData, String, Table, create_engine, select

from coranto.client.publishing import publisher
from coranto.errors import InvalidInput
from coranto.labels import CONTENT_TYPE, CSV, JSON_LINES, MESSAGE_TYPE, label_set
from coranto.messages.column_parser import LineParser
from coranto.testing import Cluster
from coranto.types import (
    Catalog,
    Compatibility,
    CsvForm,
    JsonForm,
    MessageType,
    TypeRegistry,
    TypeVersion,
    framing_of,
    parse_fields,
)
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.message_types import columns_of
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.stores import SqlShardStore

FIELDS = "id BIGINT NOT NULL, at TIMESTAMP, price DECIMAL(5, 2), lines ARRAY<STRUCT<item: STRING>>"


def version(fields: str = FIELDS, form: JsonForm | CsvForm | None = None) -> TypeVersion:
    definition = MessageType("shop.Order", form or JsonForm("/id_of"), parse_fields(fields))
    return TypeVersion(1, definition, Compatibility.BACKWARD, 0.0)


def test_batches_have_the_fields_of_the_type_and_its_uuids() -> None:
    columns = columns_of(version(), misfits=MisfitPolicy.NULLS)
    assert (columns.pointer, columns.misfits) == ("/id_of", MisfitPolicy.NULLS)
    line = b'{"id":1,"at":"2024-02-29T12:00:00Z","price":1.5,"lines":[{"item":"x"}]}\n'
    table, doubtful = LineParser(columns.schema).parse(pa.array([line]))
    assert not doubtful.any()
    [row] = table.to_pylist()
    assert (row["id"], str(row["at"]), str(row["price"]), row["lines"]) == (
        1,
        "2024-02-29 12:00:00+00:00",
        "1.50",
        [{"item": "x"}],
    )


def test_fields_can_be_chosen() -> None:
    assert columns_of(version(), fields=["price", "id"]).schema.names == ["price", "id"]
    assert columns_of(version("id INT, day DATE"), fields=["id"]).schema.names == ["id"]


@pytest.mark.parametrize(
    ("of", "fields", "problem"),
    [
        (version("a STRING", CsvForm()), (), r"shop\.Order@1 has the framing csv, and batches are of JSON"),
        (version(), ("x",), r"shop\.Order@1 has no field x; it has id, at, price, lines"),
        (version("id INT, day DATE"), (), r"day of shop\.Order@1 is DATE, which batches do not have: leave it out"),
        (version("a ARRAY<MAP<STRING, INT>>"), (), r"a\[\] of shop\.Order@1 is MAP<STRING, INT>, which batches"),
    ],
)
def test_types_without_support_for_batches_are_refused(of: TypeVersion, fields: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        columns_of(of, fields=fields)


def test_the_label_of_a_source_names_its_type() -> None:
    catalog = Catalog("types/registry")
    catalog.feed(version().to_line())
    labels = label_set({CONTENT_TYPE: JSON_LINES, MESSAGE_TYPE: "shop.Order"})
    assert catalog.find_for({"shop/orders": labels}) == version()


ORDERS = Table("orders", MetaData(), Column("id", BigInteger, primary_key=True), Column("name", String(20)))


class Orders(Application[SqlShardStore]):
    """An application that copies orders from JSON journals in batches, and from CSV journals one by one."""

    def __init__(self, types: Catalog, url: str) -> None:
        self.types = types
        self.url = url

    def new_store(self, shard):
        return SqlShardStore(self.url, ORDERS)

    def new_message(self, journal):
        found = self.types.find_for({journal.name: journal.labels})
        return columns_of(found) if isinstance(found.definition.form, JsonForm) else framing_of(found)

    def consume_batch(self, shard, store, batch, publisher):
        store.insert_batch(ORDERS, batch.rows)

    def consume_message(self, shard, store, envelope, publisher):
        store.connection.execute(ORDERS.insert(), {"id": int(envelope.message["id"]), "name": envelope.message["name"]})


@pytest.mark.integration
async def test_a_shard_reads_the_types_that_its_sources_name(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/orders.db"
    async with Cluster(brokers=1, lease_seconds=60) as cluster:
        client = cluster.client()
        registry = TypeRegistry(client, "types/registry")
        ends = {}
        for number, (form, content_type) in enumerate(((JsonForm("/id_of"), JSON_LINES), (CsvForm(1), CSV))):
            journal, name = f"shop/{form.name}", f"shop.{form.name}"
            await cluster.create(journal, labels={CONTENT_TYPE: content_type, MESSAGE_TYPE: name})
            definition = MessageType(name, form, parse_fields("id BIGINT NOT NULL, name STRING"))
            found = (await registry.register(definition, like=journal)).version
            made = publisher(client, framing_of(found))
            order = {"id": number, "name": form.name}
            await made.publish(journal, order if form.name == "json" else {**order, "id": str(number)})
            await made.flush()
            ends[journal] = await client.head(journal)
        app = Orders(await registry.catalog(), url)
        async with running_shard(app, shard_spec("orders-000", sorted(ends)), client) as running:
            await running.read_through(ends)
            await running.finish()
    with create_engine(url).connect() as connection:
        assert connection.execute(select(ORDERS).order_by(ORDERS.c.id)).all() == [(0, "json"), (1, "csv")]
