"""The modules that the parents of a local session's workers import."""

import gc

import pyarrow as pa
import pytest

from coranto_consumers.spark.session.workers import IMPORTED, TASKS, imported_for


def test_workers_of_tasks_import_all_modules_of_tasks():
    assert imported_for(TASKS) == IMPORTED
    assert {"pandas", "pyarrow.json", TASKS} < set(IMPORTED)


@pytest.mark.parametrize("step", ["lookup_data_sources", "create_data_source", "plan_data_source_read"])
def test_planning_workers_import_the_source_but_no_modules_of_tasks(step):
    module = f"pyspark.sql.worker.{step}"
    assert imported_for(module) == (module, "coranto_consumers.spark.source.data_source")


def test_modules_imported_by_the_parent_are_frozen_for_garbage_collection(spark):
    def frozen(batches):
        for batch in batches:
            yield pa.record_batch({"id": pa.array([gc.get_freeze_count()] * batch.num_rows)})

    assert spark.range(1).mapInArrow(frozen, "id BIGINT").collect()[0].id > 100_000
