"""Metrics of a Spark consumer add up over runs, and show the current lag of each journal."""

from dataclasses import replace

from coranto_consumers.journals.losses import LostContent
from coranto_consumers.spark import ConsumeReport, SparkConsumerMetrics
from coranto_consumers.spark.consumer.progress import PHASES, PhaseTimes

COUNTERS = ("transactions", "messages", "records_read", "published", "misfits")
BEGUN = ConsumeReport(0, 0, 0, 0, {"a": 0, "b": 5}, {"a": 100, "b": 5}, 0, fence=1)


def values(metrics: SparkConsumerMetrics) -> dict[str, float]:
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                detail = [value for name, value in sorted(sample.labels.items()) if name != "consumer"]
                found[" ".join([sample.name.removeprefix("coranto_spark_"), *detail])] = sample.value
                assert sample.labels["consumer"] == "delays"
    return found


def test_counters_continue_over_runs_whose_reports_begin_at_zero():
    metrics = SparkConsumerMetrics("delays")
    metrics.observe(BEGUN)
    assert values(metrics)["lag_bytes a"] == 100
    first = replace(
        BEGUN, transactions=1, messages=10, records_read=12, published=3, misfits=1, offsets={"a": 60, "b": 5}
    )
    metrics.observe(replace(first, seconds={"reading": 2.0, "writing": 1.0}))
    metrics.observe(
        replace(first, transactions=2, messages=15, records_read=20, seconds={"reading": 2.5, "writing": 1.0})
    )
    metrics.observe(replace(BEGUN, fence=2, offsets={"a": 80}, heads={"a": 120}))
    lost = LostContent("a", 80, 90)
    metrics.observe(replace(BEGUN, fence=2, transactions=1, messages=4, lost=(lost,), heads={"a": 120}))

    found = values(metrics)

    assert {name: found[f"{name}_total"] for name in COUNTERS} == {
        "transactions": 3,
        "messages": 19,
        "records_read": 20,
        "published": 3,
        "misfits": 1,
    }
    assert (found["phase_seconds_total reading"], found["phase_seconds_total writing"]) == (2.5, 1.0)
    assert found["lost_ranges_total"] == 1
    assert {name: value for name, value in found.items() if name.startswith("lag_bytes")} == {"lag_bytes a": 120}


def test_the_phases_of_a_transaction_are_measured_one_after_another():
    now = iter([10.0, 12.0, 12.5, 15.5, 16.0])
    times = PhaseTimes("consumer", lambda: next(now))
    for phase in PHASES:
        times.end_phase(phase)

    assert times.plus({"reading": 1.0}) == {
        "reading": 3.0,
        "writing": 0.5,
        "committing": 3.0,
        "acknowledging": 0.5,
    }
