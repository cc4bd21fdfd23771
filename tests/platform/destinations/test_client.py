"""Pipelines of dlt with a real cluster: loaded rows, schema changes, and the state of a pipeline."""

from __future__ import annotations

import datetime as dt
import gzip
import os
import shutil
import sqlite3
import threading
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import dlt
import psycopg
import pyarrow as pa
import pytest
from dlt.common.pipeline import LoadInfo
from dlt.common.wei import Wei
from dlt.pipeline.exceptions import PipelineStepFailed

from coranto.client import SyncJournalClient
from coranto.labels import HELD, label_set
from coranto.publication.records import Acknowledgement
from coranto.types import Compatibility, SyncTypeRegistry, parse_fields
from coranto.types.kinds import format_fields
from tests.platform.destinations.conftest import Running
from tests.platform.destinations.shop import DATASET, loaded, messages, pipeline, serving, source
from tests.servers.sql import PostgresServer

pytestmark = pytest.mark.integration


def failure(pipe: Any, data: Any, **options: Any) -> str:
    with pytest.raises(PipelineStepFailed) as caught:
        pipe.run(data, **options)
    return str(caught.value)


def fields(client: SyncJournalClient, table: str) -> str:
    with SyncTypeRegistry(client, "types/registry") as registry:
        return format_fields(registry.find(f"{DATASET}.{table}").definition.fields)


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(path) as database:
        return database.execute(query).fetchall()


# -- The REST source: its rows, also nested ones, are in tables --------------------------------------------------------


def test_tables_equal_the_source(running: Running, client: SyncJournalClient, tmp_path: Path) -> None:
    """Orders and their lines change and shrink. Tables of `coranto table` equal the source, row by row."""
    store, endpoint = f"sqlite:///{tmp_path}/shop.db", os.environ["CORANTO_ENDPOINT"]
    with serving() as shop:

        def run(orders: list[dict[str, Any]]) -> None:
            shop.rows["orders"] = orders
            pipe.run(source(shop.url, "orders", disposition="merge"))
            loaded(endpoint, store, "orders", "id BIGINT, customer STRING, _dlt_id STRING, _dlt_load_id STRING", *key)
            loaded(endpoint, store, "orders__lines", lines, "mode: upsert", "key: [_dlt_id]")
            found = rows(tmp_path / "shop.db", "SELECT id, customer FROM orders ORDER BY id")
            assert found == [(each["id"], each["customer"]) for each in orders]
            items = rows(
                tmp_path / "shop.db",
                "SELECT o.id, l.item FROM orders__lines l JOIN orders o ON l._dlt_root_id = o._dlt_id "
                "AND l._dlt_load_id = o._dlt_load_id ORDER BY o.id, l._dlt_list_idx",
            )
            assert items == [(each["id"], item["item"]) for each in orders for item in each["lines"]]

        def order(id: int, version: int, customer: str, *items: str) -> dict[str, Any]:
            return {"id": id, "version": version, "customer": customer, "lines": [{"item": each} for each in items]}

        pipe, key = pipeline(tmp_path / "work"), ("mode: upsert", "key: [id]")
        lines = "item STRING, _dlt_root_id STRING, _dlt_list_idx BIGINT, _dlt_id STRING, _dlt_load_id STRING"
        many = [order(n, n, f"c{n % 7}", *(f"i{n}-{at}" for at in range(n % 4))) for n in range(1, 70)]
        run(many)
        changed = order(5, 100, "ada", "lamp")
        run([changed if each["id"] == 5 else each for each in many])
        run([order(5, 101, "bob") if each["id"] == 5 else each for each in many] + [order(70, 102, "c", "x", "y")])
    assert len(messages(client, "_dlt_loads")) == 3


