"""The operator of ingests: with a real broker, as a worker calls it, and as a task of a real Airflow."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_coranto.operators.ingest import IngestOperator
from coranto.client import ClientConfig, JournalClient, SyncJournalClient
from coranto.client.loop import run_blocking
from coranto.streams.reader.stream_reader import StreamReader
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from tests.orchestration.airflow.installed.airflow_api import kill_task, until
from tests.orchestration.airflow.installed.world import INGESTED, INGESTED_ROWS, AirflowWorld


def numbers(config: ClientConfig, stream: str) -> list[int]:
    """Return the numbers in the events of a stream, sorted."""

    async def read() -> list[int]:
        async with JournalClient.of(config) as client, StreamReader[Any](client, stream) as reader:
            return sorted([event.data["n"] async for event in reader])

    return run_blocking(read())


class Place:
    """A folder of JSON files, the file of an ingest of them, and its stream."""

    def __init__(self, folder: Path, client: SyncJournalClient) -> None:
        self.folder = folder
        self.config = client.config
        self.stream = f"shop/orders-{os.urandom(4).hex()}"

    def put(self, name: str, *rows: object) -> None:
        (self.folder / f"{name}.part").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (self.folder / f"{name}.part").rename(self.folder / f"{name}.jsonl")

    def yaml(self, **more: Any) -> str:
        source = {"files": {"url": f"file://{self.folder}/", "pattern": "*.jsonl", "look": "0.1"}}
        create = {"stores": [STORE_URL]}
        return json.dumps({"name": "orders", "stream": self.stream, "source": source, "create": create, **more})

    def task(self, ingest: str | Path = "", **options: Any) -> IngestOperator:
        return IngestOperator(task_id="task", ingest=ingest or self.yaml(), **options)

    def numbers(self) -> list[int]:
        return numbers(self.config, self.stream)


@pytest.fixture
def place(client: SyncJournalClient, tmp_path: Path) -> Place:
    return Place(tmp_path, client)


def test_repeated_tasks_write_each_row_once(place: Place, tmp_path: Path) -> None:
    place.put("a", {"n": 1}, {"n": 2})
    first = place.task().execute({})
    assert (first["rows"], first["dead_letters"], first["transactions"], first["lost"]) == (2, 0, 1, {})
    assert first["positions"]["a.jsonl"][2] is True
    file = tmp_path / "orders.yaml"
    file.write_text(place.yaml())
    place.put("b", {"n": 3})
    assert place.task(file).execute({})["rows"] == 1
    assert place.numbers() == [1, 2, 3]


def test_the_stream_is_the_outlet_with_an_event_of_its_growth(place: Place) -> None:
    place.put("a", {"n": 1})
    operator = place.task(stream=place.stream, cluster="test")
    (asset,) = operator.outlets
    assert asset.uri == f"journal://test/{place.stream}"
    events = OutletEventAccessors()
    operator.execute({"outlet_events": events})
    payload = events[asset].extra["payload"]
    assert payload["group"] == place.stream
    assert payload["bytes"] > 0
    assert not place.task().outlets


def test_a_stream_that_differs_from_the_file_is_refused(place: Place) -> None:
    with pytest.raises(AirflowFailException, match="the task names shop/else, and the file of the ingest shop/orders-"):
        place.task(stream="shop/else").execute({})


def test_permanent_errors_fail_the_task(place: Place, tmp_path: Path) -> None:
    place.put("a", {"n": 1})
    place.put("b", "poison")
    with pytest.raises(AirflowFailException, match=r"b\.jsonl, offset 0"):
        place.task().execute({})
    assert place.numbers() == [1]
    with pytest.raises(AirflowFailException, match="the field 'stream' is missing"):
        place.task("name: orders").execute({})
    (tmp_path / "a.jsonl").write_text('{"n": 2}\n{"n": 3}\n')
    with pytest.raises(AirflowFailException, match=r"a\.jsonl"):
        place.task().execute({})


def test_a_missing_stream_is_retried(place: Place) -> None:
    place.put("a", {"n": 1})
    text = json.loads(place.yaml())
    del text["create"]
    with pytest.raises(AirflowException, match="there is no stream") as missing:
        place.task(json.dumps(text)).execute({})
    assert not isinstance(missing.value, AirflowFailException)


def test_the_result_has_the_number_of_dead_letters(place: Place) -> None:
    place.put("a", {"n": 1})
    place.put("b", "poison")
    done = place.task(place.yaml(poison="dead letters")).execute({})
    assert (done["rows"], done["dead_letters"]) == (1, 1)


def test_a_terminated_task_is_retried_and_the_retry_reads_the_rest(place: Place) -> None:
    place.put("a", *({"n": n} for n in range(20)))
    operator = place.task()
    operator.on_kill()
    with pytest.raises(AirflowException, match=r"terminated: \d+ rows are committed") as ended:
        operator.execute({})
    assert not isinstance(ended.value, AirflowFailException)
    (first,) = map(int, re.findall(r"(\d+) rows", str(ended.value)))
    assert place.task().execute({})["rows"] == 20 - first
    assert place.numbers() == list(range(20))


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_killed_task_is_retried_and_writes_each_row_once(world: AirflowWorld) -> None:
    api = world.api
    run = api.start("ingest")
    task = api.await_task("ingest", run, "ingest", "running")
    names = f"name:prefix={INGESTED}/"
    until(lambda: world.total(INGESTED) if world.client.list(names).names else 0, pause=0.02)
    kill_task(task)
    assert api.await_task("ingest", run, "ingest", "success")["try_number"] == 2
    assert numbers(world.config, INGESTED) == list(range(INGESTED_ROWS))
    result = api.xcom("ingest", run, "ingest")
    assert result["rows"] <= INGESTED_ROWS
    assert result["positions"]["rows.jsonl"][2] is True
    again = api.start("ingest")
    api.await_task("ingest", again, "ingest", "success")
    assert api.xcom("ingest", again, "ingest")["rows"] == 0
    sources = {
        event["source_task_id"]
        for event in api.call("/assets/events?limit=1000")["asset_events"]
        if (event["extra"].get("payload") or {}).get("group") == INGESTED
    }
    assert sources == {"ingest"}


def test_an_unavailable_broker_is_retried(
    place: Place, broker: SyncCluster, monkeypatch: pytest.MonkeyPatch, hurried: None
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AWAY", "coranto://127.0.0.1:1")
    with pytest.raises(AirflowException) as away:
        place.task(coranto_conn_id="away").execute({})
    assert not isinstance(away.value, AirflowFailException)
