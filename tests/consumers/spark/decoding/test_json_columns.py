"""Lines of any content, parsed by workers, have the values of Spark's own parsers."""

import json
import math
import random
import struct

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import DateType, FloatType, IntegerType, StringType, StructField, StructType, TimestampType

from coranto.messages import column_parser
from coranto_consumers.spark.decoding.json_columns import TYPES, ColumnParser
from coranto_consumers.spark.decoding.json_values import LineValues
from tests.sampling import examples

COLUMNS = "s STRING, b BOOLEAN, y TINYINT, h SMALLINT, i INT, l BIGINT, d DOUBLE"
LINES = examples(8000)
TEXTS = ["x", "", "NaN", "nan", "Infinity", "+Infinity", "-Infinity", "INF", "+INF", "-INF", "12", "true", 'é\n\t"\\/']
VALUES = [
    *map(json.dumps, TEXTS),
    *('"\\ud83d\\ude00"', '"\\ud800"', '"\\udc00x"', '"\\u0000"', '"\\/"', '"a\tb"', '"\x01"', '"\\x"', "'x'"),
    *("null", "true", "false", "tru", "NaN", "Infinity", "-Infinity", "INF", "-INF", "+INF", "Inf", "-NaN"),
    *("0", "-0", "-0.0", "0.0", "1", "+1", "01", "1.", ".5", "1.0", "1e2", "1E2", "1.50", "0.1"),
    *(str(side * (1 << bits) + by) for bits in (7, 8, 15, 31, 53, 63) for side in (1, -1) for by in (-1, 0, 1)),
    *("9" * 30, "9" * 400, "-" + "9" * 400, "1" * 20 + ".5", "1e400", "-1e400", "1e-400", "5e-324"),
    *("2.4703282292062327e-324", "2.4703282292062328e-324", "2.2250738585072011e-308", "0.30000000000000004"),
    *("1.7976931348623157e308", "1.7976931348623159e308", "[]", "[1, 2]", "{}", '{"a": 1.50, "b":[ 1 ]}', "[", "{"),
]
FITTING = {"s": '"text"', "b": "true", "y": "7", "h": "300", "i": "70000", "l": "1152921504606846977", "d": "0.25"}


def random_value(name: str, rng: random.Random) -> str:
    if rng.random() < 0.1:
        number = struct.unpack("d", rng.randbytes(8))[0]
        return repr(number) if math.isfinite(number) else "0"
    value = rng.choice(VALUES) if name not in FITTING or rng.random() < 0.4 else FITTING[name]
    return json.dumps({"in": [value]}) if rng.random() < 0.05 else value


def random_line(rng: random.Random) -> str:
    """Return an object with known, unknown and repeated names, sometimes with text after it, or truncated."""
    names = [rng.choice([*FITTING, "x", "S", "\\u0073"]) for _ in range(rng.randint(0, 4))]
    space = rng.choice(["", "", " "])
    fields = (f'"{name}"{space}:{space}{random_value(name, rng)}' for name in names)
    line = "{" + rng.choice([",", " , "]).join(fields) + "}"
    chance = rng.random()
    if chance < 0.03:
        line += rng.choice([" ", "x", ' {"s":"two"}', "}", "null"])
    elif chance < 0.06:
        line = line[: rng.randint(1, len(line))]
    elif chance < 0.07:
        line = rng.choice(["null", " {}", "\ufeff{}", "1", '"s"'])
    return line


def is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and one == other