def test_the_order_of_keys_is_kept_over_several_journals(
    running: Running, client: SyncJournalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESTINATION__CORANTO__JOURNALS", "3")
    pipe = pipeline(tmp_path / "work")
    for version in range(1, 4):
        data = [{"id": n, "version": version} for n in range(30)]
        pipe.run(data, table_name="orders", write_disposition="merge", primary_key="id")
    journals = client.list(f"name:prefix={DATASET}/orders/").journals
    assert len(journals) == 3
    assert all(client.head(info.spec.name) for info in journals)
    store, endpoint = f"sqlite:///{tmp_path}/shop.db", os.environ["CORANTO_ENDPOINT"]
    loaded(endpoint, store, "orders", "id BIGINT, version BIGINT", "mode: upsert", "key: [id]")
    assert rows(tmp_path / "shop.db", "SELECT id, version FROM orders ORDER BY id") == [(n, 3) for n in range(30)]


def test_deleted_rows_are_removed_from_a_table(running: Running, tmp_path: Path) -> None:
    pipe = pipeline(tmp_path / "work")
    hints: Any = {"gone": {"hard_delete": True, "data_type": "bool"}}
    for data in ([{"id": 1, "gone": False}, {"id": 2, "gone": False}], [{"id": 1, "gone": True}]):
        pipe.run(data, table_name="orders", write_disposition="merge", primary_key="id", columns=hints)
    store, endpoint = f"sqlite:///{tmp_path}/shop.db", os.environ["CORANTO_ENDPOINT"]
    mode = ("mode: changes", "key: [id]", "operation: {column: gone}")
    loaded(endpoint, store, "orders", "id BIGINT, gone BOOLEAN", *mode)
    assert rows(tmp_path / "shop.db", "SELECT id FROM orders") == [(2,)]


def test_values_of_each_type_arrive_in_postgresql(running: Running, client: SyncJournalClient, tmp_path: Path) -> None:
    at, local = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, dt.UTC), dt.datetime(2026, 1, 2, 3, 4, 5)
    full = {
        "id": 2**62,
        "name": "é\n",
        "price": Decimal("12345678901234567890.123456789"),
        "at": at,
        "local": local,
        "day": dt.date(2026, 1, 2),
        "hour": dt.time(12, 30),
        "raw": b"\x00\xff",
        "tags": {"a": [1, None]},
        "large": Wei("1e30"),
        "ratio": 0.1,
        "ok": True,
    }
    hints: Any = {"tags": {"data_type": "json"}, "local": {"data_type": "timestamp", "timezone": False}}
    pipeline(tmp_path / "work").run([full, {"id": 1, **dict.fromkeys(list(full)[1:])}], table_name="all", columns=hints)
    columns = (
        "id BIGINT, name STRING, price DECIMAL(38, 9), at TIMESTAMP, local TIMESTAMP_NTZ, day STRING, hour STRING, "
        "raw STRING, tags STRING, large STRING, ratio DOUBLE, ok BOOLEAN"
    )
    own = "_dlt_load_id STRING NOT NULL, _dlt_id STRING NOT NULL"
    assert set(parse_fields(fields(client, "all"))) == set(
        parse_fields(f"{columns.replace('day STRING', 'day DATE')}, {own}")
    )
    with PostgresServer() as server:
        url = server.new_database()
        loaded(os.environ["CORANTO_ENDPOINT"], url, "all", columns, "mode: upsert", "key: [id]")
        with psycopg.connect(url.replace("+psycopg", "").partition("?")[0]) as database:
            names = [each.split()[0] for each in columns.replace("38, 9", "38").split(", ")]
            found = database.execute(f'SELECT {", ".join(names)} FROM "all" ORDER BY id').fetchall()  # type: ignore[call-overload]
    assert found[0] == (1, *[None] * (len(names) - 1))
    expected = {
        **full,
        "day": "2026-01-02",
        "hour": "12:30:00",
        "raw": "AP8=",
        "tags": '{"a":[1,null]}',
        "large": str(Wei("1e30")),
    }
    assert dict(zip(names, found[1], strict=True)) == {name: expected[name] for name in names}


def test_arrow_tables_are_loaded(running: Running, client: SyncJournalClient, tmp_path: Path) -> None:
    pipe = pipeline(tmp_path / "work")
    pipe.run(pa.table({"id": [1, 2], "name": ["a", None]}), table_name="orders")
    [load] = messages(client, "_dlt_loads")
    found = messages(client, "orders")
    assert [(row["id"], row.get("name"), row["_dlt_load_id"]) for row in found] == [
        (1, "a", load["load_id"]),
        (2, None, load["load_id"]),
    ]


# -- Schemas ----------------------------------------------------------------------------------------------------------


def test_a_new_column_registers_a_new_version(running: Running, client: SyncJournalClient, tmp_path: Path) -> None:
    pipe = pipeline(tmp_path / "work")
    pipe.run([{"id": 1}], table_name="orders")
    assert fields(client, "orders") == "id BIGINT, _dlt_load_id STRING NOT NULL, _dlt_id STRING NOT NULL"
    pipe.run([{"id": "2b", "note": "n"}], table_name="orders")  # An id that is not a number gets its own column.
    assert fields(client, "orders") == (
        "id BIGINT, _dlt_load_id STRING NOT NULL, _dlt_id STRING NOT NULL, id__v_text STRING, note STRING"
    )
    with SyncTypeRegistry(client, "types/registry") as registry:
        assert registry.find(f"{DATASET}.orders").number == 2
    assert [(row.get("id"), row.get("id__v_text")) for row in messages(client, "orders")] == [(1, None), (None, "2b")]


