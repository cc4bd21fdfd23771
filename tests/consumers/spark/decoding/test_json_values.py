"""Dates, times, decimals and nested values of lines match Spark's own parsers."""

import json
import math
import random

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from coranto.errors import InvalidInput
from coranto.messages import column_parser
from coranto_consumers.spark.decoding.json_columns import ColumnParser
from coranto_consumers.spark.decoding.json_times import zone_of
from coranto_consumers.spark.decoding.json_values import MAX_DIGITS, LineValues
from tests.sampling import examples

LINES = examples(5000)
ZONE = "Europe/Berlin"
DAYS = [
    "2024-01-05",
    "2024-02-29",
    "2023-02-29",
    "1999-12-31",
    "1582-10-10",
    "2024-1-5",
    "2024-13-01",
    "2024",
    "2024-02",
]
DAYS += ["0000-01-01", "-0044-03-15", "+2024-01-05", "12345-06-07", "9999999-01-01", "5881580-07-11", "-5877641-06-24"]
DAYS += [
    " 2024-01-05\t",
    "2024-01-05 x",
    "2024-01-05Tx",
    "2024-01-05x",
    "2024-",
    "202-01-01",
    "2024-01-005",
    "\x7f2024",
]
DAYS += [
    "5",
    "-5",
    "12",
    "99999999",
    "-99999999",
    "-2147483648",
    "2147483648",
    "１２",
    "2024-01-05GMT",
    "GMT",
    "1_0",
    "𝟏",
]
CLOCKS = [
    "00:00:00",
    "23:59:59",
    "10:11:12.5",
    "10:11:12.123456",
    "10:11:12.1234567",
    "10:11",
    "10",
    "1:2:3",
    "24:00:00",
]
CLOCKS += ["10:60:00", "10:11:60", "10:11:12.", "10:", "010:11:12", "02:30:00", "", "10:11:12.5.5"]
ZONES = [
    "",
    "",
    "",
    "Z",
    "Z",
    "+01:00",
    "-09:30",
    "+1",
    "+1:30",
    "+01:3",
    "+0130",
    "+19:00",
    "+18:00",
    "UTC",
    "GMT",
    "UT",
]
ZONES += [
    " Europe/Paris",
    "America/New_York",
    " EST",
    "PST",
    "Nowhere/Else",
    "utc",
    "GMT+01:00",
    "UTC+1",
    "x",
    "../UTC",
]
NUMBERS = [
    "0",
    "-0",
    "1",
    "1.005",
    "-1.015",
    "0.1",
    "9999.99",
    "9999.994",
    "9999.995",
    "10000",
    "-9999.999",
    "1e2",
    "1.5e-3",
]
NUMBERS += ["1234567890122345678901234567890.5", "9" * 38 + ".5", "9" * 76, "1e75", "1e76", "-1e66", "1e39"]
NUMBERS += ["1E+3", "1e400", "1e-400", "12345678901234567890.0123456789", "1e28", "9" * 28, "9" * 28 + ".99999999999"]
NUMBERS += [
    "16777217",
    "1.00000005960464477539062500001",
    "3.4028235677973366e38",
    "3.4028235e38",
    "1e-46",
    "7e-46",
    "1.4e-45",
]
NUMBERS += [
    "5",
    "-7",
    "1700000000",
    "9223372036854775807",
    "9223372036854775808",
    "1.0",
    "NaN",
    "Infinity",
    "-0.0",
    "1" * 40,
]
TEXTS = [
    *map(json.dumps, [*NUMBERS, "1,000.5", "1,00", " 1", "+1", ".5", "5.", "x", "", "1e5", "1e99999999999", "٣", "-"])
]
OTHERS = ["null", "true", "{}", "[]", '{"x":1}', "[1]", '[{"x":1}]', '"text"', '{"x":"no","s":1.50}', "[null]"]
OTHERS += [
    '"#5"',
    '"{\\"x\\":1}"',
    '"\\\\"',
    '{"\\"":"\\\\\\""}',
    '{ "k" : 1 , "v" : [ 2 ] }',
    "{ }",
    "[ ]",
    '{"a":{"a":{}}}',
]
OTHERS += ['"aGk="', '"aGk"', '" aG kh "', '"aG=="', '"aGk=aGkh"', '"a\\/\\n+"', '"aGl=\\n"']
PLAIN = {
    "d": ['"2024-05-06"'],
    "t": ['"2024-05-06T07:08:09.5Z"', '"2024-05-06 07:08:09+02:00"'],
    "n": ['"2024-05-06T07:08:09.25"'],
    "c": ["12.5", '"7.25"'],
    "e": ["12345678901234567890.5"],
    "f": ["0.1", "2.5"],
    "a": ["[1,2,null]", "[]"],
    "g": ['[{"x":1,"d":"2024-05-06","y":0.5},null,{}]', "[]"],
    "r": ['{"x":5,"s":"t","b":true,"t":"2024-05-06T07:08:09Z","g":[1.5]}', '{"s":null,"other":[1]}'],
    "m": ['{"a":{"x":1,"a":["b",null]},"b":null}', "{}"],
    "o": ['{"a":"2024-05-06","a":"2024-05-07"}', '{"b": "2024-02-29", "c" : null}'],
    "q": ['[{"a":1.5},{},null]', '[{"b":-0,"c":"1"}]'],
    "s": ['"text"', '{"a":[1.50,"\\"x\\\\"]}', "12", "true"],
    "v": ['"aGkh"', '"aGk="', '""'],
}
WIDE = """d DATE, t TIMESTAMP, n TIMESTAMP_NTZ, c DECIMAL(6,2), e DECIMAL(38,10), f FLOAT, a ARRAY<INT>,
    g ARRAY<STRUCT<x: INT, d: DATE, y: DOUBLE>>,
    r STRUCT<x: BIGINT, s: STRING, b: BOOLEAN, t: TIMESTAMP, g: ARRAY<DECIMAL(4,1)>>, s STRING, v BINARY"""
