"""Lines that are rewritten, so that many are parsed at once, have the values that each has alone."""

import random

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from coranto.messages import column_parser
from coranto_consumers.spark import parsing
from coranto_consumers.spark.json_rewriting import rewrites, rewritten
from coranto_consumers.spark.json_times import zone_of
from coranto_consumers.spark.json_values import LineValues
from coranto_consumers.spark.parsing import ColumnParser
from tests.consumers.spark.test_json_values import MAPS, WIDE, random_line, rows_of

pytestmark = pytest.mark.usefixtures("spark")  # Schemas are parsed by it.

BITS = [
    '"',
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\\",
    " ",
    "1",
    "null",
    "tru",
    '"k"',
    '"v"',
    '"m":',
    '"#5"',
    '{"a":1}',
    "-",
    "\t",
]


def mutated(line: str, rng: random.Random) -> str:
    """A line in which some bits are left out, doubled or put in, so that mostly it is no JSON any more."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(line))
        match rng.randrange(3):
            case 0:
                line = line[:at] + line[at + 1 :]
            case 1:
                line = line[:at] + rng.choice(BITS) + line[at:]
            case 2:
                other = rng.randrange(len(line))
                line = line[: max(at, other)] + line[min(at, other) :]
        line = line or "{}"
    return line


@pytest.mark.parametrize("columns", [WIDE, MAPS, "m MAP<STRING, STRING>, s STRING"])
@pytest.mark.parametrize("always", [True, False])
def test_what_is_no_json_does_not_become_it(spark, monkeypatch, columns, always):
    monkeypatch.setattr(column_parser, "_FEW_LINES", 1)
    rng = random.Random(3)
    schema = StructType.fromDDL(columns)
    lines = [mutated(random_line(rng, schema.names), rng) for _ in range(8000)]
    parser = ColumnParser(schema, zone_of("Europe/Berlin"))
    parser._rewrites |= always

    table, doubtful = parser.parse(pa.array([f"{line}\n" for line in lines], pa.binary()))

    read = LineValues(schema, zone_of("Europe/Berlin"))
    wrong = []
    found = 0
    for line, quick, left in zip(lines, rows_of(table), doubtful, strict=True):
        if left:
            continue
        found += 1
        values, fits = read(line.encode())
        columns_of_line = [pa.array([value], field.type) for value, field in zip(values, table.schema, strict=True)]
        [slow] = rows_of(pa.Table.from_arrays(columns_of_line, schema=table.schema))
        if not fits or quick != slow:
            wrong.append((line, quick, slow, fits))
    assert not wrong, f"{len(wrong)}, such as {wrong[:5]}"
    assert found > 200


def test_lines_are_rewritten_as_described():
    schema = StructType.fromDDL("m MAP<STRING, MAP<STRING, INT>>, s STRING, t TIMESTAMP, a ARRAY<STRUCT<s: STRING>>")
    lines = {
        '{"m":{"a":{"b":1,"c":2},"d":null},"x":{"m":{}}}': '{"m":[{"k":"a","v":[{"k":"b","v":1},{"k":"c","v":2}]},'
        '{"k":"d","v":null}],"x":{"m":{}}}',
        '{"m": {}, "s": "{}"}': '{"m": [], "s": "{}"}',
        '{"s":{"\\"":[1.50]}}': '{"s":"{\\"\\\\\\"\\":[1.50]}","~":{"\\"":[1.50]}}',
        '{"t":-5,"s":7}': '{"t":"#-5","~":-5,"s":"7","~":7}',
        '{"a":[{"s":true},{"s":null}]}': '{"a":[{"s":"true","~":true},{"s":null}]}',
        '{"m":"é","s":"é"}': '{"m":"é","s":"é"}',
    }
    found, doubtful = rewritten(pa.array([f"{line}\n" for line in lines], pa.binary()), schema, "~")
    assert [line.decode() for line in found.to_pylist()] == [f"{line}\n" for line in lines.values()]
    assert not doubtful.any()


@pytest.mark.parametrize(
    "line",
    [
        '{"m":[{"k":"a","v":1}]}',
        '{"m":{"a"}}',
        '{"m":{"a","b":1}}',
        '{"m":{null:1}}',
        '{"m":{null}}',
        '{"m":{"a":1:2}}',
        '{"m":{"a":1]}',
        '{"\\u006d":[{"k":"a","v":1}]}',
        '{"t":"#5"}',
        '{"s":\t{}}',
        '{"s":1 }',
        '{"m":{}}{}',
        '{"m":"}',
        '{"m":{}}}',
        '{"m":{}},"s":1\\}',
    ],
)
def test_lines_that_might_become_others_are_doubtful(line):
    schema = StructType.fromDDL("m MAP<STRING, INT>, s STRING, t TIMESTAMP")
    lines = ['{"m":{"a":1}}', line, '{"m":{"a":1}}']
    found, doubtful = rewritten(pa.array([f"{line}\n" for line in lines], pa.binary()), schema, "~")
    assert doubtful.tolist() == [False, True, False]
    assert found[0] == found[2] == pa.scalar(b'{"m":[{"k":"a","v":1}]}\n')


@pytest.mark.parametrize("line", ['{"m":[}', '{"m":{}', '{"s":"}', '{"s":]}'])
@pytest.mark.parametrize("number", [1, 20])
def test_lines_none_of_which_has_matching_brackets_are_doubtful(spark, line, number):
    parser = ColumnParser(StructType.fromDDL("m MAP<STRING, INT>, s STRING, t TIMESTAMP"))
    table, doubtful = parser.parse(pa.array([f"{line}\n".encode()] * number, pa.binary()))
    assert doubtful.all()
    assert table.num_rows == number


def test_only_what_may_have_to_be_is_rewritten():
    def are(columns: str, **options: bool) -> bool:
        return rewrites(StructType.fromDDL(columns), **options)

    assert not are("i INT, a ARRAY<STRING>, d DATE, r STRUCT<x: DOUBLE>")
    assert are("r STRUCT<t: TIMESTAMP>")
    assert are("a ARRAY<ARRAY<STRUCT<s: STRING>>>")
    assert not are("s STRING, t TIMESTAMP", maps_only=True)
    assert are("a ARRAY<STRUCT<m: MAP<STRING, STRING>>>", maps_only=True)


def test_lines_of_odd_forms_are_rewritten_from_the_first_once_most_are(spark):
    parser = ColumnParser(StructType.fromDDL("s STRING, t TIMESTAMP"))
    plain = pa.array([b'{"s":"x"}\n'] * 100, pa.binary())
    odd = pa.array([b'{"s":{"x":1},"t":5}\n'] * 100, pa.binary())
    assert not parser.parse(plain)[1].any()
    assert not parser._rewrites
    table, doubtful = parser.parse(odd)
    assert not doubtful.any()
    assert parser._rewrites
    assert table.column("s").to_pylist() == ['{"x":1}'] * 100
    assert table.column("t")[0].value == 5_000_000
    assert not parser.parse(plain)[1].any()
    assert parsing._FEW_DOUBTFUL < 100