def test_a_change_that_no_version_can_hold_is_refused(
    running: Running, client: SyncJournalClient, tmp_path: Path
) -> None:
    pipeline(tmp_path / "one").run([{"id": 1}], table_name="orders")
    other = pipeline(tmp_path / "two", "other")
    text = failure(other, [{"id": "a"}], table_name="orders")
    assert "table orders does not fit the type shop_data.orders" in text
    assert "id is BIGINT, and STRING, and no type holds both. Give the column another name" in text
    assert [row["id"] for row in messages(client, "orders")] == [1]


def test_the_compatibility_of_the_type_is_enforced(running: Running, client: SyncJournalClient, tmp_path: Path) -> None:
    pipeline(tmp_path / "one").run([{"id": 1}], table_name="orders")
    with SyncTypeRegistry(client, "types/registry") as registry:
        known = registry.find(f"{DATASET}.orders").definition
        more = replace(known, fields=(*known.fields, *parse_fields("added STRING")))
        registry.register(more, compatibility=Compatibility.FORWARD)
    other = pipeline(tmp_path / "two", "other")
    text = failure(other, pa.table({"added": ["a"]}), table_name="orders")
    assert "table orders does not fit the type shop_data.orders" in text
    assert "_dlt_id" in text


def test_a_column_without_a_field_is_refused(running: Running, client: SyncJournalClient, tmp_path: Path) -> None:
    text = failure(pipeline(tmp_path / "work"), [{"id": 1, "_meta": "m"}], table_name="orders")
    assert "table orders cannot be loaded: column _meta is the place of the messages' UUIDs: rename it" in text
    assert not messages(client, "orders")


