"""Rows become the JSON of Spark's `to_json`, for every type that JSON can hold."""

import json
import math
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from coranto.errors import InvalidInput
from coranto.messages.columnar_json import object_texts
from coranto_consumers.spark.outputs.staging import EXACT
from coranto_consumers.spark.sink.message_rows import require_encodable

INNER = StructType().add("p", IntegerType()).add("t\"'\\é", StringType())
SCHEMA = (
    StructType()
    .add("byte", ByteType())
    .add("short", ShortType())
    .add("int", IntegerType())
    .add("long", LongType())
    .add("double", DoubleType())
    .add("float", FloatType())
    .add("yes no", BooleanType())
    .add("text", StringType())
    .add("data", BinaryType())
    .add("decimal", DecimalType(38, 18))
    .add("small", DecimalType(5, 0))
    .add("day", DateType())
    .add("at", TimestampType())
    .add("local", TimestampNTZType())
    .add("list", ArrayType(DoubleType()))
    .add("lists", ArrayType(ArrayType(StringType())))
    .add("map", MapType(StringType(), DecimalType(20, 3)))
    .add("maps", MapType(StringType(), INNER))
    .add("inner", INNER)
    .add("inners", ArrayType(INNER))
    .add("nothing", NullType())
)
NASTY = ["", "plain", 'q"u\\o', "\n\r\t\b\f", "\x00\x01\x1f", "é\u2028😀\x7f", "{}", "null", "a" * 300]


def value(rng: random.Random, kind):
    if rng.random() < 0.2:
        return None
    match kind:
        case ByteType() | ShortType() | IntegerType() | LongType():
            bits = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}[type(kind)] - 1
            return rng.choice([0, -1, 2**bits - 1, -(2**bits), rng.randrange(2**bits)])
        case DoubleType():
            return rng.choice([0.0, -0.0, 1.0, 1e300, -5e-324, 0.1, math.nan, math.inf, -math.inf, rng.random()])
        case FloatType():
            return rng.choice([0.0, 1.5, 3.4e38, 2.5e-30, math.nan, math.inf, 0.25])
        case BooleanType():
            return rng.random() < 0.5
        case StringType():
            return rng.choice(NASTY)
        case BinaryType():
            return rng.randbytes(rng.randrange(5))
        case DecimalType():
            digits = "".join(rng.choice("0123456789") for _ in range(kind.precision))
            return Decimal(f"{rng.choice(['', '-'])}{digits}").scaleb(-kind.scale, context=None)
        case DateType():
            return rng.choice([date(1, 1, 1), date(9999, 12, 31), date(2020, 2, 29)])
        case TimestampType():
            return datetime(1950, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randrange(10**16))
        case TimestampNTZType():
            return datetime(1950, 1, 1) + timedelta(microseconds=rng.randrange(10**16))
        case ArrayType():
            return [value(rng, kind.elementType) for _ in range(rng.randrange(4))]
        case MapType():
            return {name: value(rng, kind.valueType) for name in rng.sample(NASTY, rng.randrange(4))}
        case StructType():
            return {field.name: value(rng, field.dataType) for field in kind.fields}
    return None


def parsed(text: str | bytes):
    """Return a text's fields in order, with exact decimals and other numbers as doubles."""
    exact = dict(json.loads(text, parse_float=Decimal, parse_int=Decimal, object_pairs_hook=list))
    decimals = {name: exact[name] for name in ("decimal", "small", "map") if name in exact}
    return json.loads(text, parse_float=float, object_pairs_hook=list), decimals


def test_rows_become_the_json_of_to_json(spark):
    rng = random.Random(3)
    rows = [value(rng, SCHEMA) or {} for _ in range(300)]
    frame = spark.createDataFrame(
        pa.Table.from_pylist(rows, schema=to_arrow_schema(SCHEMA, timezone="UTC")), schema=SCHEMA
    )

    wanted = frame.select(F.to_json(F.struct("*"), dict(EXACT))).toArrow().column(0).to_pylist()
    found = []
    for batch in frame.toArrow().to_batches():
        for begin in range(0, batch.num_rows, 70):  # Parts of batches have offsets into their columns.
            part = batch.slice(begin, 70)
            found += object_texts(SCHEMA.names, part.columns, part.num_rows).to_pylist()

    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert parsed(ours) == parsed(theirs)


def test_rows_without_columns_are_empty_objects():
    assert object_texts([], [], 2).to_pylist() == [b"{}", b"{}"]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (StructType().add("a", VariantType()), "a is variant, which JSON cannot express"),
        (StructType().add("a", ArrayType(DayTimeIntervalType())), r"a\[\] is interval day to second"),
        (StructType().add("a", StructType().add("b", MapType(IntegerType(), StringType()))), "a.b is map<int,string>"),
        (StructType().add("a", StringType()).add("a", StringType()), "the row has two fields 'a'"),
    ],
)
def test_types_that_json_cannot_hold_are_refused(kind, problem):
    with pytest.raises(InvalidInput, match=problem):
        require_encodable(kind, "")
