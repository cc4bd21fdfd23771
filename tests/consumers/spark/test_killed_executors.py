"""Kill executors of the source and of a consumer on `local-cluster` with `kill -9`."""

import sys
from pathlib import Path

import pytest

from tests.consumers.spark import killed_executors
from tests.consumers.spark.cluster.test_cluster import SMALL, Numbers, environment, home, numbers

__all__ = ["home", "numbers"]  # Fixtures.


@pytest.mark.exhaustive
def test_executors_killed_in_each_step_lose_and_duplicate_nothing(numbers: Numbers, home: Path) -> None:
    settings = {**SMALL, "spark.master": "local-cluster[2,1,1024]"}
    answer = numbers.ask(
        sys.executable, env=environment(SPARK_HOME=str(home)), settings=settings, program=killed_executors.__file__
    )
    numbers.check(answer)
    assert answer["transactions"] > 1
    assert sorted(answer["killed"]) == ["PLANNED", "SEQUENCED"]
    for during in ("staging", "publishing"):
        assert (numbers.folder / during).exists()
