"""Spark reads and writes journals by the registered type of their messages, on real brokers and sessions."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, MetaData, String, Table, select

from coranto.client.committed import committed_messages
from coranto.client.publishing import sync_publisher
from coranto.errors import CorruptData, InvalidInput, JournalNotFound, MessageTypeNotFound
from coranto.labels import CONTENT_TYPE, CSV, FIXED_FRAMES, JSON_LINES, MESSAGE_TYPE, label_set
from coranto.messages import CsvRows, FixedFrame, JsonLines, ProtobufPayload, TextRows
from coranto.streams import Split, SyncStreams, default_template
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from coranto.types import (
    Compatibility,
    CsvForm,
    FixedForm,
    JsonForm,
    LinesForm,
    MessageType,
    SyncTypeRegistry,
    TypeField,
    framing_of,
    parse_fields,
)
from coranto.types.kinds import PlainKind
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.spark import Outputs, SparkConsumer, TableOutput, errors_of_tasks
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.consumer.windows import WindowConsumer
from coranto_consumers.spark.decoding.type_columns import spark_schema
from coranto_consumers.spark.options.source_options import SourceOptions
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.window_growth import grow
from tests.consumers.spark.shop_protobuf import ORDER, descriptors
from tests.sampling import sampled

T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


class Shop:
    """A test's journals, registry and client."""

    def __init__(self, cluster: SyncCluster) -> None:
        self.cluster = cluster
        self.client = cluster.client()
        self.folder = f"shop-{os.urandom(4).hex()}"
        self.registry = f"{self.folder}-types"
        self.types = SyncTypeRegistry(self.client, self.registry)
        self.journal = self.create("orders/one")

    def create(self, name: str, message_type: str = "shop.Order", content_type: str = JSON_LINES) -> str:
        labels = {CONTENT_TYPE: content_type, **({MESSAGE_TYPE: message_type} if message_type else {})}
        self.cluster.create(f"{self.folder}/{name}", labels=labels)
        return f"{self.folder}/{name}"

    def register(self, fields: str, form: Any = None, name: str = "shop.Order", **more: Any):
        definition = MessageType(name, form or JsonForm(), parse_fields(fields))
        return self.types.register(definition, like=self.journal, **more).version

    def publish(self, framing: Any, *messages: Any, journal: str = "") -> None:
        publisher = sync_publisher(self.client, framing)
        for each in messages:
            publisher.add(journal or self.journal, each)
        publisher.commit()

    def options(self, **more: str) -> dict[str, str]:
        return {
            "endpoint": self.client.config.endpoint,
            "selector": f"name:prefix={self.folder}/orders/",
            "registry": self.registry,
            **more,
        }

    def read(self, spark: SparkSession, schema: str = "", **more: str):
        reader = spark.read.format("journal").options(**self.options(**more))
        return (reader.schema(schema) if schema else reader).load()


@pytest.fixture
def shop(cluster: SyncCluster) -> Iterator[Shop]:
    shop = Shop(cluster)
    yield shop
    shop.types.close()


