"""Tables on Spark: the same rows as on a shard for random messages; expressions; a change of the runner."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from coranto.errors import CorruptMessage, InvalidInput
from coranto.streams import Split
from coranto.types.blocking import SyncTypeRegistry
from coranto.types.definitions import JsonForm, MessageType
from coranto.types.parsing import parse_fields
from coranto_consumers.tables import read_table
from tests.consumers.tables.shop import (
    Shop,
    message,
    model,
    ordered,
    places,
    places_and_modes,
    rows_in,
    run,
    table_file,
)
from tests.sampling import sampled

pytestmark = [pytest.mark.usefixtures("spark")]
SEEDS = int(os.environ.get("CORANTO_TABLE_SEEDS", "2"))


def write_randomly(shop: Shop, journal: str, chance: random.Random) -> list[dict[str, Any]]:
    """Write overlapping transactions of several producers, and return the messages in commit order."""
    committed = []
    open_ = [(shop.producer(), []) for _ in range(3)]
    for _ in range(chance.randrange(4, 12)):
        builder, own = chance.choice(open_)
        made = [message(chance) for _ in range(chance.randrange(1, 9))]
        shop.pend(builder, journal, *made)
        own += made
        if chance.random() < 0.6:
            shop.commit(builder)
            committed += own
            own.clear()
    return committed


@places_and_modes
@pytest.mark.parametrize("seed", sampled(range(SEEDS), SEEDS))
def test_both_runners_write_the_rows_of_the_model(shop: Shop, place: tuple[str, str], mode: str, seed: int) -> None:
    chance = random.Random(f"{mode}-{seed}-{place[0][:6]}")
    journal = f"{shop.name}/items"
    shop.create(journal)
    input = f"{{journal: {journal}}}"
    files = [
        table_file(input, place[0], mode, table=f"{place[1]}_{runner}", runner=runner) for runner in ("shard", "spark")
    ]
    committed: list[dict[str, Any]] = []
    for _ in range(2):
        committed += write_randomly(shop, journal, chance)
        for file in files:
            run(shop, file)
            assert rows_in(read_table(file)) == ordered(model(mode, committed)), f"{mode} {seed}: {file}"


def test_the_runner_of_a_table_can_change_between_runs(shop: Shop, tmp_path: Path) -> None:
    chance = random.Random("runner")
    stream, committed = shop.stream(2), []
    shard = table_file(f"{{stream: {stream}}}", f"sqlite:///{tmp_path}/s.db", "changes", name="items-both")
    for number in range(4):
        made = [message(chance) for _ in range(25)]
        shop.write(stream, *made)
        committed += made
        run(shop, shard + ("runner: spark\n" if number % 2 else ""))
        assert rows_in(read_table(shard)) == ordered(model("changes", committed))
        [busy, *_] = shop.streams.describe(stream).active()
        shop.streams.scale(stream, [Split(busy.number, 2)])


@places("sqlite")
def test_filters_and_expressions(shop: Shop, place: tuple[str, str]) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, {"id": 1, "name": "Ada", "cents": 500}, {"id": 2, "name": "Bob", "cents": 5})
    shop.publish(journal, {"id": 1, "name": "Cy", "cents": 700}, {"id": 1, "name": "small", "cents": 1})
    more = {"filter": "cents >= 100", "runner": "spark", "table": place[1]}
    select = "{key: id, name: upper(name), euros: 'CAST(cents / 100 AS DECIMAL(12, 2))'}"
    file = table_file(f"{{journal: {journal}}}", place[0], "upsert", select=select, **more).replace("[id]", "[key]")
    run(shop, file)
    [row] = rows_in(read_table(file))
    assert (row["key"], row["name"], float(row["euros"])) == (1, "CY", 7.0)
    assert list(row) == ["key", "name", "euros"]
    with pytest.raises(InvalidInput, match=r"Spark refuses an expression: .*nothing"):
        run(shop, file.replace("upper(name)", "upper(nothing)"))


def test_a_key_in_several_journals_and_misfits_are_refused(shop: Shop, tmp_path: Path) -> None:
    shop.create(f"{shop.name}/a", f"{shop.name}/b")
    store = f"sqlite:///{tmp_path}/s.db"
    with pytest.raises(InvalidInput, match="are 2 journals"):
        run(shop, table_file(f"{{prefix: {shop.name}/}}", store, "upsert", runner="spark"))
    file = table_file(f"{{prefix: {shop.name}/, keyed: true}}", store, "upsert", runner="spark")
    shop.publish(f"{shop.name}/a", {"id": 1})
    shop.publish(f"{shop.name}/b", {"id": 2})
    run(shop, file)
    shop.publish(f"{shop.name}/a", {"id": 3})
    shop.publish(f"{shop.name}/b", {"id": 3})
    with pytest.raises(InvalidInput, match=r"one key \(id\) are in several journals, and none .* `keyed: true` is not"):
        run(shop, file)
    assert len(rows_in(read_table(file))) == 2
    shop.publish(f"{shop.name}/a", {"name": "no key"})
    with pytest.raises(CorruptMessage):
        run(shop, file)


def test_types_that_need_spark_and_a_later_version_of_the_type(shop: Shop, tmp_path: Path) -> None:
    registry, journal = f"{shop.name}/registry", f"{shop.name}/items"
    shop.create(registry, journal)

    def register(fields: str) -> None:
        with SyncTypeRegistry(shop.client, registry) as types:
            types.register(MessageType("shop.Item", JsonForm(), parse_fields(fields)))

    register("id BIGINT, day DATE")
    store = f"sqlite:///{tmp_path}/s.db"
    file = table_file(f"{{journal: {journal}}}", store, "upsert", columns="", registry=registry, type="shop.Item")
    with pytest.raises(InvalidInput, match="day is DATE, which needs Spark: add `runner: spark`"):
        run(shop, file)
    shop.publish(journal, {"id": 1, "day": "2026-05-01"})
    run(shop, file + "runner: spark\n")
    register("id BIGINT, day DATE, lines ARRAY<STRUCT<item: STRING, n: INT>>")
    shop.publish(journal, {"id": 2, "lines": [{"item": "a", "n": 1}, {"item": None}]})
    with pytest.raises(InvalidInput, match="has no column 'lines'"):
        run(shop, file + "runner: spark\n")
    run(shop, file + "runner: spark\nevolve: true\n")
    rows = rows_in(read_table(file))
    assert [(row["id"], str(row["day"])) for row in rows] == [(1, "2026-05-01"), (2, "None")]
    assert rows[1]["lines"] == [{"item": "a", "n": 1}, {"item": None, "n": None}]


@places("postgresql", "iceberg")
def test_nested_fields_are_the_same_on_both_runners(shop: Shop, place: tuple[str, str], spark: SparkSession) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, {"id": 1, "lines": [{"item": "ä", "n": 1}], "tags": ["x", None]}, {"id": 2, "lines": []})
    columns = '"id BIGINT, lines ARRAY<STRUCT<item: STRING, n: INT>>, tags ARRAY<STRING>"'
    found = []
    for runner in ("shard", "spark"):
        shared = {"table": f"{place[1]}_nested_{runner}", "columns": columns, "runner": runner}
        file = table_file(f"{{journal: {journal}}}", place[0], "upsert", **shared)
        run(shop, file)
        found.append(rows_in(read_table(file)))
    assert found[0] == found[1]
    tags = [row["tags"] for row in found[0]]  # MariaDB returns JSON as text.
    assert [json.loads(each) if isinstance(each, str) else each for each in tags] == [["x", None], None]
