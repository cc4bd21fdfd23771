"""The last evaluation of a check is found before later executions without an evaluation."""

from __future__ import annotations

import dagster as dg

from dagster_coranto.instance.evaluations import last_evaluation

KEY = dg.AssetCheckKey(dg.AssetKey("table"), "whole")


@dg.asset_check(asset="table")
def whole() -> dg.AssetCheckResult:
    raise RuntimeError("the store is away")


def test_failed_executions_do_not_hide_the_last_evaluation() -> None:
    job = dg.Definitions(
        asset_checks=[whole], jobs=[dg.define_asset_job("look", dg.AssetSelection.all_asset_checks())]
    ).resolve_job_def("look")
    with dg.DagsterInstance.ephemeral() as instance:
        assert last_evaluation(instance, KEY) is None
        evaluation = dg.AssetCheckEvaluation(
            asset_key=KEY.asset_key, check_name=KEY.name, passed=False, metadata={"lost": 7}
        )
        instance.report_runless_asset_event(evaluation)
        for _ in range(3):
            assert not job.execute_in_process(instance=instance, raise_on_error=False).success
        last = last_evaluation(instance, KEY)
        assert last is not None
        assert last.metadata["lost"].value == 7
