"""The operator of tables: with a real broker and SQLite, as a worker calls it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException

from airflow_coranto.operators.table import TableOperator
from coranto.client import SyncJournalClient
from coranto.streams import SyncStreams, SyncStreamWriter, default_template
from coranto.testing.cluster import STORE_URL
from coranto_consumers.stores.sql import SqlStore
from tests.orchestration.airflow.installed.airflow_api import kill_task, until
from tests.orchestration.airflow.installed.world import INGESTED_ROWS, AirflowWorld


class Place:
    """A stream, and the file of a table of its events."""

    def __init__(self, folder: Path, client: SyncJournalClient) -> None:
        self.client = client
        self.folder = folder
        self.store = f"sqlite:///{folder}/shop.db"
        self.stream = f"shop/orders-{os.urandom(4).hex()}"
        SyncStreams(client).create(self.stream, 2, template=default_template(stores=[STORE_URL]))

    def write(self, *events: dict[str, object]) -> None:
        with SyncStreamWriter(self.client, self.stream) as writer:
            for event in events:
                writer.write_event(str(event["id"]), event)
            writer.flush()

    def yaml(self, more: str = "") -> str:
        given = f"name: orders\ninput: {{stream: {self.stream}}}\nstore: {self.store}\ntable: orders\n"
        return f"{given}columns: id BIGINT, cents BIGINT\nmode: upsert\nkey: id\n{more}"

    def task(self, table: str | Path = "", **options: str) -> TableOperator:
        return TableOperator(task_id="task", table=table or self.yaml(), **options)

    def rows(self) -> list[tuple[int, int]]:
        with SqlStore(self.store).engine.connect() as connection:
            found = connection.exec_driver_sql("SELECT id, cents FROM orders ORDER BY id")
            return [(row[0], row[1]) for row in found]


@pytest.fixture
def place(client: SyncJournalClient, tmp_path: Path) -> Place:
    return Place(tmp_path, client)


def test_repeated_tasks_write_each_message_once(place: Place) -> None:
    place.write({"id": 1, "cents": 5}, {"id": 2, "cents": 6}, {"id": 1, "cents": 7})
    first = place.task().execute({})
    assert (first["messages"], first["rows"], first["bytes_behind"], first["messages_behind"]) == (3, 2, 0, 0)
    assert abs(first["last_commit"] - time.time()) < 600
    assert len(first["offsets"]) == 2
    file = place.folder / "orders.yaml"
    file.write_text(place.yaml())
    place.write({"id": 3, "cents": 8})
    again = place.task(file).execute({})
    assert (again["messages"], again["rows"]) == (1, 3)
    assert place.rows() == [(1, 7), (2, 6), (3, 8)]


def test_the_stream_is_the_inlet(place: Place) -> None:
    operator = place.task(stream=place.stream, cluster="test")
    [asset] = operator.inlets
    assert asset.uri == f"journal://test/{place.stream}"
    assert not place.task().inlets
    assert operator.max_active_tis_per_dag == 1
    with pytest.raises(
        AirflowFailException, match="the task names shop/else, and the file of the table stream shop/or"
    ):
        place.task(stream="shop/else").execute({})


def test_permanent_errors_fail_the_task(place: Place) -> None:
    with pytest.raises(AirflowFailException, match="the field 'input' is missing"):
        place.task("name: orders").execute({})
    place.write({"id": 1, "cents": 5})
    place.task().execute({})
    with pytest.raises(AirflowFailException, match="has no column 'note'"):
        place.task(place.yaml().replace("cents BIGINT", "cents BIGINT, note STRING")).execute({})
    place.write({"id": 2, "cents": "many"})
    with pytest.raises(AirflowFailException, match="does not fit"):
        place.task().execute({})
    assert place.rows() == [(1, 5)]


def test_a_changed_input_needs_its_code(place: Place, client: SyncJournalClient) -> None:
    place.write({"id": 1, "cents": 5})
    place.task().execute({})
    other = Place(place.folder, client)
    other.write({"id": 9, "cents": 1})
    with pytest.raises(AirflowFailException, match="accept_changes=") as changed:
        other.task().execute({})
    code = str(changed.value).partition("accept_changes='")[2].partition("'")[0]
    assert other.task(accept_changes=code).execute({})["rows"] == 2


def test_a_terminated_task_is_retried_and_the_retry_reads_the_rest(place: Place) -> None:
    place.write(*({"id": number, "cents": 1} for number in range(20)))
    operator = place.task()
    operator.on_kill()
    with pytest.raises(AirflowException, match=r"terminated: \d+ messages are committed") as ended:
        operator.execute({})
    assert not isinstance(ended.value, AirflowFailException)
    assert place.task().execute({})["rows"] == 20


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_killed_task_is_retried_and_writes_each_message_once(world: AirflowWorld) -> None:
    api = world.api
    api.await_task("ingest", api.start("ingest"), "ingest", "success")
    run = api.start("table")
    task = api.await_task("table", run, "table", "running")
    store = Path(world.table_url.removeprefix("sqlite:///"))
    until(store.exists, pause=0.02)
    kill_task(task)
    assert api.await_task("table", run, "table", "success")["try_number"] == 2
    with SqlStore(world.table_url).engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT n FROM numbers ORDER BY n").scalars().all()
    assert found == list(range(INGESTED_ROWS))
    result = api.xcom("table", run, "table")
    assert (result["rows"], result["bytes_behind"]) == (INGESTED_ROWS, 0)


def test_an_unavailable_broker_is_retried(place: Place, monkeypatch: pytest.MonkeyPatch, hurried: None) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AWAY", "coranto://127.0.0.1:1")
    monkeypatch.setattr("coranto_consumers.tables.shard_runner.JOB_SECONDS", 0.1)
    with pytest.raises(AirflowException) as away:
        place.task(coranto_conn_id="away").execute({})
    assert not isinstance(away.value, AirflowFailException)
