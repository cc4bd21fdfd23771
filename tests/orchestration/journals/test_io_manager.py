"""Records and tables are written to journals exactly once, and read back as committed."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pyarrow as pa
import pytest
from dagster._core.storage.tags import PARENT_RUN_ID_TAG, RESUME_RETRY_TAG
from sqlalchemy import select

from coranto.client.loop import run_blocking
from coranto.client.publishing import sync_publisher
from coranto.errors import InvalidInput, SqlStoreError
from coranto.messages.framing import JsonLines
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.outputs.log import OUTPUTS, CommittedOutput, OutputLog
from dagster_coranto import JournalIOManager, JournalResource, SqlStoreResource

ORDERS = [{"customer": "ada", "cents": 100}, {"customer": "bob", "cents": 200}, {"customer": "ada", "cents": 300}]
JOURNALS = ("shop/orders/part-000", "shop/orders/part-001", "shop/orders/part-002")


@dg.asset(key=["shop", "orders"], io_manager_key="journal", metadata={"dagster-coranto/key_field": "customer"})
def orders() -> list[dict[str, Any]]:
    return ORDERS


@pytest.fixture
def manager(broker: FakeBroker, journals: JournalResource, tmp_path: Path) -> JournalIOManager:
    for name in JOURNALS:
        broker.create(name)
    return JournalIOManager(journals=journals, store=SqlStoreResource(url=f"sqlite:///{tmp_path / 'store.db'}"))


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def read(manager: JournalIOManager) -> list[dict[str, Any]]:
    """Return the committed records as a downstream asset gets them."""
    seen: list[dict[str, Any]] = []

    @dg.asset(ins={"records": dg.AssetIn(key=["shop", "orders"])})
    def downstream(records: list[dict[str, Any]]) -> None:
        seen.extend(records)

    source = dg.AssetSpec(["shop", "orders"]).with_io_manager_key("journal")
    result = dg.materialize([downstream, source], selection=[downstream], resources={"journal": manager})
    assert result.success
    return sorted(seen, key=lambda record: (record["customer"], record["cents"]))


def test_records_are_written_and_read_in_order_of_each_key(manager: JournalIOManager, broker: FakeBroker) -> None:
    result = dg.materialize([orders], resources={"journal": manager})
    (made,) = result.asset_materializations_for_node("shop__orders")
    assert made.metadata["dagster-coranto/messages"].value == 3
    assert made.metadata["dagster/row_count"].value == 3
    assert made.metadata["dagster-coranto/head"].value == sum(broker.journals[name].head for name in JOURNALS)
    assert read(manager) == sorted(ORDERS, key=lambda record: (str(record["customer"]), record["cents"]))
    of_ada = [name for name in JOURNALS if b"ada" in broker.journals[name].content]
    assert len(of_ada) == 1


@pytest.mark.parametrize("made", [pa.Table.from_pylist(ORDERS), pd.DataFrame(ORDERS), iter(ORDERS)], ids=type)
def test_tables_are_written_and_read(manager: JournalIOManager, made: Any) -> None:
    @dg.asset(key=["shop", "orders"], io_manager_key="journal")
    def table() -> Any:
        return made

    seen: list[Any] = []

    @dg.asset(ins={"rows": dg.AssetIn(key=["shop", "orders"])})
    def as_arrow(rows: pa.Table) -> None:
        seen.append(rows)

    @dg.asset(ins={"rows": dg.AssetIn(key=["shop", "orders"])})
    def as_frame(rows: pd.DataFrame) -> None:
        seen.append(rows)

    assert dg.materialize([table, as_arrow, as_frame], resources={"journal": manager}).success
    arrow = next(each for each in seen if isinstance(each, pa.Table))
    frame = next(each for each in seen if isinstance(each, pd.DataFrame))
    assert arrow.to_pylist() == ORDERS
    assert frame.to_dict(orient="records") == ORDERS


@pytest.mark.parametrize("point", ["before the commit", "after the commit", "between acknowledgements"])
def test_an_output_counts_once_after_any_interruption_of_its_step(
    manager: JournalIOManager, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, point: str
) -> None:
    """The retry policy runs the step again."""
    failures = iter([True])
    commit, client = OutputLog.commit, JournalResource.client

    def failing_commit(self: OutputLog, *arguments: Any) -> bool:
        first = next(failures, False)
        if first and point == "before the commit":
            raise SqlStoreError("the store is away")
        done = commit(self, *arguments)
        if first and point == "after the commit":
            raise SqlStoreError("the answer was lost")
        if first:
            monkeypatch.setattr(JournalResource, "client", lambda self: Interrupted(client(self)))
            raise SqlStoreError("the answer was lost")
        return done

    class Interrupted:
        """A client with one failure, at its second acknowledgement."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self._appends = 0

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *arguments: object) -> None:
            self._inner.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def append(self, *arguments: Any, **options: Any) -> Any:
            self._appends += 1
            if self._appends == 2:
                monkeypatch.setattr(JournalResource, "client", client)
                raise ConnectionError("the broker is away")
            return self._inner.append(*arguments, **options)

    monkeypatch.setattr(OutputLog, "commit", failing_commit)

    @dg.asset(
        key=["shop", "orders"],
        io_manager_key="journal",
        metadata={"dagster-coranto/key_field": "cents"},
        retry_policy=dg.RetryPolicy(max_retries=3),
    )
    def retried() -> list[dict[str, Any]]:
        return ORDERS

    assert dg.materialize([retried], resources={"journal": manager}, instance=instance).success
    assert read(manager) == sorted(ORDERS, key=lambda record: (str(record["customer"]), record["cents"]))