MAPS = """m MAP<STRING, STRUCT<x: INT, s: STRING, a: ARRAY<STRING>>>, o MAP<STRING, DATE>, d DATE,
    q ARRAY<MAP<STRING, DOUBLE>>, t TIMESTAMP, s STRING"""


NASTY = [
    *("NaN", "-NaN", "nan", "Inf", "-Inf", "INF", "Infinity", "-Infinity", "-infinity", '"+INF"', '"-INF"', '"NaN"'),
    *("00", "-01", "+1", "1.", ".5", "1e", "0x10", "1_0", "--1", "1e+400", "-1e400", "1e-9999999999999", "1e5.5"),
    *("9" * 1000, "9" * 1001, "-" + "9" * 1000, "9" * 5000, "0." + "1" * 999, "0." + "1" * 1000, "1" * 998 + "e-99"),
    *("0e2147483647", "0e2147483648", "0.0e-2147483647", "1e-1000001", "1e-3000000", '"0e-2147483648"', "1e0000000003"),
    *("9999.994999999999999999999", "99999e-1", "0.5e-2", "-4.9999e-3", "9.99e37", "9" * 38 + "e-5", "1" * 76 + "e-76"),
    *(
        '"\\ud83d\\ude00"',
        '"\\ud83d"',
        '"\\ude00\\ud83d"',
        '"\\u0000"',
        '"\\u00"',
        '"\\x41"',
        '"a\tb"',
        '"\x00"',
        '"\ufeff"',
    ),
    *("[[1,null],null]", "[1,]", "[,1]", "[1 2]", '{"a":1,}', '{"a" 1}', '{"a":1 "b":2}', '{"a":1,"b"}', "{1:1}"),
    *(
        '{"a":null,"a":1}',
        '{"x":1,"x":"no"}',
        '{"X":1,"D":"2024-05-06"}',
        '{"":1}',
        '{"k":1,"v":2}',
        '[{"k":"a","v":1}]',
    ),
    *("nul", "True", "undefined", "", "\t1\t", "\r1", "\xa01", "/**/1", "1//", "\ufeff1"),
    *(
        "[" * 900 + "]" * 900,
        "[" * 1500 + "]" * 1500,
        '{"a":' * 1100 + "1" + "}" * 1100,
        "[" * 1001,
        '"' + "[" * 2001 + '"',
    ),
]
"""Values that break parsers: too long, too deep, not JSON, or unusual JSON."""
NASTY_TIMES = [
    *("-0001-01-01", "+10000-01-01", "0000-02-29", "1582-10-05", "294247-01-10T04:00:54.775807Z", "2024-127"),
    *("294247-01-10T04:00:54.775808Z", "-290308-12-21T19:59:05.224191Z", "2016-12-31T23:59:60Z", "2024-05-06T24:00"),
    *("2024-03-31T02:30:00", "2024-10-27T02:30:00", "2024-05-06T07:08:09+18:01", "2024-05-06T07:08:09+01:00:30"),
    *("2024-05-06T07:08:09+02:00[Europe/Paris]", "2024-05-06t07:08:09z", "2024-05-06T07:08:09 EST5EDT", "now", "epoch"),
    *("1883-11-18T12:00:00 America/New_York", "2024-05-06T07:08:09 SystemV/PST", "2024-05-06T07:08:09\u221201:00"),
]
NASTY += map(json.dumps, NASTY_TIMES)
WHOLE = [
    *("{", "}", "{}{}", '[{"d":"2024-05-06"}]', "null", '"d"', "1", "{} x", "\ufeff{}", "{\x00}", "\x00", "{]"),
    *(
        '{"d"}',
        '{"d":}',
        "{,}",
        '{"s":1,,"d":2}',
        '{"s":"a}',
        '{"m":[}',
        '{"m":{]}',
        '{"s":"\\"}',
        "{'s':1}",
        '{"s"\x0b:1}',
    ),
    *('{"S":"x","D":"2024-05-06"}', '{"s":1,"s":{"x":1},"s":null}', '{"\\u0073":{"a":[1]}}', '{"s":"a"}\r', "{\r}"),
]
"""Lines that are not objects, or are unusual objects."""


