"""Messages of other framings than lines of JSON as columns."""

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from coranto.errors import InvalidInput
from coranto_consumers.spark.framings import AnyLines, CsvRecords, FixedRecords
from coranto_consumers.spark.parsers import parser_of

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("framing", "schema", "problem"),
    [
        (CsvRecords(3), "a STRING", "rows of CSV have 2 columns beside their UUID .* and 1 are declared"),
        (CsvRecords(3), "a STRING, b DATE", "column 'b' is date, and rows of CSV are parsed into STRING"),
        (AnyLines(), "line STRING", "lines have one column, value BINARY or STRING, and not line"),
        (FixedRecords(), "value STRING", "frames without a messageType have one column, value BINARY"),
    ],
)
def test_columns_that_messages_do_not_have_are_refused(spark, framing, schema, problem):
    with pytest.raises(InvalidInput, match=problem):
        parser_of(framing, StructType.fromDDL(schema))


def test_fields_of_csv_become_values_of_their_columns_or_nulls(spark):
    schema = StructType.fromDDL("t STRING, b BOOLEAN, i INT, d DOUBLE")
    rows = [
        b'"a,""b""",TRUE,-7,1e3',
        b",,,",
        b"x,yes,2147483648,1_0",
        b"x,false,+1,-Inf",
        b"x,true,1",
        b"\xff,true,1,1",
    ]

    table, misfits = parser_of(CsvRecords(4, None), schema).parse(pa.array([row + b"\n" for row in rows], pa.binary()))

    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ('a,"b"', True, -7, 1000.0),
        (None, None, None, None),
        ("x", None, None, None),
        ("x", False, 1, float("-inf")),
        (None, None, None, None),
        (None, None, None, None),
    ]
    assert misfits.tolist() == [False, False, True, False, True, True]


def test_lines_are_texts_or_bytes(spark):
    lines = pa.array([b"one\n", b"\xff\n"], pa.binary())
    texts, misfits = parser_of(AnyLines(), StructType.fromDDL("value STRING")).parse(lines)
    assert (texts.column("value").to_pylist(), misfits.tolist()) == (["one", None], [False, True])
    content, misfits = parser_of(AnyLines(), StructType.fromDDL("value BINARY")).parse(lines)
    assert (content.column("value").to_pylist(), misfits.tolist()) == ([b"one", b"\xff"], [False, False])
