"""The options of consumers: one value for all that run one, and what plain values of YAML and JSON mean."""

import inspect
from dataclasses import fields

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.spark import ConsumerOptions, DeadLetters, MisfitPolicy, SparkConsumer
from coranto_consumers.spark.consumer.windows import WindowConsumer
from coranto_consumers.spark.journals.framings import CsvRecords
from coranto_consumers.stores.windows import WINDOW_COLUMN

OF_THE_PROGRAM = {"self", "application", "client", "store", "store_url", "name", "spark", "on_progress", "hooks"}


def test_a_consumer_takes_exactly_these_options_with_these_defaults():
    parameters = inspect.signature(SparkConsumer.__init__).parameters
    taken = {name: (each.annotation, each.default) for name, each in parameters.items() if name not in OF_THE_PROGRAM}
    assert taken == {each.name: (each.type, each.default) for each in fields(ConsumerOptions)}
    assert set(ConsumerOptions().arguments()) == set(taken)


def test_a_consumer_by_windows_takes_its_part_of_them_and_refuses_the_others():
    parameters = inspect.signature(WindowConsumer.__init__).parameters
    assert set(ConsumerOptions(misfits=MisfitPolicy.NULLS).of_windows()) == set(parameters) - OF_THE_PROGRAM
    with pytest.raises(InvalidInput, match="fail_on_data_loss: has no meaning for a consumer by windows"):
        ConsumerOptions(fail_on_data_loss=False).of_windows()


def test_plain_values_say_options():
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
    ("given", "told"),
    [
        (
            {"max_bytes": 1},
            "max_bytes: there is no such option of a consumer; there are accept_changes, fail_on_data_loss, framing",
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
def test_values_that_mean_nothing_are_refused(given, told):
    with pytest.raises(InvalidInput, match=told):
        ConsumerOptions.of(given)