def random_time(rng: random.Random) -> str:
    return rng.choice(DAYS) + rng.choice(["T", " ", "  "]) + rng.choice(CLOCKS) + rng.choice(ZONES)


def random_scalar(rng: random.Random) -> str:
    match rng.randrange(7):
        case 6:
            return rng.choice(NASTY)
        case 0:
            return json.dumps(rng.choice(DAYS))
        case 1 | 2:
            return json.dumps(random_time(rng))
        case 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice(NUMBERS)
    return rng.choice(OTHERS)


def random_value(rng: random.Random, depth: int = 0) -> str:
    chance = rng.random()
    if depth < 3 and chance < 0.2:
        return "[" + ", ".join(random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))) + "]"
    if depth < 3 and chance < 0.45:
        names = [
            rng.choice(["x", "d", "y", "s", "b", "t", "g", "a", "z", "c", "\\u0073", "k"])
            for _ in range(rng.randint(0, 4))
        ]
        return "{" + ", ".join(f'"{name}":{random_value(rng, depth + 1)}' for name in names) + "}"
    return random_scalar(rng)


def random_line(rng: random.Random, names: list[str]) -> str:
    if rng.random() < 0.02:
        return rng.choice(WHOLE)
    chosen = [rng.choice([*names, "z"]) for _ in range(rng.randint(0, 3))]
    values = [rng.choice(PLAIN[name]) if name in PLAIN and rng.random() < 0.7 else random_value(rng) for name in chosen]
    before, after = rng.choice(["", "", " ", "  "]), rng.choice(["", "", " "])
    fields = (f'"{name}"{after}:{before}{value}{after}' for name, value in zip(chosen, values, strict=True))
    return "{" + f",{before}".join(fields) + "}"


def is_json(line: str) -> bool:
    """Return True for JSON by RFC 8259, extended by Spark's words that Python has, too."""
    try:
        return isinstance(json.loads(line, parse_int=str), dict)
    except (ValueError, RecursionError):
        return False


def common_line(rng: random.Random, names: list[str]) -> str:
    """Return True for a line of JSON of common size. Of other lines, Spark also returns the values before the error."""
    while len(line := random_line(rng, names)) > MAX_DIGITS or not is_json(line):
        pass
    return line


