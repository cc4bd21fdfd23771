"""Errors of tasks reach the driver with their type and text."""

import base64
import os
import traceback

import pytest
from pyspark.errors import PySparkException

from coranto.errors import (
    AppendOutcomeUnknown,
    CorruptMessage,
    InvalidInput,
    JournalNotFound,
    OffsetJump,
    Outcome,
    Unavailable,
)
from coranto_consumers.spark.session import task_errors
from coranto_consumers.spark.session.task_errors import error_of_task, errors_of_tasks, errors_to_driver

ERRORS = [
    CorruptMessage("a/b", 17, 'a line {"n":\n 1} (é)'),
    OffsetJump("a/b", 3, 9),
    InvalidInput("is not one of x, y", field="option mode"),
    InvalidInput("coranto-error: {} is a strange name"),
    JournalNotFound("read of a/b", detail="gone"),
    Unavailable("no broker answers"),
    AppendOutcomeUnknown("append to a/b: the connection broke"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_type_and_fields_after_any_text(error):
    with pytest.raises(type(error)) as raised, errors_to_driver(), errors_to_driver():
        raise error

    trace = "".join(traceback.format_exception(raised.value))
    assert trace.count("coranto-error: ey") == 1
    assert trace.count(str(error)) == 1, "its text is shown once"
    text = f"Job aborted: Task 0 failed 4 times, most recent failure:\n{trace}\n\nDriver stacktrace:\n at java"
    found = error_of_task(PySparkException(text))

    assert type(found) is type(error)
    assert str(found) == str(error)
    plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int)}
    assert {name: vars(found)[name] for name in plain} == plain
    assert (found.retriable, found.outcome) == (error.retriable, error.outcome)
    assert found.outcome in Outcome


@pytest.mark.parametrize("name", ["journal", "coranto"])
def test_the_error_explains_workers_without_the_source(name, monkeypatch):
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/other/bin/python")
    text = f"[DATA_SOURCE_NOT_FOUND] Failed to find the data source: {name}. Make sure the provider name is correct"
    found = error_of_task(PySparkException(text))
    assert isinstance(found, InvalidInput)
    assert f"do not know the data source {name}. They run on the interpreter that PYSPARK_PYTHON" in str(found)
    assert "(/opt/other/bin/python), and this process runs on " in str(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: delta. Make sure the provider name is correct",
        "CorruptMessage: journal a at offset 3: x",
        "coranto-error: " + base64.urlsafe_b64encode(b'{"type": "Nothing"}').decode(),
        "coranto-error: e30=",
        "coranto-error: x",
    ],
)
def test_other_texts_are_not_errors_of_coranto(text):
    assert error_of_task(PySparkException(text)) is None
    with pytest.raises(PySparkException), errors_of_tasks():
        raise PySparkException(text)


def test_other_errors_of_tasks_stay_unchanged():
    with pytest.raises(KeyError), errors_to_driver():
        raise KeyError("x")


def test_workers_hide_the_traceback_of_errors_about_user_values(monkeypatch):
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
    with pytest.raises(InvalidInput), errors_to_driver():
        raise InvalidInput("x", field="option mode")
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
    monkeypatch.setattr(task_errors, "_is_worker", lambda: True)
    for error in (Unavailable("no broker answers"), InvalidInput("x", field="option mode")):
        assert "SPARK_HIDE_TRACEBACK" not in os.environ
        with pytest.raises(type(error)), errors_to_driver():
            raise error
    assert os.environ["SPARK_HIDE_TRACEBACK"] == "1"
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK")


def test_an_option_error_is_one_clear_message(spark):
    with pytest.raises(PySparkException) as raised:
        spark.read.format("journal").options(endpoint="x:1", subscribe="a", isolatoin="x").load()
    text = str(raised.value).partition("JVM stacktrace")[0]
    assert text.count("there is no such option; did you mean isolation?") == 1
    assert "Traceback" not in text
    assert "File " not in text


def test_an_error_crosses_spark(spark, broker):
    broker.create("a/lines")
    broker.write("a/lines", b'{"n":1}\nnonsense\n')
    read = spark.read.format("journal").options(endpoint=broker.endpoint, subscribe="a/lines", mode="FAILFAST")
    with pytest.raises(CorruptMessage, match="not a line of JSON") as corrupt, errors_of_tasks():
        read.schema("n INT").load().collect()
    assert (corrupt.value.journal, corrupt.value.offset) == ("a/lines", 8)
    with pytest.raises(InvalidInput, match="is not a range of a/lines, whose head is 17") as invalid, errors_of_tasks():
        read.option("endingOffsets", '{"a/lines": 99}').load().collect()
    assert invalid.value.field == "options"
    with pytest.raises(InvalidInput, match="did you mean isolation") as unknown, errors_of_tasks():
        read.option("isolatoin", "x").load().collect()
    assert unknown.value.field == "option isolatoin"
