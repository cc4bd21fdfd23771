"""Operators with a real broker, as a worker calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    TaskDeferred,
)
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.operators.audit import AuditOperator, report_value
from airflow_coranto.operators.publish import PublishOperator
from airflow_coranto.operators.recovery import ApproveRecoveryOperator, PlanRecoveryOperator, RecoverOperator
from airflow_coranto.operators.spark import SparkConsumerOperator
from airflow_coranto.operators.specs import ApplySpecsOperator
from airflow_coranto.triggers.journal import JournalOffsetTrigger
from coranto.audit import Depth, Finding, Kind, Report, Severity, Subject
from coranto.client import SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.errors import InvalidInput
from coranto.messages import JsonLines
from coranto.messages.checkpoints import Checkpoint, Source
from coranto.offsets import vector_of_json
from coranto.testing import SyncCluster
from coranto_consumers.spark import ConsumerOptions, MisfitPolicy
from coranto_consumers.stores.sql import SqlStore
from tests.platform.publication.conftest import CrashingClient, Killed

ROWS = [{"order": number} for number in range(50)]
ONCE = Counter(dict.fromkeys(range(50), 1))


@dataclass
class Instance:
    """The attributes of a task instance that operators use."""

    dag_id: str = "shop"
    run_id: str = "manual__2026-01-01T00:00:00+00:00"
    task_id: str = "task"
    map_index: int = -1
    id: str = "0190"
    pushed: dict[str, Any] = field(default_factory=dict)

    def xcom_push(self, key: str, value: Any) -> None:
        self.pushed[key] = value


def context(**differences: Any) -> dict[str, Any]:
    return {"ti": (ti := Instance(**differences)), "task_instance": ti, "params": {"limit": 50}}


def seen(client: SyncJournalClient, group: str) -> Counter[int]:
    journals = client.list(f"name:prefix={group}/").names
    return Counter(
        envelope.message["order"] for name in journals for envelope in committed_messages(client, name, JsonLines())
    )


def publishing(group: str, rows: Any = ROWS, **options: Any) -> PublishOperator:
    return PublishOperator(task_id="task", group=group, rows=rows, key="order", **options)


def test_a_repeated_task_publishes_nothing_more(client: SyncJournalClient, group: str) -> None:
    first = publishing(group).execute(context())
    again = publishing(group).execute(context())
    assert (first["messages"], first["is_new"], again["is_new"]) == (50, True, False)
    assert first["writer_id"] == "airflow/shop/manual__2026-01-01T00:00:00+00:00/task//"
    assert again["heads"] == first["heads"]
    assert vector_of_json(first["heads"], "heads") == {name: client.head(name) for name in first["heads"]}
    assert seen(client, group) == ONCE


@pytest.mark.parametrize("other", [{"run_id": "r2"}, {"map_index": 3}, {"dag_id": "d2"}, {"task_id": "t2"}])
def test_other_task_instances_publish_their_own_rows(
    client: SyncJournalClient, group: str, other: dict[str, Any]
) -> None:
    publishing(group).execute(context())
    assert publishing(group).execute(context(**other))["is_new"]
    assert set(seen(client, group).values()) == {2}


@pytest.mark.parametrize("applied", [False, True])
def test_a_task_may_die_at_any_append_and_be_retried(
    client: SyncJournalClient, group: str, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    publishing(group, [], edition="first").execute(context())  # Creates the ledger.
    for at in count(1):
        crashing = CrashingClient.of(client.config)
        assert isinstance(crashing, CrashingClient)
        crashing.at, crashing.applied = at, applied
        with monkeypatch.context() as patch:
            patch.setattr(CorantoHook, "get_conn", lambda _, crashing=crashing: crashing)
            try:
                publishing(group, edition=str(at)).execute(context())
                break
            except Killed:
                assert set(seen(client, group).values()) <= {at - 1, at}
        publishing(group, edition=str(at)).execute(context())
        assert set(seen(client, group).values()) == {at}
    assert at > 4  # Two journals, the decision and two acknowledgements.


def test_another_edition_publishes_again(client: SyncJournalClient, group: str) -> None:
    publishing(group).execute(context())
    assert publishing(group, edition="2").execute(context())["is_new"]
    assert publishing(group, namespace="staging").execute(context())["is_new"]
    assert set(seen(client, group).values()) == {3}


def test_rows_can_come_from_a_function_of_the_context(client: SyncJournalClient, group: str) -> None:
    def rows(params: Mapping[str, Any], offset: int) -> Iterator[dict[str, Any]]:
        for number in range(params["limit"]):
            yield {"order": number + offset}

    publishing(group, rows, op_kwargs={"offset": 0}).execute(context())
    assert seen(client, group) == ONCE


def test_rows_of_a_failed_function_are_not_visible(client: SyncJournalClient, group: str) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from ROWS[:20]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publishing(group, rows).execute(context())
    assert not seen(client, group)
    publishing(group).execute(context())
    assert seen(client, group) == ONCE


def test_only_temporary_errors_are_retried(client: SyncJournalClient, group: str) -> None:
    with pytest.raises(AirflowFailException, match="no column 'order'"):
        publishing(group, [{"item": 1}]).execute(context())
    with pytest.raises(AirflowException, match="no journal") as missing:
        publishing("shop/nowhere").execute(context())
    assert not isinstance(missing.value, AirflowFailException)


def test_the_error_of_an_unreachable_cluster_omits_the_token(monkeypatch: pytest.MonkeyPatch, hurried: None) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AWAY", "coranto://:header.secretpayload.signature@127.0.0.1:1")
    with pytest.raises(AirflowException) as away:
        AuditOperator(task_id="audit", group="shop/orders", coranto_conn_id="away").execute(context())
    assert "secretpayload" not in f"{away.value!r}{away.value.__cause__!r}"


def tree(group: str, *parts: str) -> str:
    journals = "".join(f"  - name: {group}/{part}\n" for part in parts)
    fragment = '{length: 1048576, compression_codec: ZSTANDARD, stores: ["file:///"], refresh_interval: 10s}'
    return f"name: {group}/\nreplication: 1\nfragment: {fragment}\nflags: [O_RDWR]\nchildren:\n{journals}"


def test_specs_are_planned_applied_and_pruned(client: SyncJournalClient, broker: SyncCluster) -> None:
    name = "applied/orders"
    both, one = tree(name, "part-000", "part-001"), tree(name, "part-000")

    def apply(specs: str | Path, **options: Any) -> dict[str, Any]:
        return ApplySpecsOperator(task_id="apply", specs=specs, **options).execute(context())

    def names() -> tuple[str, ...]:
        return tuple(client.list(f"name:prefix={name}/").names)

    assert [step["action"] for step in apply(both, plan_only=True)["steps"]] == ["create", "create"]
    assert not names()
    assert apply(both)["changed"] == 2
    assert apply(both) | {"digest": ""} == {"digest": "", "changed": 0, "steps": []}
    assert apply(one)["changed"] == 0
    data = context()
    with pytest.raises(AirflowFailException, match="part-001"):
        ApplySpecsOperator(task_id="check", specs=one, prune=[name], plan_only=True, fail_on_drift=True).execute(data)
    assert data["ti"].pushed["return_value"]["steps"][0]["action"] == "delete"
    assert len(names()) == 2
    publishing(name).execute(context())
    assert apply(one, prune=["applied"])["changed"] == 1
    assert names() == (f"{name}/part-000",)
    assert not publishing(name).execute(context())["is_new"]  # The ledger, applied/orders-publications, is kept.
    with pytest.raises(AirflowFailException):
        apply("name: [broken")


def test_an_audit_pushes_its_report_and_fails_on_a_finding(client: SyncJournalClient, group: str) -> None:
    data = context()
    with pytest.raises(AirflowFailException, match="NOT sound"):
        AuditOperator(task_id="audit", group="shop/nothing").execute(data)
    assert data["ti"].pushed["report"]["findings"]
    assert not data["ti"].pushed["return_value"]["sound"]
    with pytest.raises(AirflowFailException, match="depth"):
        AuditOperator(task_id="audit", group=group, depth="bottomless").execute(context())


def test_the_size_of_a_report_is_limited() -> None:
    found = [
        Finding(Kind.CONTENT_LOST, Severity.ERROR, Subject.journal(f"shop/{number}"), "lost") for number in range(1200)
    ]
    data = report_value(Report("", Depth.CHEAP, 0.0, 1.0, findings=found))
    assert (len(data["findings"]), data["findings_left_out"]) == (1000, 200)
    assert "findings_left_out" not in report_value(Report("", Depth.CHEAP, 0.0, 1.0, findings=found[:1000]))


def test_a_recovery_of_sound_journals_is_skipped(client: SyncJournalClient, group: str) -> None:
    data = context()
    with pytest.raises(AirflowSkipException):
        PlanRecoveryOperator(task_id="plan", group=group).execute(data)
    assert data["ti"].pushed["return_value"]["summary"] == "nothing to recover"


def test_an_unapproved_plan_is_not_executed(client: SyncJournalClient, group: str) -> None:
    data = context()
    with pytest.raises(AirflowFailException, match="was approved"):
        RecoverOperator(task_id="recover", group=group, approved={"approved": "0123456789abcdef"}).execute(data)
    assert data["ti"].pushed["return_value"]["remaining"]["steps"] == []


def answer(option: str) -> dict[str, Any]:
    user = {"id": "1", "name": "ada"}
    return {
        "chosen_options": [option],
        "params_input": {},
        "responded_at": datetime.now(UTC),
        "responded_by_user": user,
    }


def test_the_approval_has_the_hash_on_the_button() -> None:
    approve = ApproveRecoveryOperator(task_id="approve", plan={"hash": "beef", "text": "**1 step**"})
    assert approve.execute_complete(context(), answer("Approve f00d")) == {"approved": "f00d", "by": "ada"}
    with pytest.raises(AirflowSkipException):
        approve.execute_complete(context(), answer("Reject"))
    with pytest.raises(AirflowFailException, match="no plan"):
        ApproveRecoveryOperator(task_id="approve", plan=None).execute(context())


def test_a_waiting_consumer_handles_a_recreated_journal_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = SqlStore(url)
    fence, _ = store.raise_fence("revenue")
    with store.transaction("revenue", fence) as transaction:
        transaction.commit(Checkpoint({"shop/a": Source(12, journal_id="c1-2")}))
    application = SimpleNamespace(name="revenue")
    consume = SparkConsumerOperator(task_id="consume", application=lambda: application, store_url=url, wait_for="shop")
    with pytest.raises(TaskDeferred) as deferred:
        consume.execute(context())
    assert isinstance(deferred.value.trigger, JournalOffsetTrigger)
    arguments = deferred.value.trigger.serialize()[1]
    assert arguments["beyond"] == {"shop/a": {"offset": 12, "journal_id": "c1-2"}}
    monkeypatch.setattr(SparkConsumerOperator, "_consume", lambda *_: {"consumed": True})
    assert consume.execute_complete(context(), {"error": "made again", "recreated": True}) == {"consumed": True}
    with pytest.raises(AirflowFailException, match="refused"):
        consume.execute_complete(context(), {"error": "refused"})


def test_a_consumer_without_a_safe_store_is_refused() -> None:
    with pytest.raises(InvalidInput, match="holds a password") as refused:
        SparkConsumerOperator(task_id="never", application="builtins:dict", store_url="mysql+pymysql://me:secret@db/x")
    assert "secret@" not in str(refused.value)
    for store in ("", "{{ var.value.store }}"):
        consume = SparkConsumerOperator(task_id="consume", application="builtins:dict", store_url=store)
        with pytest.raises(AirflowFailException, match="store"):
            consume.execute(context())
    assert consume.max_active_tis_per_dag == 1


def test_a_consumer_has_its_engines_options_and_unknown_ones_are_refused() -> None:
    def consumer(**options: Any) -> SparkConsumerOperator:
        return SparkConsumerOperator(task_id="x", application="shop:Revenue", store_url="sqlite://", options=options)

    given = {"misfits": "nulls", "fail_on_data_loss": False, "max_transaction_bytes": 1000}
    made = consumer(**given)._options()
    assert made == ConsumerOptions(misfits=MisfitPolicy.NULLS, fail_on_data_loss=False, max_transaction_bytes=1000)
    with pytest.raises(InvalidInput, match="max_bytes: there is no such option of a consumer"):
        consumer(max_bytes=1)


def test_an_existing_spark_session_is_used_and_kept_running(monkeypatch: pytest.MonkeyPatch) -> None:
    from coranto_consumers.spark.session import sessions

    class Found:
        running = True

        def stop(self) -> None:
            self.running = False

    found = Found()
    monkeypatch.setattr(sessions, "running_session", lambda: found)
    consumer = SparkConsumerOperator(task_id="consume", application="shop:Revenue", store_url="sqlite:////tmp/shop.db")
    assert consumer._start_session() is found
    consumer.on_kill()
    assert found.running


def uris(assets: Any) -> list[str]:
    return [each.uri for each in assets]


def test_operators_declare_their_input_and_output_journals() -> None:
    made = publishing("shop/orders")
    assert (uris(made.inlets), uris(made.outlets)) == ([], ["journal://coranto_default/shop/orders"])
    named = publishing("shop/orders", coranto_conn_id="other", cluster="prod")
    assert uris(named.outlets) == ["journal://prod/shop/orders"]
    assert publishing("shop/orders", outlets=[]).outlets == []
    assert publishing("{{ params.group }}").outlets == []
    consumer = SparkConsumerOperator(
        task_id="task", application="m:C", store_url="sqlite:///x.db", inputs=["shop/orders"], outputs=["shop/late"]
    )
    assert uris(consumer.inlets) == ["journal://coranto_default/shop/orders"]
    assert uris(consumer.outlets) == ["journal://coranto_default/shop/late"]


def test_the_event_of_an_outlet_has_the_payload_of_a_watcher(client: SyncJournalClient, group: str) -> None:
    operator = publishing(group)
    (asset,) = operator.outlets
    events = OutletEventAccessors()
    data = operator.execute({**context(), "outlet_events": events})
    payload = events[asset].extra["payload"]
    assert payload["heads"] == data["heads"]
    heads = vector_of_json(data["heads"], "heads")
    assert vector_of_json(payload["since"], "since") == dict.fromkeys(heads, 0)
    assert payload["bytes"] == sum(heads.values()) > 0
    assert payload["group"] == group


@pytest.mark.parametrize("budget", [0, -1, "0", "many"])
def test_an_invalid_budget_is_refused_as_in_the_command(client: SyncJournalClient, group: str, budget: Any) -> None:
    with pytest.raises((InvalidInput, AirflowFailException), match=r"cannot read|is not a size"):
        AuditOperator(task_id="audit", group=group, depth="deep", budget=budget).execute(context())


def test_the_budget_of_an_audit_is_parsed_as_in_the_command(
    client: SyncJournalClient, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = []

    async def audit(*arguments: Any, **options: Any) -> Report:
        budgets.append(arguments[3].budget)
        return Report("", Depth.CHEAP, 0.0, 0.0)

    monkeypatch.setattr("coranto.audit.audit_journals", audit)
    for each in ("", None, "all", "64M", 7, "7"):
        AuditOperator(task_id="audit", group=group, budget=each).execute(context())
    assert budgets == [1 << 30, None, None, 64 << 20, 7, 7]