def test_an_invalid_table_name_is_refused(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEMA__NAMING", "direct")
    text = failure(pipeline(tmp_path / "work"), [{"id": 1}], table_name="my (orders)")
    assert "table my (orders) cannot be loaded: " in text
    assert "has the character ' '; use letters, numbers" in text


def test_a_merge_needs_a_key(running: Running, tmp_path: Path) -> None:
    text = failure(pipeline(tmp_path / "work"), [{"id": 1}], table_name="orders", write_disposition="merge")
    assert "No primary key defined for table `orders`" in text


def test_a_strategy_that_deletes_is_refused(running: Running, tmp_path: Path) -> None:
    disposition: Any = {"disposition": "merge", "strategy": "scd2"}
    text = failure(pipeline(tmp_path / "work"), [{"id": 1}], table_name="orders", write_disposition=disposition)
    assert "`scd2` merge strategy not supported for table `orders`. Available strategies: ['upsert']" in text


def test_a_refresh_is_refused(running: Running, client: SyncJournalClient, tmp_path: Path) -> None:
    """It would reset the state, and load rows again in addition to the existing ones."""
    pipe = pipeline(tmp_path / "work")

    @dlt.source(name="shop")
    def shop() -> Any:
        return dlt.resource([{"id": 1}], name="orders")

    pipe.run(shop())
    for refresh, outcome in (("drop_sources", "dropped"), ("drop_data", "emptied")):
        fresh = pipeline(tmp_path / refresh)
        fresh.sync_destination()
        assert f"orders cannot be {outcome}: journals keep their messages" in failure(fresh, shop(), refresh=refresh)
    assert len(messages(client, "orders")) == 1


# -- Retries and state ------------------------------------------------------------------------------------------------


def test_copies_of_a_package_are_published_once(
    running: Running, client: SyncJournalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes load the same package, for example after a worker's folder was copied or restored."""
    monkeypatch.setenv("NORMALIZE__DATA_WRITER__FILE_MAX_ITEMS", "10")
    pipe = pipeline(tmp_path / "first")
    pipe.extract([{"id": n, "lines": [{"n": n}]} for n in range(100)], table_name="orders")
    pipe.normalize()
    folders = [tmp_path / f"copy-{number}" for number in range(3)]
    for folder in folders:
        shutil.copytree(tmp_path / "first", folder)
    infos = list[LoadInfo]()

    def load(folder: Path) -> None:
        infos.append(pipeline(folder).load())

    threads = [threading.Thread(target=load, args=[folder]) for folder in folders[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load(folders[2])
    assert len(infos) == 3
    assert len({tuple(info.loads_ids) for info in infos}) == 1
    assert sorted(row["id"] for row in messages(client, "orders")) == list(range(100))
    assert sorted(row["n"] for row in messages(client, "orders__lines")) == list(range(100))
    assert len(messages(client, "_dlt_loads")) == 1
    assert len(messages(client, "_dlt_version")) == 1


def test_the_state_is_restored_to_an_empty_folder(running: Running, client: SyncJournalClient, tmp_path: Path) -> None:
    with serving() as shop:
        shop.rows["orders"] = [{"id": n, "version": n} for n in range(1, 30)]
        first = pipeline(tmp_path / "here")
        first.run(source(shop.url, "orders"))
        shop.rows["orders"] += [{"id": n, "version": n} for n in range(30, 40)]
        there = pipeline(tmp_path / "there")
        there.run(source(shop.url, "orders"))  # Only the new ones.
        assert there.default_schema.version_hash == first.default_schema.version_hash
    assert sorted(row["id"] for row in messages(client, "orders")) == list(range(1, 40))
    assert pipeline(tmp_path / "other", "other").run([{"id": 1}], table_name="others")


def test_the_state_of_an_incomplete_load_is_ignored(
    running: Running, client: SyncJournalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coranto.destinations.client import CorantoClient

    def broken(self: Any, load_id: str) -> None:
        raise ConnectionError("the process ends here")

    with serving() as shop:
        shop.rows["orders"] = [{"id": n, "version": n} for n in range(1, 10)]
        pipeline(tmp_path / "here").run(source(shop.url, "orders"))
        shop.rows["orders"] += [{"id": 10, "version": 10}]
        monkeypatch.setattr(CorantoClient, "complete_load", broken)
        here = pipeline(tmp_path / "here")
        failure(here, source(shop.url, "orders"))
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CORANTO_ENDPOINT", client.config.endpoint)
        there = pipeline(tmp_path / "there")
        there.sync_destination()
        state: Any = there.state
        assert state["sources"]["shop"]["resources"]["orders"]["incremental"]["version"]["last_value"] == 9
        here.load()
    assert sorted(row["id"] for row in messages(client, "orders")) == list(range(1, 11))
    assert len(messages(client, "_dlt_loads")) == 2


def test_a_pipeline_can_switch_from_another_destination(
    running: Running, client: SyncJournalClient, tmp_path: Path
) -> None:
    """The pipeline's folder has a cursor of loads into another destination."""
    with serving() as shop:
        shop.rows["orders"] = [{"id": n, "version": n} for n in range(1, 30)]
        elsewhere = dlt.destinations.filesystem(f"file://{tmp_path}/elsewhere")
        pipeline(tmp_path / "work", destination=elsewhere).run(source(shop.url, "orders"))
        shop.rows["orders"] += [{"id": 30, "version": 30}]
        pipeline(tmp_path / "work").run(source(shop.url, "orders"))
    assert sorted(row["id"] for row in messages(client, "orders")) == list(range(1, 31))


def test_a_damaged_ledger_stops_loads_until_the_loss_is_accepted(
    running: Running, client: SyncJournalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline(tmp_path / "work")
    pipe.run([{"id": 1}], table_name="orders")
    lost = label_set({HELD: "true"})
    client.append(f"{DATASET}/_dlt_published/orders", Acknowledgement("").to_line(), subtract_registers=lost)
    assert "Run `coranto audit` on it and recover the lost records" in failure(pipe, [{"id": 2}], table_name="orders")
    monkeypatch.setenv("DESTINATION__CORANTO__ACCEPT_LOSS", "true")
    pipeline(tmp_path / "work").load()
    assert [row["id"] for row in messages(client, "orders")] == [1, 2]


def test_a_row_that_does_not_fit_is_not_published(
    running: Running, client: SyncJournalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken file, as after a disk failure, fails its job. The package stays, and no row of the file is readable."""
    pipe = pipeline(tmp_path / "work")
    pipe.extract([{"id": 1}, {"id": 2}], table_name="orders")
    pipe.normalize()
    [file] = (tmp_path / "work").glob("shop/load/normalized/*/new_jobs/orders.*")
    good = file.read_bytes()
    file.write_bytes(gzip.compress(gzip.decompress(good).replace(b'"id":2', b'"id":"x"')))
    with pytest.raises(PipelineStepFailed) as caught:
        pipe.load()
    assert "cannot be published: does not fit shop_data.orders@1: id is 'x' (str), and no BIGINT" in str(caught.value)
    assert not messages(client, "orders")
    [file] = (tmp_path / "work").glob("shop/load/normalized/*/*/orders.*.gz")
    file.write_bytes(good)
    pipeline(tmp_path / "work").load()
    assert [row["id"] for row in messages(client, "orders")] == [1, 2]


def test_a_pipeline_without_a_dataset_starts(running: Running, tmp_path: Path) -> None:
    pipe = pipeline(tmp_path / "work")
    pipe.sync_destination()
    assert pipe.first_run
