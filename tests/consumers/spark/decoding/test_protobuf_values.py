"""Protobuf messages as columns of Spark."""

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from coranto.errors import InvalidInput
from coranto_consumers.journals.framings import FixedRecords
from coranto_consumers.spark.decoding.parsers import parser_of
from tests.consumers.spark.shop_protobuf import ORDER, descriptors

FRAMING = FixedRecords(descriptors().SerializeToString(), "shop.Order")


def test_fields_of_protobuf_become_nested_columns(spark):
    order = ORDER(n=1, lines=[{"item": "lamp", "count": 2}], tags={"a": 1}, kind=1, late=True)
    order.at.FromMicroseconds(1_500_000)
    schema = StructType.fromDDL(
        "n BIGINT, lines ARRAY<STRUCT<count: INT, item: STRING>>, tags MAP<STRING, BIGINT>, kind STRING, at TIMESTAMP, "
        "late BOOLEAN, text STRING, big BIGINT"
    )
    parser = parser_of(FRAMING, schema)
    payloads = [order, ORDER(), ORDER(n=2, big=1 << 63)]

    table, misfits = parser.parse(pa.array([each.SerializeToString() + b"\n" for each in payloads]))

    rows = [{**row, "at": row["at"] and row["at"].timestamp()} for row in table.to_pylist()]
    assert rows[0] == {
        "n": 1,
        "lines": [{"count": 2, "item": "lamp"}],
        "tags": [("a", 1)],
        "kind": "RUSH",
        "at": 1.5,
        "late": True,
        "text": "",
        "big": 0,
    }
    assert (rows[1]["n"], rows[1]["late"], rows[1]["at"], rows[1]["lines"]) == (0, None, None, [])
    assert (rows[2]["n"], rows[2]["big"]) == (2, None)
    assert misfits.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("none INT", "shop.Order has no field 'none'; it has uuid, n"),
        ("n STRING", "the field shop.Order.n is BIGINT, and cannot fill a column of string"),
        ("lines STRING", "the field shop.Order.lines is repeated"),
        ("at STRING", "is a message google.protobuf.Timestamp"),
    ],
)
def test_columns_missing_from_a_type_are_refused(spark, schema, problem):
    with pytest.raises(InvalidInput, match=problem):
        parser_of(FRAMING, StructType.fromDDL(schema))
