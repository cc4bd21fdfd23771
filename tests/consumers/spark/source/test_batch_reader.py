"""A read is planned once, for rows that pass filters, or the error says why it cannot be planned."""

import json
import pickle

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, LessThan

from coranto.errors import InvalidInput
from coranto_consumers.spark.session.task_errors import error_of_task
from coranto_consumers.spark.source import batch_reader
from coranto_consumers.spark.source.data_source import JournalDataSource
from coranto_consumers.spark.source.planning import FilterBounds

NAMES = ("sales/north", "sales/south", "stock/north")
SETTING = "spark.sql.python.filterPushdown.enabled"


@pytest.mark.parametrize("filters", [[], [EqualTo(("journal",), NAMES[0])], [EqualTo(("value",), "x")], None])
def test_a_read_is_planned_once(broker, monkeypatch, filters):
    """Spark pushes filters if it may, then pickles the reader, then requests partitions."""
    broker.create(*NAMES)
    broker.write(NAMES[0], b'{"n":1}\n')
    planned = []
    plan_read = batch_reader.plan_read
    monkeypatch.setattr(
        batch_reader, "plan_read", lambda *arguments: planned.append(arguments[2]) or plan_read(*arguments)
    )
    journals = JournalDataSource({"endpoint": broker.endpoint, "assign": json.dumps([*NAMES])})

    reader = journals.reader(journals.schema())
    if filters is not None:
        assert reader.pushFilters(filters) == filters
    executors = pickle.loads(pickle.dumps(reader))
    [part] = reader.partitions()

    assert planned == [FilterBounds.of(filters or [], {"journal": "journal", "value": "value"})]
    assert pa.Table.from_batches(executors.read(part))["value"].to_pylist() == ['{"n":1}']
    assert len(planned) == 1


def test_errors_say_why_a_read_cannot_be_planned(broker, spark, request):
    options = {"endpoint": broker.endpoint, "assign": json.dumps(["not/there"])}
    journals = JournalDataSource(options)
    reader = journals.reader(journals.schema())
    assert pickle.loads(pickle.dumps(reader)), "otherwise Spark would only report that it cannot pickle it"
    for _ in range(2):
        with pytest.raises(InvalidInput, match="no journal not/there"):
            reader.partitions()

    before = spark.conf.get(SETTING)
    request.addfinalizer(lambda: spark.conf.set(SETTING, before))
    for setting in ("true", "false"):
        spark.conf.set(SETTING, setting)
        with pytest.raises(PySparkException, match="not/there") as error:
            spark.read.format("journal").options(**options).load().where("offset > 5").count()
        assert isinstance(error_of_task(error.value), InvalidInput)
        assert "Could not serialize" not in str(error.value)


def test_ranges_of_a_committed_journal_outside_filtered_offsets_have_no_task(broker):
    broker.create(NAMES[0])
    broker.write(NAMES[0], b'{"n":1}\n' * 1000)
    options = {"endpoint": broker.endpoint, "subscribe": NAMES[0], "maxBytesPerPartition": "1000", "minPartitions": "8"}
    journals = JournalDataSource(options)
    reader = journals.reader(journals.schema())
    assert len(reader.partitions()) == 8

    filters = [GreaterThanOrEqual(("offset",), 4000), LessThan(("offset",), 4016)]
    assert reader.pushFilters(filters) == filters

    [part] = reader.partitions()
    rows = pa.Table.from_batches(reader.read(part))
    assert rows["offset"].to_pylist() == [4000, 4008]
    assert [json.loads(value) for value in rows["value"].to_pylist()] == [{"n": 1}] * 2