def test_a_resumed_run_does_not_publish_again_and_a_new_run_does(
    manager: JournalIOManager, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    commit = OutputLog.commit

    def lost_answer(self: OutputLog, *arguments: Any) -> bool:
        commit(self, *arguments)
        raise SqlStoreError("the answer was lost")

    monkeypatch.setattr(OutputLog, "commit", lost_answer)
    options: Any = {"resources": {"journal": manager}, "instance": instance, "raise_on_error": False}
    failed = dg.materialize([orders], **options)
    assert not failed.success
    assert read(manager) == [], "nothing is acknowledged yet"
    monkeypatch.setattr(OutputLog, "commit", commit)
    resumed = dg.materialize([orders], tags={PARENT_RUN_ID_TAG: failed.run_id, RESUME_RETRY_TAG: "true"}, **options)
    assert resumed.success
    assert len(read(manager)) == 3
    assert dg.materialize([orders], tags={PARENT_RUN_ID_TAG: failed.run_id}, **options).success
    assert len(read(manager)) == 6


def test_only_one_of_two_concurrent_attempts_counts(manager: JournalIOManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attempt commits the same output between the look-up and the commit."""
    commit = OutputLog.commit

    def beaten(self: OutputLog, output: str, asset: str, made: Any) -> bool:
        monkeypatch.setattr(OutputLog, "commit", commit)
        with manager.journals.client() as client:
            other = sync_publisher(client, JsonLines())
            for record in ORDERS:
                other.add(JOURNALS[0], {**record})
            assert commit(self, output, asset, CommittedOutput(3, other.prepare()))
        return commit(self, output, asset, made)

    monkeypatch.setattr(OutputLog, "commit", beaten)
    assert dg.materialize([orders], resources={"journal": manager}).success
    assert read(manager) == sorted(ORDERS, key=lambda record: (str(record["customer"]), record["cents"]))


def test_an_input_above_the_limit_is_refused(manager: JournalIOManager, broker: FakeBroker) -> None:
    run_blocking(broker.write(JOURNALS[0], b'{"customer": "ada"}\n' * 10))
    small = JournalIOManager(journals=manager.journals, store=manager.store, max_input_bytes=100)
    with pytest.raises(InvalidInput, match="hold 200 B, and an input may have 100 bytes; raise max_input_bytes"):
        read(small)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ([{"cents": 1}], "record 0 has no field 'customer', which chooses its journal"),
        ([["ada", 1]], "record 0 of the output is a list, not a mapping"),
        ("text", "an output is records, a pyarrow Table or a DataFrame, not a str"),
    ],
)
def test_outputs_that_are_not_records_are_refused_and_publish_nothing(
    manager: JournalIOManager, made: Any, problem: str
) -> None:
    @dg.asset(key=["shop", "orders"], io_manager_key="journal", metadata={"dagster-coranto/key_field": "customer"})
    def bad() -> Any:
        return made

    with pytest.raises(InvalidInput, match=problem):
        dg.materialize([bad], resources={"journal": manager})
    assert read(manager) == []


def test_old_outputs_are_forgotten_and_runs_of_that_time_are_refused(
    manager: JournalIOManager, instance: dg.DagsterInstance
) -> None:
    """A run that resumes a failed one could otherwise publish a forgotten output twice."""
    now = time.time()
    kept = manager.model_copy(update={"keep_outputs_days": 30})
    options: Any = {"resources": {"journal": kept}, "instance": instance, "raise_on_error": False}
    first = dg.materialize([orders], **options)

    log = OutputLog(manager.store.store(), keep_days=30, wall=lambda: now + 31 * 86_400)
    stuck = CommittedOutput(1, {JOURNALS[0]: b"an acknowledgement that nobody has appended"})
    assert OutputLog(manager.store.store(), wall=lambda: now).commit("stuck/shop/orders", "shop/orders", stuck)
    assert log.find(f"{first.run_id}/shop/orders")
    assert not log.may_be_forgotten(now)
    for number in range(3):  # Runs of a later month.
        assert log.commit(f"later-{number}/shop/orders", "shop/orders", stuck)
        log.acknowledge(f"later-{number}/shop/orders")
    with manager.store.store().engine.connect() as connection:
        left = set(connection.execute(select(OUTPUTS.c.output)).scalars())
    assert left == {"", "stuck/shop/orders", *(f"later-{number}/shop/orders" for number in range(3))}
    assert log.may_be_forgotten(now), "the log of a store with other settings agrees"
    assert not log.may_be_forgotten(now + 3 * 86_400)

    resumed = dg.materialize([orders], tags={PARENT_RUN_ID_TAG: first.run_id, RESUME_RETRY_TAG: "true"}, **options)
    assert not resumed.success
    error = resumed.failure_data_for_node("shop__orders")
    assert "outputs of that time are forgotten" in str(error)
    assert len(read(manager)) == 3, "the output of the first run, once"
