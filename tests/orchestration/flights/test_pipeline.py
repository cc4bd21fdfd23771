"""The pipeline with a few flights: a real cluster, Spark, and Dagster's own execution."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pytest
import sqlalchemy as sa

from coranto.client import SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.messages import JsonLines
from coranto.offsets import vector_of_json
from coranto_consumers.stores.sql import SqlStore
from coranto_flights.data import ALERT_COLUMNS, expected_alerts, expected_carrier_delays, load_flights
from coranto_flights.lake import prove_lake
from dagster_coranto import JournalResource
from dagster_coranto.flights.definitions import EVENTS, defs
from dagster_coranto.flights.materialize import Job, consumer_name, drop_recorded_data, materialize, store_url
from dagster_coranto.translation.metadata import vector_version

pytestmark = pytest.mark.usefixtures("spark")

FLIGHTS = 3000
KEY = ["carrier", "year", "month"]
FIRST = Job(limit=FLIGHTS, max_transaction_bytes=400_000)


@pytest.fixture(scope="module")
def materialized(cluster_dir: Path) -> Path:
    """The cluster, with all assets materialised once."""
    assert materialize(FIRST, log_level="WARNING")
    return cluster_dir


def latest(key: str) -> dict[str, Any]:
    """Return the metadata of an asset's latest materialisation."""
    with dg.DagsterInstance.get() as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey.from_user_string(key))
    assert event is not None
    assert event.asset_materialization is not None
    return {name: value.value for name, value in event.asset_materialization.metadata.items()}


def delays(data_dir: Path, table: str) -> list[dict[str, object]]:
    with SqlStore(store_url(data_dir)).engine.connect() as connection:
        rows = connection.execute(sa.text(f"SELECT * FROM {table} ORDER BY carrier, year, month")).mappings().all()
    return [dict(row) for row in rows]


def expected_delays(limit: int) -> list[dict[str, object]]:
    rows = expected_carrier_delays(load_flights(limit)).to_dict("records")
    return [{str(name): None if pd.isna(value) else value for name, value in row.items()} for row in rows]


def alerts(prefix: str = "") -> list[tuple[object, ...]]:
    journal = f"{prefix}flights/alerts/part-000"
    with JournalResource().client() as client:
        messages = [envelope.message for envelope in committed_messages(client, journal, JsonLines())]
    return sorted(tuple(message.get(column) for column in ALERT_COLUMNS) for message in messages)


def expected(limit: int) -> list[tuple[object, ...]]:
    return sorted(tuple(row) for row in expected_alerts(load_flights(limit)).astype(object).to_numpy().tolist())


def test_table_and_alerts_agree_with_the_csv(materialized: Path) -> None:
    assert delays(materialized, "carrier_delays") == expected_delays(FLIGHTS)
    assert alerts() == expected(FLIGHTS)
    assert alerts()


def test_metadata_has_offsets_messages_transactions_and_lag(materialized: Path) -> None:
    read = latest("carrier_delays")
    with JournalResource().client() as client:
        heads = {journal.name: client.head(journal.name) for journal in client.list(EVENTS.selector).journals}
    assert vector_of_json(read["dagster-coranto/offsets_read"], "offsets_read") == heads
    assert read["dagster-coranto/messages"] == FLIGHTS
    assert read["dagster-coranto/transactions"] > 1
    assert read["dagster-coranto/lag_bytes"] == 0
    assert read["dagster-coranto/published"] == len(expected(FLIGHTS))
    published = latest("flights/events")
    assert published["dagster-coranto/messages"] == FLIGHTS
    assert published["batches_appended_twice"] >= 1
    assert published["flights_rolled_back"] == 500
    assert latest("journal_specs")["dagster-coranto/created"] == 5


def test_the_data_version_is_the_digest_of_the_offsets(materialized: Path) -> None:
    with dg.DagsterInstance.get() as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey("carrier_delays"))
    assert event is not None
    assert event.asset_materialization is not None
    version = (event.asset_materialization.tags or {})["dagster/data_version"]
    offsets = latest("carrier_delays")["dagster-coranto/offsets_read"]
    assert version == vector_version(vector_of_json(offsets, "offsets_read")).value


def test_checks_of_both_groups_passed(materialized: Path) -> None:
    with dg.DagsterInstance.get() as instance:
        for key in defs.resolve_asset_graph().asset_check_keys:
            (record,) = instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
            assert record.event is not None
            assert record.event.dagster_event is not None
            evaluation = record.event.dagster_event.asset_check_evaluation_data
            assert evaluation.passed, evaluation.metadata


