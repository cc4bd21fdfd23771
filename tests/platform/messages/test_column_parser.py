"""Lines are parsed into columns independently: a doubtful line does not affect others."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coranto.messages import column_parser
from coranto.messages.column_parser import LineParser, is_text, without_heads
from coranto.messages.columnar_lines import read_json_lines
from coranto.messages.framing import JsonLines

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string()), ("f", pa.float64())])
GOOD = st.fixed_dictionaries(
    {},
    optional={
        "n": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        "s": st.none() | st.text(st.characters(codec="utf-8"), max_size=5),
        "f": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "x": st.lists(st.integers()),
    },
)
ODD = (
    b"",
    b"null",
    b"{} {}",
    b'{"n":"1"}',
    b'{"n":1.5}',
    b'{"s":"\xff"}',
    b'{"n":1',
    b'{"f":NaN}',
    b'{"f":\rNaN}',
    b'{"f":\r-Inf}',
    b'x{"n":1}',
    b"{,}",
)


@given(st.lists(GOOD.map(lambda each: json.dumps(each).encode()) | st.sampled_from(ODD), max_size=150))
def test_each_line_has_its_own_values_or_is_doubtful(lines):
    parser = LineParser(SCHEMA)
    table, doubtful = parser.parse(pa.array([line + b"\n" for line in lines], pa.binary()))
    for line, row, doubted in zip(lines, table.to_pylist(), doubtful.tolist(), strict=True):
        if line in ODD:
            assert doubted
        if not doubted:
            expected = json.loads(line)
            assert row == {name: expected.get(name) for name in SCHEMA.names}
        elif line not in ODD:
            alone = parser.parse_one(line)
            assert alone is not None
            assert alone.num_rows == 1


def lines_with(misfits: dict[int, bytes]) -> pa.Array:
    return pa.array([misfits.get(n, b'{"n":%d}' % n) + b"\n" for n in range(600)], pa.binary())


@given(st.dictionaries(st.integers(0, 599), st.sampled_from([b'{"n":"x"}', b'{"n":[]}', b'{"n":1.5}', b'{"n":1'])))
@example({200: b'{"n":"x"}', 201: b'{"n":"x"}', 400: b'{"n":1.5}', 550: b'{"n":1'})
def test_values_between_misfits_stay_in_their_rows(misfits):
    parser = LineParser(SCHEMA)
    table, doubtful = parser.parse(lines_with(misfits))
    assert doubtful[list(misfits)].all()
    assert table.column("n").to_pylist() == [None if doubtful[n] else n for n in range(600)]


def test_only_misfits_are_doubtful_among_many_lines():
    misfits = {99: b'{"n":"x"}', 200: b"{,}", 333: b'{"n":{}}', 599: b'{"n":true}'}
    _, doubtful = LineParser(SCHEMA).parse(lines_with(misfits))
    assert np.flatnonzero(doubtful).tolist() == list(misfits)


@pytest.mark.parametrize("reported", [b"0", b"17", b"400", b"598", b"9999"])
def test_a_wrong_row_number_from_pyarrow_does_not_change_the_result(reported, monkeypatch):
    wrong = re.compile("(.*)")
    monkeypatch.setattr(column_parser, "_AT_ROW", SimpleNamespace(search=lambda _: wrong.match(reported.decode())))
    misfits = {120: b'{"n":"x"}', 130: b'{"n":"x"}', 500: b'{"n":{}}'}
    table, doubtful = LineParser(SCHEMA).parse(lines_with(misfits))
    assert doubtful[list(misfits)].all()
    assert table.column("n").to_pylist() == [None if doubtful[n] else n for n in range(600)]


UUID = "83fc2f81-cc5f-11e9-8002-010203040506"
HEAD = f'{{"_meta":{{"uuid":"{UUID}"}},'.encode()
HEADS = (
    HEAD,
    HEAD.replace(b'"}', b'" }'),
    HEAD.replace(b'"}', b'","n":7}'),
    HEAD.replace(b'"}', b'"'),
    HEAD.upper().replace(b"_META", b"_meta").replace(b"UUID", b"uuid"),
    HEAD + b'"n":5,',
    HEAD + b" ",
    b"{",
)
TAILS = (b'"n":1}', b'"n":1,"s":"x"}', b'"_meta":{"uuid":7},"f":0.5}', b'"n":}', b'"n":1', b"}", b"n}", b'":1}', b"")


@given(
    st.lists(st.builds(bytes.__add__, st.sampled_from(HEADS), st.sampled_from(TAILS)), max_size=100), st.integers(0, 9)
)
def test_lines_have_the_same_values_without_the_uuid_field(lines, skipped):
    content = pa.array([line + b"\n" for line in lines], pa.binary()).slice(skipped)
    whole = b"".join(content.to_pylist())
    found = read_json_lines(JsonLines(tolerant=True), "j", whole, 0)
    shorter = without_heads(content, found.headed, JsonLines().head_bytes)
    assert shorter.to_pylist() == [
        b"{" + line[len(HEAD) :] if line.startswith(HEAD + b'"') else line for line in content.to_pylist()
    ]
    parser = LineParser(SCHEMA)
    (table, doubtful), (expected, expected_doubtful) = parser.parse(shorter), parser.parse(content)
    assert doubtful.tolist() == expected_doubtful.tolist()
    assert table.equals(expected)


def test_non_numeric_number_words_are_doubtful_after_any_whitespace():
    parser = LineParser(SCHEMA)
    for line in (b'{"f":NaN}', b'{"f":\rNaN}', b'{"f":\r-Inf}', b'{"f": \t\r Inf}'):
        assert parser.parse_one(line) is not None, "pyarrow takes it for a number"
        assert parser.parse(pa.array([line + b"\n"], pa.binary()))[1].all()


@pytest.mark.parametrize(
    "number",
    ["1e-3000000", '"1E-3000000"', "0e-0039", "1e-2147483648", "0." + "0" * 30 + "e-9", '"-.5e-100"', " 1e-99"],
)
@pytest.mark.parametrize("nested", ["{}", "[[{}]]", '[{{"x":{}}}]'])
def test_a_decimal_with_a_small_exponent_is_doubtful_because_it_aborts_arrow(number, nested):
    kind = pa.decimal128(6, 2)
    types = {"{}": kind, "[[{}]]": pa.list_(pa.list_(kind)), '[{{"x":{}}}]': pa.list_(pa.struct([("x", kind)]))}
    parser = LineParser(pa.schema([("c", types[nested]), ("s", pa.string())]))
    line = f'{{"s":"e-","c":{nested.format(number)}}}'.encode()
    table, doubtful = parser.parse(pa.array([b'{"s":"1e-5"}\n', line + b"\n", b'{"s":"x-"}\n'], pa.binary()))
    assert doubtful.tolist() == [False, True, False]
    assert table.column("s").to_pylist() == ["1e-5", None, "x-"]
    assert parser.parse_one(line) is None


def test_decimals_with_common_exponents_are_parsed():
    parser = LineParser(pa.schema([("c", pa.decimal128(20, 10)), ("d", pa.float64())]))
    lines = [b'{"c":12.5e-5,"d":1e-7}\n', b'{"c":"1e-10"}\n']
    table, doubtful = parser.parse(pa.array(lines, pa.binary()))
    assert not doubtful.any()
    assert table.column("c").to_pylist() == [Decimal("0.0001250000"), Decimal("1e-10")]


def test_a_line_that_does_not_fit_the_schema_has_no_values():
    parser = LineParser(SCHEMA)
    assert parser.parse_one(b'{"n":"1"}') is None
    assert parser.parse_one(b'{"n":1,"other":[]}').to_pylist() == [{"n": 1, "s": None, "f": None}]
    assert is_text("é".encode())
    assert not is_text(b"\xff")
