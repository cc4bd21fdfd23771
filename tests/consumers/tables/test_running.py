"""Tables on a shard in this process, in real stores: modes, order, new fields, later versions of a type, outages."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from coranto.errors import ConsumerChanged, CorruptMessage, Fenced, InvalidInput, RejectedRow
from coranto.streams import Split
from coranto.testing import SyncCluster
from coranto.types.blocking import SyncTypeRegistry
from coranto.types.definitions import JsonForm, MessageType
from coranto.types.parsing import parse_fields
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.tables import RunOptions, read_table, run_table
from tests.consumers.tables.shop import (
    MODES,
    PLACES,
    Shop,
    message,
    model,
    ordered,
    place_param,
    places_and_modes,
    row_of,
    rows_in,
    run,
    table_file,
)
from tests.servers.sql import PostgresServer


@places_and_modes
def test_the_table_has_the_rows_in_commit_order(shop: Shop, place: tuple[str, str], mode: str) -> None:
    chance = random.Random(f"{mode}-{place[0][:6]}")
    journal = f"{shop.name}/items"
    shop.create(journal)
    file = table_file(f"{{journal: {journal}}}", place[0], mode, table=place[1])
    committed = []
    for _ in range(3):
        slow, quick, lost = shop.producer(), shop.producer(), shop.producer()
        first, second = ([message(chance) for _ in range(12)] for _ in range(2))
        shop.pend(slow, journal, *first[:6])
        shop.pend(lost, journal, *(message(chance) for _ in range(5)))
        shop.pend(quick, journal, *second)
        shop.commit(quick)
        shop.pend(slow, journal, *first[6:])
        shop.commit(slow)  # Commits later, although its messages are earlier.
        committed += second + first
        report = run(shop, file)
        assert report.messages == 24
        assert rows_in(read_table(file)) == ordered(model(mode, committed))
    assert run(shop, file) == (0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_split_stream_keeps_the_order_of_each_key(shop: Shop, tmp_path: Path, mode: str) -> None:
    chance = random.Random(mode)
    stream = shop.stream(2)
    file = table_file(f"{{stream: {stream}}}", f"sqlite:///{tmp_path}/s.db", mode)
    committed = []
    for number in range(4):
        made = [message(chance) for _ in range(20)]
        shop.write(stream, *made)
        committed += made
        if number != 1:  # One run reads two generations of segments.
            run(shop, file)
            assert rows_in(read_table(file)) == ordered(model(mode, committed))
        busy = max(segment.number for segment in shop.streams.describe(stream).active())
        shop.streams.scale(stream, [Split(busy, 2)])
    run(shop, file)
    assert rows_in(read_table(file)) == ordered(model(mode, committed))


@pytest.mark.parametrize("splits", [False, True])
def test_a_service_follows_a_split_and_is_fenced_by_a_later_process(shop: Shop, tmp_path: Path, splits: bool) -> None:
    stream = shop.stream()
    file = table_file(f"{{stream: {stream}}}", f"sqlite:///{tmp_path}/s.db", "upsert")
    spec, ended = read_table(file), threading.Event()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            run_table(shop.config, spec, RunOptions(stop=ended.is_set))
        except BaseException as error:  # noqa: BLE001 - the test inspects it
            failures.append(error)

    def await_rows(count: int) -> None:
        tick = threading.Event()
        while service.is_alive():
            try:
                if len(rows_in(spec)) == count:
                    return
            except Exception:  # noqa: BLE001 - there is no table yet
                tick.wait(0.05)
            tick.wait(0.05)
        raise AssertionError(f"the service has ended: {failures}")

    service = threading.Thread(target=serve)
    service.start()
    try:
        shop.write(stream, {"id": 1}, {"id": 2})
        await_rows(2)
        [segment] = shop.streams.describe(stream).active()
        shop.streams.scale(stream, [Split(segment.number, 2)])
        shop.write(stream, *({"id": number} for number in range(3, 9)))
        await_rows(8)
        assert run(shop, file).messages == 0  # This run raises the fence.
        if splits:  # The service restarts with the new segments, and must not fence off the later process.
            shop.streams.scale(stream, [Split(shop.streams.describe(stream).active()[0].number, 2)])
        else:
            shop.write(stream, {"id": 9})
        service.join(60)
        assert [type(error) for error in failures] == [Fenced]
    finally:
        ended.set()
        service.join(60)
    run(shop, file)
    assert len(rows_in(spec)) == (8 if splits else 9)


def test_several_journals_are_refused_unless_keyed(shop: Shop, tmp_path: Path) -> None:
    shop.create(f"{shop.name}/a", f"{shop.name}/b")
    shop.publish(f"{shop.name}/a", {"id": 1, "name": "a"})
    shop.publish(f"{shop.name}/b", {"id": 2, "name": "b"})
    store = f"sqlite:///{tmp_path}/s.db"
    with pytest.raises(InvalidInput, match=r"are 2 journals .*none is the last: read a stream.*`keyed: true`"):
        run(shop, table_file(f"{{prefix: {shop.name}/}}", store, "upsert"))
    file = table_file(f"{{prefix: {shop.name}/, keyed: true}}", store, "upsert")
    assert run(shop, file).messages == 2
    assert run(shop, table_file(f"{{prefix: {shop.name}/}}", store, table="all_items")).messages == 2  # append
    last = 2

    def publish_to_both() -> None:
        """Publish keys to both journals, until one batch has both messages of a key."""
        nonlocal last
        while last < 100:
            last += 1
            both = shop.producer()
            shop.pend(both, f"{shop.name}/a", {"id": last})
            shop.pend(both, f"{shop.name}/b", {"id": last})
            shop.commit(both)
            run(shop, file)

    with pytest.raises(InvalidInput, match=rf"one key \(id\) are in {shop.name}/a and {shop.name}/b, and none"):
        publish_to_both()
    assert {row["id"] for row in rows_in(read_table(file))} == set(range(1, last))


def test_a_new_field_is_refused_with_advice_or_added(shop: Shop, place: tuple[str, str]) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, {"id": 1, "n": 5, "d": 1.5})
    shared = {"name": "items-evolving", "table": place[1]}

    def file(columns: str, **more: str) -> str:
        return table_file(f"{{journal: {journal}}}", place[0], "upsert", **shared, columns=columns, **more)

    run(shop, file("id BIGINT, n INT, d FLOAT"))
    shop.publish(journal, {"id": 2, "n": 2**40, "d": 2.5, "note": "new"})
    wider = file("id BIGINT, n BIGINT, d DOUBLE, note STRING")
    advice = r"has no column 'note' .*: add `evolve: true`, or change the table yourself"
    with pytest.raises(InvalidInput, match=advice):
        run(shop, wider)
    run(shop, wider + "evolve: true\n")
    assert [(row["id"], row["n"], row["note"]) for row in rows_in(read_table(wider))] == [
        (1, 5, None),
        (2, 2**40, "new"),
    ]
    run(shop, file("id BIGINT, n INT"))  # Narrower fields fit.
    if not place[0].startswith("sqlite"):
        with pytest.raises(InvalidInput, match="use a new table"):
            run(shop, file("id BIGINT, n STRING", evolve="true"))


def registered(shop: Shop, registry: str, fields: str) -> None:
    with SyncTypeRegistry(shop.client, registry) as types:
        types.register(MessageType("shop.Item", JsonForm(), parse_fields(fields)))


@pytest.mark.parametrize("evolves", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_later_version_of_the_type_is_refused_or_adds_its_field(
    shop: Shop, tmp_path: Path, evolves: bool, named: bool
) -> None:
    registry, journal = f"{shop.name}/registry", f"{shop.name}/items"
    shop.create(registry)
    shop.create(journal, message_type="" if named else "shop.Item")
    registered(shop, registry, "id BIGINT, name STRING")
    file = table_file(
        f"{{journal: {journal}}}",
        f"sqlite:///{tmp_path}/s.db",
        "upsert",
        columns="",
        registry=registry,
        type="shop.Item" if named else "",
    )
    file += f"evolve: {str(evolves).lower()}\n"
    spec = read_table(file)
    shop.publish(journal, {"id": 1, "name": "a"})
    run(shop, file)
    begun, done = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            run_table(shop.config, spec, RunOptions(stop=lambda: bool(begun.set()) or done.is_set()))  # type: ignore[func-returns-value]
        except BaseException as error:  # noqa: BLE001 - the test inspects it
            failures.append(error)

    service = threading.Thread(target=serve)
    service.start()
    try:
        assert begun.wait(60)
        registered(shop, registry, "id BIGINT, name STRING, note STRING")
        shop.publish(journal, {"id": 2, "name": "b", "note": "kept"})
        while service.is_alive() and len(rows_in(spec)) < 2:
            done.wait(0.05)
    finally:
        done.set()
        service.join(60)
    if evolves:
        assert not failures
        assert [row["note"] for row in rows_in(spec)] == [None, "kept"]
    else:
        [error] = failures
        assert "has no column 'note'" in str(error)
        assert "as the type shop.Item@2 has it: add `evolve: true`" in str(error)
        assert len(rows_in(spec)) == 1


def test_messages_that_do_not_fit_the_columns_follow_the_misfits_policy(shop: Shop, tmp_path: Path) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, {"id": 1}, {"id": 2, "cents": "many"})
    file = table_file(f"{{journal: {journal}}}", f"sqlite:///{tmp_path}/s.db", "upsert")
    with pytest.raises(CorruptMessage, match=f"{journal}.*does not fit"):
        run(shop, file)
    assert rows_in(read_table(file)) == []
    run(shop, file + "misfits: nulls\n")
    assert [(row["id"], row["cents"]) for row in rows_in(read_table(file))] == [(1, None), (2, None)]
    shop.publish(journal, {"name": "no key"})
    with pytest.raises(CorruptMessage):
        run(shop, file + "misfits: nulls\n")


@pytest.mark.integration
def test_a_row_that_the_store_rejects_is_named(shop: Shop, new_store: Callable[[str], str]) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, *({"id": number, "name": f"n{number}"} for number in range(20)), {"id": 20, "name": "\0"})
    file = table_file(f"{{journal: {journal}}}", new_store("postgresql"), "upsert")
    with pytest.raises(RejectedRow, match=rf"{journal}.*NUL"):
        run(shop, file)
    assert len(rows_in(read_table(file))) == 20
    run(shop, file + "misfits: nulls\n")
    assert len(rows_in(read_table(file))) == 21


def test_another_input_needs_confirmation(shop: Shop, tmp_path: Path) -> None:
    one, other = f"{shop.name}/one", f"{shop.name}/other"
    shop.create(one, other)
    shop.publish(one, {"id": 1})
    shop.publish(other, {"id": 2})
    store = f"sqlite:///{tmp_path}/s.db"
    run(shop, table_file(f"{{journal: {one}}}", store, name="items-moved"))
    changed = table_file(f"{{journal: {other}}}", store, name="items-moved")
    with pytest.raises(ConsumerChanged, match=r"accept_changes='([0-9a-f]+)'") as refused:
        run(shop, changed)
    code = str(refused.value).partition("accept_changes='")[2].partition("'")[0]
    assert run(shop, changed, accept_changes=code).messages == 1


WITH_UNIQUE_KEYS = [place_param(kind, sampled=True) for kind in PLACES if kind != "iceberg"]


@pytest.mark.parametrize("place", WITH_UNIQUE_KEYS, indirect=True)
def test_a_table_without_the_key_is_refused(shop: Shop, place: tuple[str, str]) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    with SqlStore(place[0]).engine.begin() as connection:
        connection.execute(text("CREATE TABLE items (id BIGINT, name VARCHAR(20))"))
    file = table_file(f"{{journal: {journal}}}", place[0], "upsert", columns="id BIGINT, name STRING", evolve="true")
    with pytest.raises(InvalidInput, match=r"has no primary key or unique constraint on exactly \(id\)"):
        run(shop, file)


def test_truncated_segments_are_not_a_changed_input(shop: Shop, tmp_path: Path) -> None:
    stream = shop.stream()
    file = table_file(f"{{stream: {stream}}}", f"sqlite:///{tmp_path}/s.db", "upsert")
    shop.write(stream, {"id": 1}, {"id": 2})
    run(shop, file)
    [segment] = shop.streams.describe(stream).active()
    scaled = shop.streams.scale(stream, [Split(segment.number, 2)])
    run(shop, file)
    shop.streams.truncate(stream, {each.number: 0 for each in scaled.active()})
    shop.write(stream, {"id": 3}, {"id": 4})
    assert run(shop, file).messages == 2
    assert [row["id"] for row in rows_in(read_table(file))] == [1, 2, 3, 4]


def test_the_model_makes_rows_of_messages() -> None:
    assert row_of({"id": 1, "price": 3})["price"] == 3


@pytest.mark.integration
def test_a_service_waits_for_its_store(tmp_path: Path) -> None:
    with PostgresServer() as server, SyncCluster(brokers=1) as cluster:
        shop = Shop(cluster)
        stream = shop.stream()
        file = table_file(f"{{stream: {stream}}}", server.new_database(), "upsert")
        spec, ended, tick = read_table(file), threading.Event(), threading.Event()
        failures: list[BaseException] = []

        def serve() -> None:
            try:
                run_table(shop.config, spec, RunOptions(stop=ended.is_set))
            except BaseException as error:  # noqa: BLE001 - the test inspects it
                failures.append(error)

        def await_rows(count: int) -> None:
            while service.is_alive():
                with contextlib.suppress(Exception):  # There is no table yet, or no server.
                    if len(rows_in(spec)) == count:
                        return
                tick.wait(0.05)
            raise AssertionError(f"the service has ended: {failures}")

        service = threading.Thread(target=serve)
        service.start()
        try:
            shop.write(stream, {"id": 1})
            await_rows(1)
            server.stop()
            shop.write(stream, {"id": 2})
            server.restart()
            await_rows(2)
            server.restart(crash=True)
            shop.write(stream, {"id": 3})
            await_rows(3)
        finally:
            ended.set()
            service.join(120)
        assert not failures