def comparable(value: pa.Scalar) -> object:
    """Return a comparable value: dates and times beyond Python's as numbers, maps with equal names."""
    if not value.is_valid:
        return None
    if isinstance(value, pa.MapScalar):
        return [(key, comparable(each)) for key, each in zip(*map_parts(value), strict=True)]
    if isinstance(value, pa.ListScalar):
        return [comparable(each) for each in value.values]
    if isinstance(value, pa.StructScalar):
        return {name: comparable(each) for name, each in value.items()}
    if isinstance(value, pa.Date32Scalar | pa.TimestampScalar):
        return value.value
    plain = value.as_py()
    if isinstance(plain, float):
        return "NaN" if math.isnan(plain) else (plain, math.copysign(1, plain))
    return plain


def map_parts(value: pa.MapScalar) -> tuple[list[str], list[pa.Scalar]]:
    entries = value.values
    return entries.field(0).to_pylist(), list(entries.field(1))


def rows_of(table: pa.Table) -> list[tuple[object, ...]]:
    return list(zip(*([comparable(each) for each in column] for column in table.columns), strict=True))


@pytest.mark.parametrize("columns", [WIDE, MAPS])
def test_values_match_sparks_parsers(spark, tmp_path, monkeypatch, columns):
    monkeypatch.setattr(column_parser, "_FEW_LINES", 1)  # So that no line is doubtful because of its neighbours.
    rng = random.Random(7)
    schema = StructType.fromDDL(columns)
    lines = [random_line(rng, schema.names) for _ in range(LINES)]
    (tmp_path / "lines").write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    asked = f"{columns}, corrupt STRING"
    options = {"columnNameOfCorruptRecord": "corrupt", "timeZone": ZONE}
    files = spark.read.schema(asked).options(**options, lineSep="\n").json(str(tmp_path / "lines")).cache().toArrow()

    table, doubtful = ColumnParser(schema, zone_of(ZONE)).parse(pa.array([f"{line}\n" for line in lines], pa.binary()))

    assert table.schema == to_arrow_schema(schema, timezone="UTC")
    if columns == MAPS:
        assert doubtful.all()
    else:
        assert 0.2 < doubtful.mean() < 0.9  # Both ways are tried.
    read = LineValues(schema, zone_of(ZONE))
    assert not any(read(blank)[1] for blank in (b"", b" ", b"\r", b"[]"))  # Spark's reader of files skips them.
    one_by_one = [read(line.encode()) for line in lines]
    typed = pa.Table.from_arrays(
        [
            pa.array(each, field.type)
            for each, field in zip(zip(*(row for row, _ in one_by_one), strict=True), table.schema, strict=True)
        ],
        schema=table.schema,
    )
    found = zip(rows_of(table), rows_of(typed), doubtful, strict=True)
    wrong = []
    for line, (quick, slow, left), (_, fits), file in zip(lines, found, one_by_one, rows_of(files), strict=True):
        *values, corrupt = file
        if not fits and not is_json(line):
            # Spark may accept it, or keep the fields before the error. Here it has no values.
            if not left or any(value is not None for value in slow):
                wrong.append((line, slow, file))
            continue
        if corrupt is not None and not fits and ('"v"' in line or len(line) > MAX_DIGITS):
            continue  # Spark's reader loses its position in the line after a text that is not base64, or a long number.
        if list(slow) != values or fits != (corrupt is None):
            wrong.append((line, slow, file))
        elif not left and (quick != slow or not fits):
            wrong.append((line, quick, file))
    assert not wrong, f"{len(wrong)}, such as {[[f'{part}'[:300] for part in each] for each in wrong[:8]]}"


def test_a_time_without_a_zone_needs_one(spark):
    read = LineValues(StructType.fromDDL("t TIMESTAMP"))
    assert read(b'{"t":"2024-01-05T10:11:12Z"}') == ([1_704_449_472_000_000], True)
    with pytest.raises(InvalidInput, match=r"option timeZone.*names no time zone"):
        read(b'{"t":"2024-01-05T10:11:12"}')


@pytest.mark.parametrize("kind", ["INTERVAL DAY", "MAP<INT, INT>", "VARIANT", "ARRAY<TIME>"])
def test_types_that_only_spark_reads_are_refused(spark, kind):
    with pytest.raises(InvalidInput, match=r"column 'x' has .*which lines are not parsed into"):
        LineValues(StructType.fromDDL(f"x {kind}"))
