"""Blank lines and byte order marks: every read has the rows of Spark's reader of JSON files."""

import json

import pytest
from pyspark.sql.types import IntegerType, StructType

from coranto.messages.special_lines import read_block
from coranto.messages.uuids import Flags, format_uuid
from coranto_consumers.journals.framings import AnyLines
from coranto_consumers.spark.source.data_source import JournalDataSource

MARK = b"\xef\xbb\xbf"
UUID = format_uuid(b"\1\2\3\4\5\6", 1 << 30, Flags.OUTSIDE_TXN)
LINES = [
    b"",
    b'{"_meta":{"uuid":"%s"},"n":1}' % UUID.encode(),
    b" \t\r",
    MARK + b'{"_meta":{"uuid":"%s"},"n":2}' % UUID.encode(),
    MARK,
    MARK + b'{"n":3}',
    b'{"n":4}',
]
BLOCK = b"".join(line + b"\n" for line in LINES)


def test_lines_of_any_kind_stay_unchanged():
    found = read_block(AnyLines(), "a/b", BLOCK, 0)
    assert found.blank is None
    assert [text.as_py() for text in found.content] == [line + b"\n" for line in LINES]


CONTENT = MARK + b"".join(
    line + b"\n" for line in (*(b'{"n":%d}' % n for n in range(3)), b"", b"  ", b'{"n":3}', b"\t")
)
"""The content of a file, and Spark's rows of it."""
NUMBERS = [0, 1, 2, 3]


@pytest.mark.integration
@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize("mode", ["PERMISSIVE", "FAILFAST"])
@pytest.mark.parametrize("pointer", ["/_meta/uuid", "none"])
def test_every_read_has_the_rows_of_sparks_reader(broker, isolation, mode, pointer):
    broker.create("a/lines")
    broker.write("a/lines", CONTENT)
    options = {"endpoint": broker.endpoint, "subscribe": "a/lines", "isolation": isolation, "uuidPointer": pointer}

    def read(source: JournalDataSource, schema: StructType, column: str) -> list:
        reader = source.reader(schema)
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return [value for batch in batches for value in batch.column(column).to_pylist()]

    parsed = JournalDataSource({**options, "mode": mode})
    assert read(parsed, StructType().add("n", IntegerType()), "n") == NUMBERS
    raw = JournalDataSource(options)
    assert [json.loads(value)["n"] for value in read(raw, raw.schema(), "value")] == NUMBERS


@pytest.mark.integration
def test_sparks_reader_has_these_rows(spark, tmp_path):
    (tmp_path / "lines.json").write_bytes(CONTENT)
    assert sorted(row.n for row in spark.read.schema("n INT").json(str(tmp_path / "lines.json")).collect()) == NUMBERS
