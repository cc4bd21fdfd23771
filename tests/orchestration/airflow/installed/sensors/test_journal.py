"""The sensor with a real broker, as a worker calls it."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferred,
)
from structlog.testing import capture_logs

from airflow_coranto.sensors.journal import JournalSensor
from airflow_coranto.triggers.journal import JournalOffsetTrigger
from coranto.client import SyncJournalClient
from coranto.client.publishing import sync_publisher
from coranto.errors import InvalidInput
from coranto.labels import CONTENT_TYPE, JSON_LINES
from coranto.messages import JsonLines
from coranto.offsets import vector_of_json, vector_to_json
from coranto.testing import SyncCluster
from coranto.wire import protocol_pb2 as pb


def sensor(group: str, **options: Any) -> JournalSensor:
    return JournalSensor(task_id="wait", group=group, **{"poke_interval": 0.02, "timeout": 30, **options})


def heads_of(client: SyncJournalClient, group: str) -> dict[str, int]:
    return {name: client.head(name) for name in client.list(f"name:prefix={group}/").names}


def deferred_by(made: JournalSensor) -> JournalOffsetTrigger:
    with pytest.raises(TaskDeferred) as deferred:
        made.execute({})
    assert deferred.value.method_name == "execute_complete"
    assert deferred.value.timeout is not None
    assert deferred.value.timeout.total_seconds() == made.timeout
    trigger = deferred.value.trigger
    assert isinstance(trigger, JournalOffsetTrigger)
    return trigger


def test_a_deferrable_sensor_defers_to_the_triggerer_with_its_vector(client: SyncJournalClient, group: str) -> None:
    client.append(f"{group}/part-000", b"old")
    wait = sensor(group, deferrable=True, poke_interval=7)
    heads = heads_of(client, group)
    trigger = deferred_by(wait)
    assert (trigger.beyond, trigger.interval) == (heads, 7)
    assert wait.execute_complete({}, {"heads": heads, "bytes": 3}) == {"heads": heads, "bytes": 3}
    with pytest.raises(AirflowFailException, match="refused"):
        wait.execute_complete({}, {"error": "refused"})
    for beyond in (vector_to_json(heads), {name: str(int(at)) for name, at in heads.items()}):  # As in templates.
        assert deferred_by(sensor(group, deferrable=True, beyond=beyond)).beyond == heads


def test_a_deferrable_sensor_does_not_defer_after_growth(client: SyncJournalClient, group: str) -> None:
    client.append(f"{group}/part-001", b"new")
    found = sensor(group, deferrable=True, beyond={}).execute({})
    assert (found["bytes"], vector_of_json(found["heads"], "heads")) == (3, heads_of(client, group))


@pytest.mark.parametrize(("beyond", "problem"), [("{'a': 1}", "native_obj"), ({"a": "x"}, "is not an offset for a")])
@pytest.mark.parametrize("deferrable", [False, True])
def test_an_invalid_vector_fails_without_a_retry(
    client: SyncJournalClient, group: str, beyond: Any, problem: str, deferrable: bool
) -> None:
    with pytest.raises(AirflowFailException, match=problem):
        sensor(group, beyond=beyond, deferrable=deferrable).execute({})


def test_a_poking_sensor_waits_for_growth_beyond_its_start(client: SyncJournalClient, group: str) -> None:
    client.append(f"{group}/part-000", b"old")
    wait = sensor(group)
    assert not wait.poke({})
    writer = threading.Thread(target=client.append, args=(f"{group}/part-001", b"new!"))
    writer.start()
    found = wait.execute({})
    writer.join()
    assert (found["bytes"], vector_of_json(found["heads"], "heads")) == (4, heads_of(client, group))


def test_a_poking_sensor_waits_for_a_commit(broker: SyncCluster, client: SyncJournalClient, group: str) -> None:
    journal = f"{group}/part-json"
    broker.create(journal, labels={CONTENT_TYPE: JSON_LINES})
    wait, any_bytes = sensor(group, beyond={}), sensor(group, beyond={}, committed=False)
    publishing = sync_publisher(client, JsonLines())
    publishing.add(journal, {"order": 1})
    publishing.flush()
    assert not wait.poke({})
    assert any_bytes.poke({})
    publishing.commit()
    assert wait.execute({})["bytes"] == client.head(journal)


def test_rescheduling_a_sensor_needs_a_vector(client: SyncJournalClient, group: str) -> None:
    with pytest.raises(InvalidInput, match="give `beyond`, or use deferrable=True"):
        sensor(group, mode="reschedule")
    assert sensor(group, mode="reschedule", deferrable=True)
    assert not sensor(group, mode="reschedule", beyond={}).poke({})
    with pytest.raises(InvalidInput, match="positive"):
        sensor(group, poke_interval=0)


def test_a_sensor_times_out(client: SyncJournalClient, group: str) -> None:
    with pytest.raises(AirflowSensorTimeout):
        sensor(group, timeout=0).execute({})
    with pytest.raises(AirflowSkipException):
        sensor(group, timeout=0, soft_fail=True).execute({})


def test_a_poking_sensor_waits_for_the_cluster_and_a_deferrable_one_is_retried(
    group: str, client: SyncJournalClient, broker: SyncCluster, monkeypatch: pytest.MonkeyPatch, hurried: None
) -> None:
    client.append(f"{group}/part-000", b"old")
    wait = sensor(group, coranto_conn_id="moving")
    monkeypatch.setenv("AIRFLOW_CONN_MOVING", "coranto://127.0.0.1:1")
    assert not wait.poke({})
    with pytest.raises(AirflowException) as away:  # Without initial heads there is nothing to wait for.
        sensor(group, coranto_conn_id="moving", deferrable=True).execute({})
    assert not isinstance(away.value, AirflowFailException)
    monkeypatch.setenv("AIRFLOW_CONN_MOVING", json.dumps({"conn_type": "coranto", "host": broker.endpoint}))
    assert not wait.poke({}), "content present at the first answer does not count"
    client.append(f"{group}/part-000", b"new")
    found = wait.poke({})
    assert found
    assert found.xcom_value["bytes"] == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_recreated_journal_fails_the_task(client: SyncJournalClient, group: str, deferrable: bool) -> None:
    journal = f"{group}/part-000"
    client.append(journal, b"12345")
    beyond = vector_to_json({journal: client.head(journal)})
    (info,) = client.list(f"name={journal}").journals
    client.apply([pb.ApplyRequest.Change(delete=journal, expect_mod_revision=info.mod_revision)])
    client.apply([pb.ApplyRequest.Change(upsert=info.spec)])
    client.append(journal, b"6")
    with pytest.raises(AirflowFailException, match="was deleted and created again"):
        sensor(group, beyond=beyond, deferrable=deferrable).execute({})


def test_a_group_without_journals_is_logged_once(broker: SyncCluster, client: SyncJournalClient) -> None:
    wait = sensor("not-yet/orders", beyond={})
    with capture_logs() as logs:
        assert not wait.poke({})
        assert not wait.poke({})
    (said,) = [each for each in logs if each["log_level"] == "warning"]
    assert "Waits for a journal" in str(said)
    assert "not-yet/orders" in str(said)
    broker.create("not-yet/orders/part-000")
    client.append("not-yet/orders/part-000", b"x")
    assert wait.poke({})