PROTOBUF = FixedForm.of(descriptors().SerializeToString(), "shop.Order")
FRAMINGS = {
    "json": (
        JSON_LINES,
        JsonForm("/id"),
        "n BIGINT NOT NULL, tags MAP<STRING, INT>, lines ARRAY<STRUCT<item: STRING NOT NULL>>, price DECIMAL(9, 2), "
        "day DATE",
        JsonLines("/id"),
        [{"n": 1, "tags": {"a": 1}, "lines": [{"item": "x"}], "price": 1.25, "day": "2024-02-29"}, {"n": 2}],
        "[(1, {'a': 1}, [Row(item='x')], Decimal('1.25'), datetime.date(2024, 2, 29)), (2, None, None, None, None)]",
    ),
    "csv": (
        CSV,
        CsvForm(1),
        "n BIGINT, text STRING, ratio DOUBLE",
        CsvRows(TextRows(3), uuid_column=1),
        [["1", 'a,\n"b', "0.5"], ["2", "", ""]],
        "[(1, 'a,\\n\"b', 0.5), (2, None, None)]",
    ),
    "protobuf": (
        FIXED_FRAMES,
        PROTOBUF,
        "n BIGINT, text STRING, lines ARRAY<STRUCT<item: STRING>>, kind STRING",
        FixedFrame(ProtobufPayload(ORDER)),
        [ORDER(n=1, text="x", lines=[{"item": "y"}], kind=1), ORDER(n=2)],
        "[(1, 'x', [Row(item='y')], 'RUSH'), (2, '', [], 'PLAIN')]",
    ),
    "frames": (
        FIXED_FRAMES,
        FixedForm(),
        "value BINARY",
        FixedFrame(ProtobufPayload(ORDER, None)),
        [ORDER(text="x"), ORDER()],
        "[(b'\\x1a\\x01x',), (b'',)]",
    ),
    "lines": ("text/plain", LinesForm(), "value STRING", None, ["one", "two"], "[('one',), ('two',)]"),
    "json without UUIDs": (
        JSON_LINES,
        JsonForm(None),
        "n BIGINT, at TIMESTAMP",
        None,
        ['{"n": 1, "at": "2024-02-29T12:00:00Z"}', '{"n": 2}'],
        "[(1, datetime.datetime(2024, 2, 29, 12, 0)), (2, None)]",
    ),
    "csv without UUIDs": (CSV, CsvForm(None), "n BIGINT, x STRING", None, ["1,a", "2,"], "[(1, 'a'), (2, None)]"),
}


def journal_of(shop: Shop, kind: str) -> str:
    """Register the type of a kind of messages, and return a journal with such messages and the type's name."""
    content_type, form, fields, framing, messages, _ = FRAMINGS[kind]
    shop.register(fields, form, "kinds.Kind")
    journal = shop.create("kinds/one", "kinds.Kind", content_type)
    if framing is None:
        shop.client.append(journal, "".join(f"{each}\n" for each in messages).encode())
    else:
        shop.publish(framing, *messages, journal=journal)
    return journal


