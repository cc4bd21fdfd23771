"""Names of an application's outputs, as a checkpoint records them."""

from typing import Any

import pytest
from pyspark.sql.types import IntegerType, StructType
from sqlalchemy import Column, Integer, MetaData, Table

from coranto.client import ClientConfig
from coranto.errors import InvalidInput
from coranto_consumers.spark import (
    JournalOutput,
    Outputs,
    SparkConsumer,
    SqlOutput,
    StagedSql,
    TableOutput,
    exactly_once,
)
from coranto_consumers.spark.application.outputs import checked_outputs

ROWS: Any = None


def test_outputs_have_the_names_of_their_tables_and_journals():
    def table(name: str, schema: str | None = None) -> Table:
        return Table(name, MetaData(), Column("n", Integer), schema=schema)

    sql = StagedSql(table("rows"), ["INSERT INTO {sums} SELECT n FROM {stage} AS s"], [table("sums")])
    outputs = Outputs(
        [TableOutput(table("a"), ROWS), TableOutput(table("b", "shop"), ROWS), TableOutput("lake.c", ROWS)],
        [JournalOutput(ROWS, "name:prefix=out/"), JournalOutput(ROWS, ["x/1", "x/2"])],
        [SqlOutput(sql, ROWS)],
    )
    assert outputs.names == {
        "table a",
        "table shop.b",
        "table lake.c",
        "table sums",
        "journals name:prefix=out/",
        "journals x/1",
        "journals x/2",
    }
    assert Outputs().names == frozenset()


class Rows:
    name = "rows"
    sources = "name:prefix=rows/"
    value_schema: Any = "n INT"

    def outputs(self, committed: Any) -> Outputs:
        return Outputs()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tables": 1}, r"tables must be a list of TableOutput: give tables=\[TableOutput\(…\)\]"),
        ({"journals": ["a/b"]}, "journals must be a list of JournalOutput"),
        ({"sql": iter(())}, "sql must be a list of SqlOutput"),
    ],
)
def test_outputs_of_another_form_are_refused_with_advice(given, problem):
    with pytest.raises(InvalidInput, match=problem):
        checked_outputs(Outputs(**given))


@pytest.mark.parametrize(("made", "problem"), [(None, r"returned nothing \(None\)"), ([], "returned a list")])
def test_results_other_than_outputs_are_refused_with_advice(made, problem):
    with pytest.raises(InvalidInput, match=f"outputs: the function {problem}: return Outputs\\(tables="):
        checked_outputs(made)
    assert checked_outputs(Outputs()) == Outputs()


def test_an_endpoint_instead_of_a_client_is_refused_with_advice(tmp_path):
    client: Any = "127.0.0.1:8080"
    store = f"sqlite:///{tmp_path}/store.db"
    with pytest.raises(InvalidInput, match=r"client: is a str, .*give ClientConfig\('127.0.0.1:8080'\)"):
        SparkConsumer(Rows(), client, store, ROWS)
    with pytest.raises(InvalidInput, match="client: is a str"):
        exactly_once(store, lambda batch: Outputs(), name="rows", client=client)


def test_a_struct_type_instead_of_ddl_is_refused_with_the_ddl(tmp_path):
    rows = Rows()
    rows.value_schema = StructType().add("n", IntegerType())
    with pytest.raises(InvalidInput, match=r"value_schema: is a StructType, .*write it as `n int`"):
        SparkConsumer(rows, ClientConfig("127.0.0.1:8080"), f"sqlite:///{tmp_path}/store.db", ROWS)
