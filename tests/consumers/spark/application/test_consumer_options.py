"""Options of consumers: one value for every runner, and parsing of plain values of YAML and JSON."""

import inspect
from dataclasses import fields

import pytest

from coranto.client import ClientConfig
from coranto.errors import InvalidInput
from coranto_consumers.journals.framings import CsvRecords
from coranto_consumers.spark import (
    ConsumerOptions,
    DeadLetters,
    MisfitPolicy,
    Outputs,
    SparkConsumer,
    exactly_once,
)
from coranto_consumers.spark.consumer.windows import WindowConsumer
from coranto_consumers.stores.windows import WINDOW_COLUMN


class Rows:
    name = "rows"
    sources = "name:prefix=rows/"
    value_schema = "n BIGINT"

    def outputs(self, committed):
        return Outputs()


def test_consumers_take_options_as_one_value():
    for consumer, own in ((SparkConsumer, {"on_progress", "hooks"}), (WindowConsumer, {"name", "hooks"})):
        parameters = inspect.signature(consumer.__init__).parameters
        assert list(parameters)[:6] == ["self", "application", "client", "store", "spark", "options"]
        assert set(list(parameters)[6:]) == own
        assert not {each.name for each in fields(ConsumerOptions)} & parameters.keys()


def test_a_consumer_accepts_its_options_and_rejects_others(tmp_path):
    client, store = ClientConfig("127.0.0.1:8080"), f"sqlite:///{tmp_path}/store.db"
    with pytest.raises(InvalidInput, match="fail_on_data_loss: has no meaning for a consumer by windows"):
        WindowConsumer(Rows(), client, store, lambda: None, ConsumerOptions(fail_on_data_loss=False))
    with pytest.raises(InvalidInput, match="registry: has no meaning for `exactly_once`"):
        exactly_once(store, lambda batch: Outputs(), name="rows", options=ConsumerOptions(registry="types/registry"))
    nulls = ConsumerOptions(misfits=MisfitPolicy.NULLS)
    assert WindowConsumer(Rows(), client, store, lambda: None, nulls).name == "rows"
    assert WindowConsumer(Rows(), client, store, lambda: None, nulls, name="days").name == "days"


def test_absent_options_are_none():
    assert all(each.default != "" for each in fields(ConsumerOptions))
    with pytest.raises(InvalidInput, match="registry"):
        ConsumerOptions(registry="")


def test_plain_values_are_parsed_into_options():
    made = ConsumerOptions.of(
        {
            "max_transaction_bytes": 1000,
            "misfits": {"table": "letters"},
            "fail_on_data_loss": False,
            "framing": {"framing": "csv", "csvColumns": 3},
        }
    )
    assert (made.max_transaction_bytes, made.fail_on_data_loss) == (1000, False)
    assert made.framing == CsvRecords(3)
    assert isinstance(made.misfits, DeadLetters)
    assert made.misfits.table is not None
    assert made.misfits.table.name == "letters"
    assert ConsumerOptions.of({"misfits": "nulls"}).misfits is MisfitPolicy.NULLS
    assert ConsumerOptions.of({"misfits": {"journals": ["a"]}}).misfits == DeadLetters(journals=["a"])
    by_window = ConsumerOptions.of({"misfits": {"table": "letters"}}, by_window=True).misfits
    assert isinstance(by_window, DeadLetters)
    assert WINDOW_COLUMN in by_window.table.c
    assert ConsumerOptions.of({}) == ConsumerOptions()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"max_bytes": 1},
            "max_bytes: there is no such option of a consumer; there are accept_changes, atomic, fail_on_data_loss",
        ),
        ({"max_transaction_bytes": 0}, "max_transaction_bytes: 0 is not a positive number"),
        ({"max_transaction_messages": 0}, "max_transaction_messages: 0 is not a positive number of messages"),
        ({"min_transaction_seconds": -1}, "min_transaction_seconds: -1 is not a number of seconds from 0 on"),
        ({"min_transaction_seconds": float("nan")}, "min_transaction_seconds: nan is not a number of seconds"),
        ({"min_transaction_seconds": "5"}, "min_transaction_seconds: '5' is not a number"),
        ({"max_partition_bytes": "many"}, "max_partition_bytes: 'many' is not a whole number"),
        ({"fail_on_data_loss": "no"}, "fail_on_data_loss: 'no' is not true or false"),
        ({"misfits": "ignore"}, "misfits: 'ignore' is neither fail nor nulls, nor a place"),
        ({"misfits": {}}, "name either a table or journals"),
        ({"misfits": {"topic": "x"}}, "misfits: 'topic' is not a place of dead letters"),
        ({"misfits": {"table": 3}}, "misfits: a table is a name"),
        ({"misfits": MisfitPolicy.DEAD_LETTERS}, "misfits: say where"),
        ({"framing": {"framing": "csv"}}, "option csvColumns: '' is not the number of columns"),
        ({"framing": CsvRecords(3), "uuid_pointer": "/id"}, "uuid_pointer: is for lines of JSON"),
    ],
)
def test_invalid_values_are_refused(given, problem):
    with pytest.raises(InvalidInput, match=problem):
        ConsumerOptions.of(given)