@pytest.mark.parametrize("kind", sampled(FRAMINGS, 2))
def test_schema_and_framing_come_from_the_type_named_by_journals(shop, spark, kind):
    fields, rows = FRAMINGS[kind][2], FRAMINGS[kind][-1]
    journal = journal_of(shop, kind)
    options = {"endpoint": shop.client.config.endpoint, "subscribe": journal, "registry": shop.registry}

    frame = spark.read.format("journal").options(**options).load()
    assert str([tuple(row) for row in frame.collect()]) == rows
    assert frame.columns == [field.name for field in parse_fields(fields)]

    query = (
        spark.readStream.format("journal")
        .options(**options, startingOffsets="earliest")
        .load()
        .writeStream.format("memory")
        .queryName("kinds")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert str([tuple(row) for row in spark.sql("SELECT * FROM kinds").collect()]) == rows


def test_rows_are_committed_messages_with_requested_source_columns(shop, spark):
    shop.register("n BIGINT")
    shop.publish(JsonLines(), {"n": 1}, {"n": 2})
    shop.client.append(shop.journal, b'{"n": "three"}\n')
    frame = shop.read(spark, metadataColumns="_journal,_offset,_commit_offset,_corrupt_record")
    assert frame.dtypes == [
        ("n", "bigint"),
        ("_journal", "string"),
        ("_offset", "bigint"),
        ("_commit_offset", "bigint"),
        ("_corrupt_record", "string"),
    ]
    rows = frame.orderBy("_offset").collect()
    assert [row.n for row in rows] == [1, 2, None]
    assert [row._journal for row in rows] == [shop.journal] * 3
    assert rows[2]._corrupt_record == '{"n": "three"}'
    assert rows[0]._commit_offset == rows[1]._commit_offset > rows[1]._offset


def test_a_version_is_chosen_by_its_number_and_a_schema_of_the_user_wins(shop, spark):
    shop.register("n INT")
    shop.publish(JsonLines(), {"n": 1, "x": "a"})
    frame = shop.read(spark)
    shop.register("n BIGINT, x STRING")

    assert [tuple(row) for row in frame.collect()] == [(1,)], "a read has the version that it was made with"
    assert [tuple(row) for row in shop.read(spark).collect()] == [(1, "a")]
    assert shop.read(spark, messageType="shop.Order@1").dtypes == [("n", "int")]
    assert [tuple(row) for row in shop.read(spark, "x STRING, n STRING, _offset BIGINT").collect()] == [("a", "1", 0)]


ODD = ("a.b", "a`b", "ü ñ", "<z>", 'q"uote', "back\\slash", "select", "1n", "a:b", "a,b", "'", "$", "данные", "*")


def test_fields_may_have_any_printable_name_everywhere(shop, spark, tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    fields = tuple(TypeField(name, PlainKind.BIGINT) for name in ODD)
    version = shop.types.register(MessageType("shop.Order", JsonForm(), fields), like=shop.journal).version
    shop.publish(framing_of(version), {name: number for number, name in enumerate(ODD)})
    row = tuple(range(len(ODD)))
    assert [tuple(each) for each in shop.read(spark).collect()] == [row]
    write(shop, spark.createDataFrame([row], spark_schema(fields)))
    assert [tuple(each) for each in shop.read(spark).collect()] == [row, row]

    class OddTexts(Texts):
        def outputs(self, committed):
            names = [F.col("`" + name.replace("`", "``") + "`") for name in ODD]
            text = F.to_json(F.struct(*names)).alias("text")
            return Outputs(tables=[TableOutput(TEXTS, committed.select(F.col("_offset").alias("at"), text))])

    made = SparkConsumer(
        OddTexts(f"name={shop.journal}"), shop.client.config, url, spark, ConsumerOptions(registry=shop.registry)
    )
    assert made.run_until_caught_up().messages == 2
    with SqlStore(url).engine.connect() as connection:
        texts = [json.loads(each.text) for each in connection.execute(select(TEXTS))]
    assert texts == [dict(zip(ODD, row, strict=True))] * 2


def test_a_named_type_needs_no_labels(shop, spark):
    shop.register("n BIGINT", name="other.Type")
    shop.publish(JsonLines(), {"n": 1})
    assert [row.n for row in shop.read(spark, messageType="other.Type").collect()] == [1]


def test_errors_say_why_a_read_by_the_registry_is_impossible(shop, spark):
    shop.register("n BIGINT")
    shop.register("value STRING", LinesForm(), "csv.Lines")
    shop.register("a STRING", CsvForm(), "csv.Row")
    shop.register("_offset BIGINT", name="own.Column")

    def refused(kind: type[Exception], problem: str, **options: str) -> None:
        with pytest.raises(kind, match=problem), errors_of_tasks():
            shop.read(spark, **options).collect()

    refused(MessageTypeNotFound, r"has no message type shop\.None; it has csv\.Lines, ", messageType="shop.None")
    refused(MessageTypeNotFound, r"no message type shop\.Order@2; it has shop\.Order@1\.", messageType="shop.Order@2")
    refused(JournalNotFound, "there is no such registry yet", registry=f"{shop.registry}-none")
    refused(
        InvalidInput,
        r"has content-type application/x-ndjson, and messages of csv\.Row are text/csv",
        messageType="csv.Row",
    )
    refused(InvalidInput, "has a field _offset, and so has the source", messageType="own.Column")
    other = shop.create("orders/two", "shop.Other")
    bare = shop.create("orders/bare", "")
    refused(InvalidInput, f"none: {bare}; shop.Order: {shop.journal}; shop.Other: {other}")
    shop.client.append(shop.registry, b'{"registry": 2}\n')
    refused(CorruptData, "a later version of Coranto")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"framing": "csv"}, "option framing: comes from the registry: leave it out"),
        ({"uuidPointer": "/id"}, "option uuidPointer: comes from the registry"),
        ({"descriptorSet": "x"}, "option descriptorSet: comes from the registry"),
        ({"parse": "json"}, "option parse: comes from the registry"),
        ({"messageType": "a@b"}, "option messageType: 'a@b' has no version after @"),
        ({"messageType": ""}, "option messageType: ''"),
        ({"registry": ""}, "option registry: names no journal"),
        ({"registry": "a b"}, "option registry: "),
        ({"metadataColumns": "offset"}, "option metadataColumns: 'offset' is not one of _journal, _offset"),
    ],
)
def test_options_used_with_a_registry_are_checked(options, problem):
    with pytest.raises(InvalidInput, match=problem):
        SourceOptions.parse({"endpoint": "localhost:8080", "subscribe": "a/b", "registry": "types/registry", **options})


