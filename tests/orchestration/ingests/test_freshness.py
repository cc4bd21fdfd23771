"""The check of an ingest's stream: it fails if rows have waited too long for a materialisation."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from coranto.errors import InvalidInput
from dagster_coranto import JournalResource, build_ingest_asset, build_ingest_check
from dagster_coranto.ingests.assets import INGESTS
from tests.orchestration.ingests.conftest import Place
from tests.orchestration.instances import new_instance

pytestmark = pytest.mark.integration


def evaluate(place: Place, instance: dg.DagsterInstance, fresh_seconds: float) -> Any:
    asset = build_ingest_asset(place.file)
    check = build_ingest_check(asset, fresh_seconds=fresh_seconds)
    defs = dg.Definitions(assets=[asset], asset_checks=[check], resources={"journals": place.journals})
    job = defs.resolve_implicit_global_asset_job_def()
    part = job.get_subset(asset_selection=set(), asset_check_selection=set(check.check_keys))
    [found] = part.execute_in_process(instance=instance).get_asset_check_evaluations()
    return found


def test_rows_that_wait_too_long_fail_the_check(place: Place) -> None:
    with new_instance() as instance:
        place.put("a", {"n": 1})
        found = evaluate(place, instance, 60)
        assert (found.passed, found.metadata["dagster-coranto/lag"].value) == (False, 9)
        asset = build_ingest_asset(place.file)
        assert dg.materialize([asset], instance=instance, resources={"journals": place.journals}).success
        assert evaluate(place, instance, 60).description == "The source has no more rows."
        place.put("b", {"n": 2})
        assert evaluate(place, instance, 600).passed
        late = evaluate(place, instance, 0)
        assert not late.passed
        assert "9 rows or bytes wait. The last materialisation was" in late.description
        place.journals = JournalResource(endpoint="127.0.0.1:1")
        away = evaluate(place, instance, 60)
        assert (away.passed, "The lag is unknown" in away.description) == (False, True)


def test_an_asset_of_another_kind_is_refused() -> None:
    @dg.asset
    def other() -> None: ...

    with pytest.raises(InvalidInput, match="is not an asset of build_ingest_asset"):
        INGESTS.of(other)
