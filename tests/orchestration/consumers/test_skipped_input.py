"""Input omitted by a consumer is reported: in metadata, and by a check until it is accepted."""

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
from dagster_coranto.consumers.skipped_input import SkippedInput, SkippedInputWatch, report_skipped_input
from tests.orchestration.instances import new_instance
from tests.orchestration.revenue import ORDERS, Revenue

JOURNAL = "shop/orders/part-000"
LETTERS = DeadLetters(table=dead_letter_table("letters"))
REPORT = ConsumeReport(0, 0, 0, 0, {}, {}, 0, 1)
LOST = LostContent("j", 10, 30)


def test_losses_are_reported_after_the_commit_and_dead_letters_periodically() -> None:
    reported: list[SkippedInput] = []
    now, works = 0.0, False

    def report(new: SkippedInput) -> bool:
        reported.append(new)
        return works

    watch = SkippedInputWatch(ConsumerOptions(misfits=LETTERS), report, 30.0, lambda: now)
    watch.record(replace(REPORT, lost=(LOST,)))
    assert reported == [], "without a commit the next run finds the loss again"
    watch.record(replace(REPORT, transactions=1, lost=(LOST,)))
    assert reported == [SkippedInput(0, (LOST,))]
    works = True
    watch.record(replace(REPORT, transactions=2, misfits=2, lost=(LOST,)))
    assert reported[1:] == [SkippedInput(2, (LOST,))], "a failed report is repeated"
    watch.record(replace(REPORT, transactions=3, misfits=5, lost=(LOST,)))
    assert len(reported) == 2
    now = 31.0
    watch.record(replace(REPORT, transactions=4, misfits=6, lost=(LOST,)))
    watch.finish()
    assert reported[2:] == [SkippedInput(4)]


def test_messages_delivered_with_nulls_are_not_reported() -> None:
    watch = SkippedInputWatch(ConsumerOptions(misfits=MisfitPolicy.NULLS), lambda new: pytest.fail(str(new)), 0.0)
    watch.record(replace(REPORT, transactions=1, misfits=3))
    watch.finish()


def test_assets_without_a_spark_consumer_are_refused() -> None:
    @dg.asset
    def other() -> None: ...

    with pytest.raises(InvalidInput, match="not the assets of a Spark consumer"):
        build_left_out_check(other)


def test_dead_letters_and_lost_content_are_reported_until_they_are_accepted(
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

    def reported() -> tuple[bool, dg.AssetCheckSeverity, str | None]:
        """Return the current state of the check in the UI."""
        record = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
        assert record.event is not None
        assert record.event.dagster_event is not None
        found = record.event.dagster_event.asset_check_evaluation_data
        return found.passed, found.severity, found.description

    def consume() -> Any:
        result = dg.materialize([consumer], resources=resources, instance=instance)
        found = result.asset_materializations_for_node("consume_orders")  # Includes the materialisation of the source.
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
        assert reported() == (False, dg.AssetCheckSeverity.WARN, "2 dead letters")

        end = store('{"customer": "ada", "cents": 10}')
        journal.stored.clear()
        store('{"customer": "ada", "cents": 100}')
        lost = consume()
        assert lost["dagster-coranto/lost_bytes"].value == end - begin
        (row,) = lost["dagster-coranto/lost"].records
        assert (row.data["journal"], row.data["begin"], row.data["end"]) == (JOURNAL, begin, end)
        words = f"1 range of content ({end - begin} B) gone before it was read; 2 dead letters"
        assert reported() == (False, dg.AssetCheckSeverity.ERROR, words)

        check()
        assert reported() == (False, dg.AssetCheckSeverity.ERROR, words), "an evaluation does not accept the loss"
        check(accept=True)
        assert reported()[0]
        report_skipped_input(instance, next(consumers_of([consumer])), SkippedInput(1))
        assert reported() == (False, dg.AssetCheckSeverity.WARN, "1 dead letter")