def test_values_match_sparks_parsers(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(column_parser, "_FEW_LINES", 1)  # So that no line is doubtful because of its neighbours.
    rng = random.Random(11)
    lines = [random_line(rng) for _ in range(LINES)]
    (tmp_path / "lines").write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    schema = StructType.fromDDL(COLUMNS)
    asked = f"{COLUMNS}, c STRING"
    options = {"columnNameOfCorruptRecord": "c"}
    of_files = spark.read.schema(asked).options(**options, lineSep="\n").json(str(tmp_path / "lines")).cache().collect()
    read = LineValues(schema)
    table, doubtful = ColumnParser(schema).parse(pa.array([line.encode() + b"\n" for line in lines], pa.binary()))

    assert len(of_files) == len(lines)
    assert 0.2 < doubtful.mean() < 0.9  # Both ways are tried.
    for line, row, left, expected in zip(lines, table.to_pylist(), doubtful, of_files, strict=True):
        if left:
            assert all(found is None for found in row.values())
            found, fits = read(line.encode())
            if not fits and not is_json(line):
                assert found == [None] * len(schema)  # Spark may accept it. Here it is reported, and never misread.
                continue
        else:
            found, fits = list(row.values()), True
        assert fits == (expected.c is None), line
        assert all(map(same, found, [expected[name] for name in schema.names])), line


def parsed(*lines: bytes) -> list[tuple[object, ...] | None]:
    """Return the rows of lines, with None for doubtful ones."""
    schema = StructType([StructField("n", IntegerType()), StructField("s", StringType())])
    table, doubtful = ColumnParser(schema).parse(pa.array([line + b"\n" for line in lines], pa.binary()))
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return [None if left else row for row, left in zip(rows, doubtful, strict=True)]


@pytest.mark.parametrize(
    "lines",
    [
        [b'{"n":1,"s":', b'{"n":2}}', b'{"n":3}{"n":4}'],
        [b'{"n":1}{"n":2}', b"", b'{"n":3}'],
        [b'{"s":"a', b'","n":1}', b'{"n":3}{"n":4}'],
        [b'{"n":1,"x":[{}', b",{}]}", b'{"n":3}{"n":4}'],
        [b"null", b'{"n":1}null{}', b"{}"],
        [b"null"],
        [b"[" * 100_000],
        [b'{"x":' + b"[" * 100_000 + b"}"],
        [b"{", b"}", b"{}{}"],
    ],
)
def test_lines_that_are_not_one_object_each_are_doubtful(lines):
    assert parsed(*lines) == [None] * len(lines)


def test_one_misfit_among_many_lines_leaves_few_doubtful():
    lines = [b'{"n":%d,"s":"%d"}' % (n, n) for n in range(10_000)]
    lines[5000] = b'{"n":"no"}'
    lines[7000] = b"\xff"

    found = parsed(*lines)

    assert found[5000] is None
    assert found[7000] is None
    assert sum(row is None for row in found) < 130
    assert all(row in (None, (n, str(n))) for n, row in enumerate(found))


def test_words_within_texts_are_not_numbers():
    assert parsed(b'{"s":"Information on NaN or Inf"}') == [(None, "Information on NaN or Inf")]
    assert [parsed(line) for line in (b'{"x":Inf}', b'{"x": -NaN}', b'{"x":[NaN]}')] == [[None]] * 3


def test_times_of_thousands_of_digits_are_doubtful_in_any_number(spark):
    parser = ColumnParser(StructType.fromDDL("t TIMESTAMP"))
    for digits in (900, 5000):  # Python itself reads at most 4,300.
        line = b'{"t":' + b"9" * digits + b"}\n"
        assert parser.parse(pa.array([line] * 20, pa.binary()))[1].all()
        assert LineValues(StructType.fromDDL("t TIMESTAMP, n INT"))(line[:-2] + b',"n":7}') == ([None, 7], False)


def test_slices_of_content_are_parsed_alike(spark):
    content = pa.array([b'{"d":%d}\n' % n for n in range(100)], pa.binary())
    parser = ColumnParser(StructType.fromDDL("d DOUBLE"))
    table, doubtful = parser.parse(content.slice(30, 20))
    assert not doubtful.any()
    assert table["d"].to_pylist() == list(np.arange(30.0, 50.0))


def test_types_that_need_sparks_parser_are_detected():
    assert StringType() in TYPES
    assert not any(each in TYPES for each in (DateType(), TimestampType(), FloatType(), StringType("UTF8_LCASE")))