def test_options_for_a_registry_need_one():
    with pytest.raises(InvalidInput, match="option messageType: is for framing=fixed, not for json"):
        SourceOptions.parse({"endpoint": "localhost:8080", "subscribe": "a/b", "messageType": "shop.Order"})
    with pytest.raises(InvalidInput, match="option metadataColumns: is for reads by a registry"):
        SourceOptions.parse({"endpoint": "localhost:8080", "subscribe": "a/b", "metadataColumns": "_offset"})


# -- Streaming queries -------------------------------------------------------------------------------------------------


def run_query(spark, shop, folder: Path, **options: str) -> None:
    query = (
        spark.readStream.format("journal")
        .options(**shop.options(**options), startingOffsets="earliest")
        .load()
        .writeStream.format("json")
        .options(path=str(folder / "rows"), checkpointLocation=str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    with errors_of_tasks():
        query.awaitTermination()


def test_a_restarted_query_uses_the_latest_version_unless_one_is_pinned(shop, spark, tmp_path):
    shop.register("n INT")
    shop.publish(JsonLines(), {"n": 1, "x": "a"})
    run_query(spark, shop, tmp_path)
    shop.register("n BIGINT, x STRING")
    shop.publish(JsonLines(), {"n": 2, "x": "b"})
    run_query(spark, shop, tmp_path)
    shop.publish(JsonLines(), {"n": 3, "x": "c"})
    run_query(spark, shop, tmp_path, messageType="shop.Order@1")

    rows = spark.read.schema("n BIGINT, x STRING").json(str(tmp_path / "rows")).orderBy("n").collect()
    assert [tuple(row) for row in rows] == [(1, None), (2, "b"), (3, None)]


def test_a_running_query_needs_no_registry_but_a_restarted_query_does(shop, spark, tmp_path):
    shop.register("n INT")
    shop.publish(JsonLines(), {"n": 1})
    rows = spark.readStream.format("journal").options(**shop.options(startingOffsets="earliest")).load()
    seen: list[int] = []
    query = (
        rows.writeStream.foreachBatch(lambda frame, _: seen.extend(row.n for row in frame.collect()))
        .option("checkpointLocation", str(tmp_path / "under-way"))
        .start()
    )
    query.processAllAvailable()
    [info] = shop.client.list(f"name={shop.registry}").journals
    shop.client.apply([pb.ApplyRequest.Change(delete=shop.registry, expect_mod_revision=info.mod_revision)])
    shop.publish(JsonLines(), {"n": 2})
    query.processAllAvailable()
    query.stop()
    assert seen == [1, 2]
    with pytest.raises(JournalNotFound, match="there is no such registry yet"), errors_of_tasks():
        run_query(spark, shop, tmp_path)


def test_a_later_journal_of_another_type_ends_a_query(shop, spark, tmp_path):
    shop.register("n INT")
    shop.publish(JsonLines(), {"n": 1})
    seen: list[int] = []
    query = (
        spark.readStream.format("journal")
        .options(**shop.options(startingOffsets="earliest"))
        .load()
        .writeStream.foreachBatch(lambda frame, _: seen.extend(row.n for row in frame.collect()))
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    query.processAllAvailable()
    assert seen == [1]
    later = shop.create("orders/later", "shop.Other")
    with pytest.raises(
        InvalidInput, match=f"journal {later} has app.gazette.dev/message-type shop.Other, and shop.Order"
    ):
        with errors_of_tasks():
            query.awaitTermination(60)


# -- Consumers ---------------------------------------------------------------------------------------------------------


ROWS = Table(
    "rows", MetaData(), Column("at", BigInteger, primary_key=True), Column("n", BigInteger), Column("x", String(9))
)


class Copies:
    """Copy the numbers of messages to a table."""

    name = "copies"
    value_schema = "*"

    def __init__(self, shop: Shop) -> None:
        self.sources = f"name:prefix={shop.folder}/orders/"

    def outputs(self, committed):
        x = "x" if "x" in committed.columns else "CAST(NULL AS STRING) AS x"
        return Outputs(tables=[TableOutput(ROWS, committed.selectExpr("_offset AS at", "CAST(n AS BIGINT) AS n", x))])


class WithCommits(Copies):
    value_schema = "*, _commit_offset BIGINT"

    def outputs(self, committed):
        rows = committed.selectExpr("_offset AS at", "_commit_offset AS n", "x")
        return Outputs(tables=[TableOutput(ROWS, rows)])


class Pinned(Copies):
    message_type = "shop.Order@1"


def rows_in(url: str) -> list[tuple[int, str | None]]:
    with SqlStore(url).engine.connect() as connection:
        return [(row.n, row.x) for row in connection.execute(select(ROWS).order_by(ROWS.c.at))]


def test_an_application_takes_all_fields_of_the_type_of_its_sources(shop, spark, tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    shop.register("n INT")
    shop.publish(JsonLines(), {"n": 1, "x": "a"})
    consumer = SparkConsumer(Copies(shop), shop.client.config, url, spark, ConsumerOptions(registry=shop.registry))
    assert consumer.run_until_caught_up().messages == 1
    shop.register("n BIGINT, x STRING")
    shop.publish(JsonLines(), {"n": 2, "x": "b"})
    assert consumer.run_until_caught_up().messages == 1  # The instance keeps its version.
    shop.publish(JsonLines(), {"n": 3, "x": "c"})
    restarted = SparkConsumer(Copies(shop), shop.client.config, url, spark, ConsumerOptions(registry=shop.registry))
    assert restarted.run_until_caught_up().messages == 1
    shop.publish(JsonLines(), {"n": 4, "x": "d"})
    pinned = SparkConsumer(Pinned(shop), shop.client.config, url, spark, ConsumerOptions(registry=shop.registry))
    assert pinned.run_until_caught_up().messages == 1
    assert rows_in(url) == [(1, None), (2, None), (3, "c"), (4, None)]


def test_an_application_may_request_commits_next_to_the_fields(shop, spark, tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    shop.register("n INT, x STRING")
    shop.publish(JsonLines(), {"n": 1, "x": "a"}, {"n": 2, "x": "b"})
    SparkConsumer(
        WithCommits(shop), shop.client.config, url, spark, ConsumerOptions(registry=shop.registry)
    ).run_until_caught_up()
    [(one, _), (two, _)] = rows_in(url)
    assert one == two > 0


def test_an_application_reads_another_framing_by_the_registry(shop, spark, tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    shop.register("n INT, x STRING", CsvForm(), "csv.Row")
    version = shop.types.find("csv.Row")
    journal = shop.create("rows/one", "csv.Row", CSV)
    shop.publish(framing_of(version), {"n": "7", "x": "a\nb"}, journal=journal)

    class Rows(Copies):
        def __init__(self) -> None:
            self.sources = f"name={journal}"

    SparkConsumer(Rows(), shop.client.config, url, spark, ConsumerOptions(registry=shop.registry)).run_until_caught_up()
    assert rows_in(url) == [(7, "a\nb")]


def test_errors_say_why_a_consumer_cannot_have_a_type(shop, spark, tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"

    def consumer(application, **options) -> SparkConsumer:
        return SparkConsumer(application, shop.client.config, url, spark, ConsumerOptions(**options))

    with pytest.raises(InvalidInput, match="framing: is determined by the registry"):
        consumer(Copies(shop), registry="types/registry", framing=JsonLines())
    with pytest.raises(InvalidInput, match="uuid_pointer: is determined by the registry"):
        consumer(Copies(shop), registry="types/registry", uuid_pointer="/id")
    shop.publish(JsonLines(), {"n": 1})
    with pytest.raises(InvalidInput, match="value_schema: `\\*` stands for the fields of a registered type"):
        consumer(Copies(shop)).run_until_caught_up()
    shop.register("n INT")
    shop.create("orders/two", "shop.Other")
    with pytest.raises(InvalidInput, match="journals name different message types"):
        consumer(Copies(shop), registry=shop.registry).run_until_caught_up()

    class Twice(Pinned):
        value_schema = "*, n BIGINT"

    with pytest.raises(InvalidInput, match="column n is among those that `\\*` stands for"):
        consumer(Twice(shop), registry=shop.registry).run_until_caught_up()


def eventually(ask: Callable[[], list[T]]) -> list[T]:
    """Return the result once there is one."""
    end = time.monotonic() + 60
    while not (found := ask()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


TEXTS = Table("texts", MetaData(), Column("at", BigInteger, primary_key=True), Column("text", String(400)))


class Texts:
    """Copy whole messages, as JSON."""

    name = "texts"
    value_schema = "*"

    def __init__(self, sources: str, table: Table = TEXTS) -> None:
        self.sources = sources
        self.table = table

    def outputs(self, committed):
        own = [name for name in committed.columns if not name.startswith("_")]
        text = F.to_json(F.struct(*own)).alias("text")
        return Outputs(tables=[TableOutput(self.table, committed.select(F.col("_offset").alias("at"), text))])


@pytest.mark.parametrize("kind", sampled(FRAMINGS, 3))
def test_a_consumer_has_the_same_messages_as_a_read_in_every_framing(shop, spark, tmp_path, kind):
    url = f"sqlite:///{tmp_path}/store.db"
    journal = journal_of(shop, kind)
    made = SparkConsumer(
        Texts(f"name={journal}"), shop.client.config, url, spark, ConsumerOptions(registry=shop.registry)
    )
    assert made.run_until_caught_up().messages == 2
    options = {"endpoint": shop.client.config.endpoint, "subscribe": journal, "registry": shop.registry}
    frame = spark.read.format("journal").options(**options).load()
    read = [row.text for row in frame.select(F.to_json(F.struct("*")).alias("text")).collect()]
    with SqlStore(url).engine.connect() as connection:
        assert [row.text for row in connection.execute(select(TEXTS).order_by(TEXTS.c.at))] == read


@pytest.mark.parametrize("kind", sampled(["json", "csv", "json without UUIDs"], 3))
def test_windows_have_the_messages_by_the_registry(shop, spark, tmp_path, kind):
    by_window = Table(
        "by_window",
        MetaData(),
        Column("coranto_window", BigInteger, primary_key=True, autoincrement=False),
        Column("at", BigInteger, primary_key=True),
        Column("text", String(400)),
    )
    url = f"sqlite:///{tmp_path}/store.db"
    journal = journal_of(shop, kind)
    [info] = shop.client.list(f"name={journal}").journals
    info.spec.fragment.length = 1024
    shop.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
    first = shop.client.read_all(journal, 0, shop.client.head(journal))
    for _ in range(2):  # Full fragments are stored.
        shop.client.append(journal, first * (2000 // len(first)))
    made = WindowConsumer(
        Texts("", by_window), shop.client.config, url, spark, ConsumerOptions(registry=shop.registry), name="windows"
    )
    name = eventually(lambda: grow(made.log, shop.client, [f"name={journal}"], partial=True))[0].window.name
    expected = made.materialize(name).messages

    def texts() -> list[str]:
        with SqlStore(url).engine.connect() as connection:
            return sorted(row.text for row in connection.execute(select(by_window)))

    rows = texts()
    assert len(rows) == expected >= 2
    assert len(set(rows)) == 2
    assert '"n":1' in rows[0]
    shop.register("later STRING", FRAMINGS[kind][1], "kinds.Kind", compatibility=Compatibility.NONE)
    assert made.materialize(name).messages == expected, "an instance keeps its version"
    assert texts() == rows


# -- Writing -----------------------------------------------------------------------------------------------------------


def written(shop: Shop) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in each.message.items() if key != "_meta"}
        for each in committed_messages(shop.client, shop.journal, JsonLines())
    ]


def write(shop: Shop, frame, **options: str) -> None:
    with errors_of_tasks():
        writer = frame.write.format("journal").mode("append")
        writer.options(**shop.options(ledger=f"{shop.folder}-ledger", mapping="random", **options)).save()


def test_rows_that_fit_the_latest_version_are_written(shop, spark):
    shop.register("n BIGINT NOT NULL, s STRUCT<a: INT, b: STRING>")
    write(shop, spark.createDataFrame([(1, (2, "x")), (2, None)], "n INT, s STRUCT<a: INT, b: STRING>"))
    write(shop, spark.sql("SELECT named_struct('n', 3L) AS value"))
    assert sorted(written(shop), key=lambda row: row["n"]) == [{"n": 1, "s": {"a": 2, "b": "x"}}, {"n": 2}, {"n": 3}]


def test_rows_that_do_not_fit_are_refused_before_anything_is_written(shop, spark):
    shop.register("n BIGINT NOT NULL, x STRING")
    head = shop.client.head(shop.journal)
    cases = {
        "SELECT 'a' AS n": r"rows do not fit shop\.Order@1: n is STRING, and its field BIGINT: cast it",
        "SELECT 1L AS n, 1 AS y": "y is not a field of the type, which has n, x",
        "SELECT 'a' AS x": "n is NOT NULL, and there is no such column",
        "SELECT named_struct('n', 'a') AS value": "n is STRING, and its field BIGINT",
        "SELECT '{}' AS value": "the value is a text, whose fields are not known before it is written",
    }
    for query, problem in cases.items():
        with pytest.raises(InvalidInput, match=problem):
            write(shop, spark.sql(query))
    assert shop.client.head(shop.journal) == head
    with pytest.raises(InvalidInput, match=r"rows do not fit shop\.Order@1: n is NOT NULL, and a row has none"):
        write(shop, spark.sql("SELECT CAST(NULL AS BIGINT) AS n, 'a' AS x"))
    with pytest.raises(InvalidInput, match=r"rows do not fit shop\.Order@1: n is NOT NULL, and a row has none"):
        write(shop, spark.sql("SELECT named_struct('n', CAST(NULL AS BIGINT)) AS value"))
    assert written(shop) == []


def test_types_that_the_sink_does_not_write_are_refused(shop, spark):
    shop.register("n BIGINT", JsonForm(None), "no.Uuid")
    shop.register("n BIGINT", CsvForm(), "csv.Row")
    rows = spark.sql("SELECT 1L AS n")
    with pytest.raises(InvalidInput, match="have no UUIDs, which the sink needs"):
        write(shop, rows, messageType="no.Uuid")
    with pytest.raises(InvalidInput, match=r"csv\.Row@1 has another framing: the sink writes lines of JSON"):
        write_any(shop, rows)
    with pytest.raises(InvalidInput, match="option uuidPointer: comes from the registry"):
        write(shop, rows, uuidPointer="/id")


def write_any(shop: Shop, rows) -> None:
    journal = shop.create("rows/csv", "csv.Row", CSV)
    options = {"endpoint": shop.client.config.endpoint, "subscribe": journal, "registry": shop.registry}
    with errors_of_tasks():
        rows.write.format("journal").mode("append").options(**options, ledger=f"{shop.folder}-ledger").save()


def test_messages_have_their_uuids_in_the_field_of_the_type(shop, spark):
    shop.register("n BIGINT", JsonForm("/id"))
    write(shop, spark.sql("SELECT 1L AS n"))
    [message] = [each.message for each in committed_messages(shop.client, shop.journal, JsonLines("/id"))]
    assert uuid.UUID(message.pop("id")).version == 1
    assert message == {"n": 1}


def test_a_query_writes_rows_that_fit(shop, spark, tmp_path):
    shop.register("n BIGINT NOT NULL")
    source = shop.create("source/one", "")
    shop.client.append(source, b'{"n": 1}\n{"n": 2}\n')

    def query(schema: str, folder: str):
        rows = spark.readStream.format("journal").schema(schema)
        rows = rows.options(endpoint=shop.client.config.endpoint, subscribe=source, startingOffsets="earliest").load()
        writer = rows.writeStream.format("journal").options(**shop.options(ledger=f"{shop.folder}-ledger"))
        options = {"mapping": "random", "checkpointLocation": str(tmp_path / folder)}
        return writer.options(**options).trigger(availableNow=True).start()

    query("n BIGINT", "fits").awaitTermination()
    assert written(shop) == [{"n": 1}, {"n": 2}]
    with pytest.raises(InvalidInput, match="n is STRING, and its field BIGINT"), errors_of_tasks():
        query("n STRING", "unfit").awaitTermination()


def test_events_of_a_stream_fit_the_type_of_its_segments(shop, spark, tmp_path):
    shop.register("n BIGINT NOT NULL, key STRING")
    name = f"{shop.folder}/stream"
    template = default_template(stores=[STORE_URL])
    template.labels.CopyFrom(label_set({CONTENT_TYPE: JSON_LINES, MESSAGE_TYPE: "shop.Order"}))
    with SyncStreams(shop.client) as streams:
        streams.create(name, 1, template=template)
        options = {"endpoint": shop.client.config.endpoint, "stream": name, "registry": shop.registry}

        def write_events(query: str, **more: str) -> None:
            writer = spark.sql(query).write.format("journal").mode("append")
            with errors_of_tasks():
                writer.options(**options, **more).save()

        write_events("SELECT 1L AS n, 'a' AS key")
        with pytest.raises(InvalidInput, match=r"rows do not fit shop\.Order@1: n is STRING"):
            write_events("SELECT 'one' AS n, 'a' AS key")
        streams.scale(name, [Split(0)])
        write_events("SELECT 2L AS n, 'b' AS key")

        source = shop.create("source/one", "")
        shop.client.append(source, b'{"n": 3, "key": "c"}\n')
        rows = spark.readStream.format("journal").schema("n BIGINT, key STRING")
        rows = rows.options(endpoint=shop.client.config.endpoint, subscribe=source, startingOffsets="earliest").load()
        writer = rows.writeStream.format("journal").options(**options, checkpointLocation=str(tmp_path / "c"))
        writer.trigger(availableNow=True).start().awaitTermination()
        frame = spark.read.format("journal").options(**options).load()
        assert sorted(tuple(row) for row in frame.collect()) == [(1, "a"), (2, "b"), (3, "c")]


def test_a_version_without_compatibility_is_pinned_for_old_readers(shop, spark):
    shop.register("n INT")
    shop.publish(JsonLines(), {"n": 1})
    shop.register("n STRING", compatibility=Compatibility.NONE)
    shop.publish(JsonLines(), {"n": "two"})
    rows = shop.read(spark, messageType="shop.Order@1", metadataColumns="_offset").orderBy("_offset").collect()
    assert [row.n for row in rows] == [1, None]
