"""Registered types as columns of Spark, and reads of earlier messages by later versions."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import DayTimeIntervalType, StructField, StructType, VarcharType, VariantType

from coranto.errors import InvalidInput
from coranto.messages import JsonLines
from coranto.types import CsvForm, FixedForm, JsonForm, MessageType, parse_fields
from coranto.types.arrow import arrow_schema
from coranto.types.compatibility import Compatibility, problems_of
from coranto.types.kinds import MapKind, PlainKind, format_fields, kinds_in
from coranto.types.writing import require_message
from coranto_consumers.spark.decoding.parsers import parser_of
from coranto_consumers.spark.decoding.type_columns import fields_of_spark, spark_schema
from coranto_consumers.spark.options.message_types import read_framing
from tests.platform.types.protobufs import F, shop
from tests.platform.types.strategies import FIELDS, JSON_FIELDS, json_messages, later_fields


@given(FIELDS)
def test_columns_are_nullable_fields_as_in_arrow(fields):
    from pyspark.sql.pandas.types import to_arrow_schema

    schema = spark_schema(fields)
    assert spark_schema(fields_of_spark(schema)) == schema
    assert all(field.nullable for field in schema.fields)
    if not any(isinstance(kind, MapKind) for _, kind in kinds_in(fields)):  # Names of their parts differ.
        assert arrow_schema(fields).equals(to_arrow_schema(schema, timezone="UTC"))


def test_texts_with_a_length_are_texts_and_other_types_are_refused():
    assert fields_of_spark(StructType([StructField("a", VarcharType(3), False)])) == parse_fields("a STRING NOT NULL")
    for kind in (DayTimeIntervalType(), VariantType()):
        with pytest.raises(InvalidInput, match=r"schema: a is .*, which message types do not support: cast it"):
            fields_of_spark(StructType([StructField("a", kind)]))


def unfit(fields, line: bytes, framing=None) -> bool:
    """Return True if a message does not fit columns, parsed column-wise or alone."""
    parser = parser_of(framing or JsonLines(), spark_schema(fields))
    table, misfits = parser.parse(pa.array([line, line]))
    assert table.num_rows == 2
    alone = not parser.values_of(line[:-1])[1]
    assert misfits.tolist() == [alone, alone], "a message that is parsed column-wise fits alone"
    return alone


@given(st.data())
def test_all_valid_messages_of_publishers_are_read_without_a_misfit(data):
    fields = data.draw(JSON_FIELDS)
    message = data.draw(json_messages(fields))
    require_message(message, fields)
    assert not unfit(fields, JsonLines(None).marshal(message, ""))


@given(st.data())
def test_a_later_version_reads_messages_of_an_earlier_one_without_a_misfit(data):
    old = data.draw(JSON_FIELDS)
    new = data.draw(later_fields(old))
    types = [MessageType("a", JsonForm("/\0/place"), fields) for fields in (new, old)]
    assert problems_of(*types, Compatibility.BACKWARD, 1) == ()
    assert not unfit(new, JsonLines(None).marshal(data.draw(json_messages(old)), ""))


@given(st.data())
def test_any_compatible_version_reads_messages_of_an_earlier_one(data):
    old, new = data.draw(JSON_FIELDS), data.draw(JSON_FIELDS)
    types = [MessageType("a", JsonForm("/\0/place"), fields) for fields in (new, old)]
    if problems_of(*types, Compatibility.BACKWARD, 1) == ():
        assert not unfit(new, JsonLines(None).marshal(data.draw(json_messages(old)), ""))


INTEGERS = {"TINYINT": 2**7, "SMALLINT": 2**15, "INT": 2**31, "BIGINT": 2**63}


@given(st.sampled_from([*INTEGERS]), st.sampled_from([*INTEGERS, "DOUBLE"]), st.data())
def test_wider_columns_of_csv_read_rows_of_an_earlier_version(old, new, data):
    types = [MessageType("a", CsvForm(None), parse_fields(f"n {kind}, s STRING")) for kind in (new, old)]
    if problems_of(*types, Compatibility.BACKWARD, 1) == ():
        number = data.draw(st.integers(-INTEGERS[old], INTEGERS[old] - 1))
        assert not unfit(types[0].fields, f"{number},x\n".encode(), read_framing(types[0]))


@given(st.integers(-(2**31), 2**31 - 1), st.text(max_size=3))
def test_a_later_protobuf_message_reads_an_earlier_one(number, text):
    old_form = FixedForm.of(shop((2, "n", F.TYPE_INT32), (3, "text", F.TYPE_STRING)), "shop.Order")
    new_form = FixedForm.of(shop((2, "n", F.TYPE_INT64), (4, "more", F.TYPE_BOOL)), "shop.Order")
    old = MessageType("o", old_form, parse_fields("n INT, text STRING"))
    new = MessageType("o", new_form, parse_fields("n BIGINT, more BOOLEAN"))
    assert problems_of(new, old, Compatibility.BACKWARD, 1) == ()
    payload = read_framing(old).kind()(n=number, text=text).SerializeToString()
    parser = parser_of(read_framing(new), spark_schema(new.fields))
    assert parser.values_of(payload) == ([number, False], True)


def test_all_types_of_fields_have_columns():
    text = ", ".join(f"f{n} {kind.value}" for n, kind in enumerate(PlainKind))
    assert format_fields(fields_of_spark(spark_schema(parse_fields(text)))) == text
