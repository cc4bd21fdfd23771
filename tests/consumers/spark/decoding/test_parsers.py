"""Columns of messages in framings other than lines of JSON."""

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DoubleType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from coranto.errors import InvalidInput
from coranto_consumers.journals.framings import AnyLines, CsvRecords, FixedRecords
from coranto_consumers.spark.decoding.parsers import parser_of, text_columns
from tests.sampling import examples


@pytest.mark.parametrize(
    ("framing", "schema", "problem"),
    [
        (CsvRecords(3), "a STRING", "rows of CSV have 2 columns and their UUID .* and 1 are declared"),
        (CsvRecords(3), "a STRING, b DATE", "column 'b' is date, and rows of CSV are parsed into STRING"),
        (AnyLines(), "line STRING", "lines have one column, value BINARY or STRING, and not line"),
        (FixedRecords(), "value STRING", "frames without a messageType have one column, value BINARY"),
    ],
)
def test_columns_missing_from_messages_are_refused(spark, framing, schema, problem):
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


TYPES = (StringType, BooleanType, ByteType, ShortType, IntegerType, LongType, DoubleType)
TYPED = StructType()
for kind in TYPES:
    TYPED.add(kind.__name__, kind())
FIELDS = st.one_of(
    st.sampled_from(["", "true", "FALSE", "ſalse", "+1", "-0", "007", "1.", ".5", "-.5", "+", "1e400", "NaN", "-Inf"]),
    st.sampled_from(
        ["1_0", "0x1", " 1", "1 ", "\ufeff", "\0", "--1", "1.5.2", "a\u2028b", "N/A", "null", "١", "Infinity"]
    ),
    st.integers(-(1 << 65), 1 << 65).map(str),
    st.integers(-200, 200).map(str),
    st.floats().map(repr),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda x: f"{x:+.40f}"),
    st.text(max_size=3).filter(lambda text: "\n" not in text and '"' not in text),
)


@given(st.lists(st.lists(FIELDS, min_size=8, max_size=8) | st.lists(FIELDS, min_size=7, max_size=9), max_size=6))
@settings(max_examples=examples(300), deadline=None)
@example([["u", "a", "true", "1", "2", "3", "4", "5.5"], ["u", *[""] * 7], ["u", "b", "no", "128", "1", "1", "1", "1"]])
def test_rows_of_csv_parsed_together_have_the_values_of_single_rows(rows):
    parser = parser_of(CsvRecords(8), TYPED)
    messages = [",".join(row).encode("utf-8", "surrogatepass") for row in rows]

    table, misfits = parser.parse(pa.array([each + b"\n" for each in messages], pa.binary()))

    wanted = [parser.values_of(each) for each in messages]
    assert repr([tuple(row.values()) for row in table.to_pylist()]) == repr([tuple(values) for values, _ in wanted])
    assert misfits.tolist() == [not fits for _, fits in wanted]


def test_plain_rows_are_parsed_by_columns_and_others_are_not():
    plain = pa.array([b"u,1,x\n", b"u,,\n"], pa.binary())
    found = text_columns(plain, 3, 0)
    assert found is not None
    assert [column.to_pylist() for column in found] == [["1", ""], ["x", ""]]
    for row in (b'u,"1",x\n', b"u,1\n", b"u,1,x,y\n", b"u,\xff,x\n", b"\xef\xbb\xbfu,1,x\n", b"u,1,a\rb\n"):
        assert text_columns(pa.array([row], pa.binary()), 3, 0) is None


def test_lines_are_texts_or_bytes(spark):
    lines = pa.array([b"one\n", b"\xff\n"], pa.binary())
    texts, misfits = parser_of(AnyLines(), StructType.fromDDL("value STRING")).parse(lines)
    assert (texts.column("value").to_pylist(), misfits.tolist()) == (["one", None], [False, True])
    content, misfits = parser_of(AnyLines(), StructType.fromDDL("value BINARY")).parse(lines)
    assert (content.column("value").to_pylist(), misfits.tolist()) == ([b"one", b"\xff"], [False, False])
