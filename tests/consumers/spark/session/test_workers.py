"""The modules that the parents of a local session's workers import."""

import gc

import pyarrow as pa
import pytest

from coranto_consumers.spark.session.workers import IMPORTED, TASKS, imported_for


def test_workers_of_tasks_have_all_that_tasks_need():
    assert imported_for(TASKS) == IMPORTED
    assert {"pandas", "pyarrow.json", TASKS} < set(IMPORTED)


@pytest.mark.parametrize("step", ["lookup_data_sources", "create_data_source", "plan_data_source_read"])
def test_workers_that_plan_have_the_source_and_not_what_only_tasks_need(step):
    module = f"pyspark.sql.worker.{step}"
    assert imported_for(module) == (module, "coranto_consumers.spark.source.data_source")


def test_what_the_parent_has_imported_is_no_garbage_to_look_for_in_its_workers(spark):
    def frozen(batches):
        for batch in batches:
            yield pa.record_batch({"id": pa.array([gc.get_freeze_count()] * batch.num_rows)})

    assert spark.range(1).mapInArrow(frozen, "id BIGINT").collect()[0].id > 100_000