def test_more_flights_add_to_the_journals_without_duplicates(materialized: Path) -> None:
    more = Job(limit=FLIGHTS + 700)
    assert materialize(more, log_level="WARNING")
    assert latest("journal_specs")["dagster-coranto/unchanged"] == 5
    assert latest("flights/events")["dagster-coranto/messages"] == 700
    assert latest("carrier_delays")["dagster-coranto/messages"] == 700
    assert materialize(more, log_level="WARNING")
    assert latest("flights/events")["dagster-coranto/messages"] == 0
    assert latest("carrier_delays")["dagster-coranto/messages"] == 0
    assert delays(materialized, "carrier_delays") == expected_delays(FLIGHTS + 700)
    assert alerts() == expected(FLIGHTS + 700)


def test_a_fenced_consumer_fails_its_run_and_is_not_retried(
    materialized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, before = Job("fenced/", "carrier_delays_fenced", 500), delays(materialized, "carrier_delays")
    assert materialize(job, ["journal_specs", "flights/events"], log_level="WARNING")
    store = SqlStore(store_url(materialized))
    real = SyncJournalClient.list

    def list_and_fence(self: SyncJournalClient, *args: Any) -> Any:
        # The consumer lists its journals after it has raised its fence. Another instance starts at this point.
        if store.read(consumer_name(job)) is not None:
            store.raise_fence(consumer_name(job))
        return real(self, *args)

    monkeypatch.setattr(SyncJournalClient, "list", list_and_fence)
    assert not materialize(job, ["carrier_delays", "flights/alerts"], log_level="CRITICAL")
    with dg.DagsterInstance.get() as instance:
        (run,) = instance.get_runs(limit=1)
        failures = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    (failure,) = failures
    assert failure.dagster_event is not None
    assert "was raised by a later owner" in str(failure.dagster_event.step_failure_data.error)
    monkeypatch.undo()
    assert materialize(job, ["carrier_delays", "flights/alerts"], log_level="WARNING")
    assert delays(materialized, "carrier_delays_fenced") == expected_delays(500)
    assert alerts("fenced/") == expected(500)
    assert delays(materialized, "carrier_delays") == before, (
        "a job with other journals and another table changed the first one"
    )


@pytest.fixture
def restored(materialized: Path) -> Iterator[Path]:
    """The same cluster. The store and the record of jobs are restored afterwards."""
    record = next(materialized.glob("flights-kept.jsonl"))
    before, saved = record.read_bytes(), sqlite3.connect(":memory:")
    with contextlib.closing(sqlite3.connect(materialized / "store.db")) as store, contextlib.closing(saved):
        store.backup(saved)
        yield materialized
        saved.backup(store)
    record.write_bytes(before)


def test_forget_drops_only_tables_and_checkpoints_of_this_cluster(restored: Path) -> None:
    materialized, store = restored, SqlStore(store_url(restored))
    kept = store.raise_fence("somebody-elses")
    assert store.read(consumer_name(FIRST)) is not None
    drop_recorded_data(materialized)
    assert store.read(consumer_name(FIRST)) is None
    assert not sa.inspect(store.engine).has_table("carrier_delays")
    assert store.read("somebody-elses") == kept


@pytest.mark.exhaustive
def test_with_the_lake_each_flight_is_in_the_iceberg_table_once(materialized: Path) -> None:
    job = replace(Job("lake/", "carrier_delays_lake", 600, 100_000), lake=True)
    assert materialize(job, log_level="WARNING")
    read = latest("flights_lake")
    assert (read["dagster/table_name"], read["dagster/row_count"]) == ("demo.flights_lake", 600)
    assert read["dagster-coranto/transactions"] > 1
    assert [each.name for each in read["dagster/column_schema"].columns][:3] == ["year", "month", "day"]
    assert materialize(job, log_level="WARNING")
    assert latest("flights_lake")["dagster-coranto/messages"] == 0
    claim = prove_lake(materialized, job.table, load_flights(600))
    assert claim.holds, claim.detail
    assert not prove_lake(materialized, job.table, load_flights(601)).holds
    assert not prove_lake(materialized, "carrier_delays_none", load_flights(1)).holds
    assert delays(materialized, "carrier_delays_lake") == expected_delays(600)
