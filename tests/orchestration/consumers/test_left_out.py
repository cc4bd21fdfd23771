"""The input that a consumer goes on without is told: in metadata, and by a check until somebody accepts it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from coranto.client.loop import run_blocking
from coranto.errors import InvalidInput
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.journals.losses import LostContent
from coranto_consumers.spark import ConsumeReport, ConsumerOptions, DeadLetters, MisfitPolicy, dead_letter_table
from dagster_coranto import ConsumerSettings, JournalResource, SparkResource, build_left_out_check
from dagster_coranto.consumers.assets import spark_consumer_assets
from dagster_coranto.consumers.definition import consumers_of
from dagster_coranto.consumers.left_out import LeftOut, LeftOutWatch, report_left_out
from tests.orchestration.instances import new_instance
from tests.orchestration.revenue import ORDERS, Revenue

JOURNAL = "shop/orders/part-000"
LETTERS = DeadLetters(table=dead_letter_table("letters"))
REPORT = ConsumeReport(0, 0, 0, 0, {}, {}, 0, 1)
LOST = LostContent("j", 10, 30)


def test_losses_are_told_once_committed_and_dead_letters_now_and_then() -> None:
    told: list[LeftOut] = []
    now, works = 0.0, False

    def tell(new: LeftOut) -> bool:
        told.append(new)
        return works

    watch = LeftOutWatch(ConsumerOptions(misfits=LETTERS), tell, 30.0, lambda: now)
    watch.look(replace(REPORT, lost=(LOST,)))
    assert told == [], "the next run meets it again if nothing is committed"
    watch.look(replace(REPORT, transactions=1, lost=(LOST,)))
    assert told == [LeftOut(0, (LOST,))]
    works = True
    watch.look(replace(REPORT, transactions=2, misfits=2, lost=(LOST,)))
    assert told[1:] == [LeftOut(2, (LOST,))], "the first could not be told"
    watch.look(replace(REPORT, transactions=3, misfits=5, lost=(LOST,)))
    assert len(told) == 2
    now = 31.0
    watch.look(replace(REPORT, transactions=4, misfits=6, lost=(LOST,)))
    watch.finish()
    assert told[2:] == [LeftOut(4)]


def test_messages_that_the_application_got_with_nulls_are_not_left_out() -> None:
    watch = LeftOutWatch(ConsumerOptions(misfits=MisfitPolicy.NULLS), lambda new: pytest.fail(str(new)), 0.0)
    watch.look(replace(REPORT, transactions=1, misfits=3))
    watch.finish()


def test_other_assets_have_no_such_check() -> None:
    @dg.asset
    def other() -> None: ...

    with pytest.raises(InvalidInput, match="not the assets of a Spark consumer"):
        build_left_out_check(other)


def test_dead_letters_and_lost_content_are_told_until_they_are_accepted(
    spark: SparkSession, broker: FakeBroker, journals: JournalResource, tmp_path: Path
) -> None:
    def settings(context: dg.AssetExecutionContext) -> ConsumerSettings:
        options = ConsumerOptions(misfits=LETTERS, fail_on_data_loss=False)
        return ConsumerSettings(Revenue(), f"sqlite:///{tmp_path / 'store.db'}", options)

    consumer = spark_consumer_assets(name="consume_orders", sources=[ORDERS], tables=[dg.AssetSpec("revenue")])(
        settings
    )
    checks = build_left_out_check(consumer)
    resources = {"journals": journals, "spark": SparkResource()}
    key = dg.AssetCheckKey(dg.AssetKey("revenue"), "nothing_left_out")
    broker.create(JOURNAL)
    journal = broker.journals[JOURNAL]

    def store(*lines: str) -> int:
        run_blocking(broker.write(JOURNAL, "".join(f"{line}\n" for line in lines).encode()))
        return journal.roll(tmp_path).end

    def told() -> tuple[bool, dg.AssetCheckSeverity, str | None]:
        """The state of the check that the UI shows now."""
        record = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
        assert record.event is not None
        assert record.event.dagster_event is not None
        found = record.event.dagster_event.asset_check_evaluation_data
        return found.passed, found.severity, found.description

    def consume() -> Any:
        result = dg.materialize([consumer], resources=resources, instance=instance)
        found = result.asset_materializations_for_node("consume_orders")  # Also of its source.
        (made,) = (each for each in found if each.asset_key == dg.AssetKey("revenue"))
        return made.metadata

    def check(**config: object) -> None:
        job = dg.Definitions(
            assets=[consumer],
            asset_checks=[checks],
            resources=resources,
            jobs=[dg.define_asset_job("check", dg.AssetSelection.all_asset_checks())],
        ).resolve_job_def("check")
        ran = job.execute_in_process(
            instance=instance, run_config={"ops": {"consume_orders__nothing_left_out": {"config": config}}}
        )
        assert ran.success

    with new_instance() as instance:
        begin = store('{"customer": "ada", "cents": 1}', '{"customer": "ada", "cents": "many"}', "nonsense")
        assert consume()["dagster-coranto/misfits"].value == 2
        assert told() == (False, dg.AssetCheckSeverity.WARN, "2 dead letters")

        end = store('{"customer": "ada", "cents": 10}')
        journal.stored.clear()
        store('{"customer": "ada", "cents": 100}')
        lost = consume()
        assert lost["dagster-coranto/lost_bytes"].value == end - begin
        (row,) = lost["dagster-coranto/lost"].records
        assert (row.data["journal"], row.data["begin"], row.data["end"]) == (JOURNAL, begin, end)
        words = f"1 range of content ({end - begin} B) gone before it was read; 2 dead letters"
        assert told() == (False, dg.AssetCheckSeverity.ERROR, words)

        check()
        assert told() == (False, dg.AssetCheckSeverity.ERROR, words), "an evaluation hides nothing"
        check(accept=True)
        assert told()[0]
        report_left_out(instance, next(consumers_of([consumer])), LeftOut(1))
        assert told() == (False, dg.AssetCheckSeverity.WARN, "1 dead letter")
