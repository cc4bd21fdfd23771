"""Blank lines and byte order marks: as Spark's JSON reader of files has them, on every way to rows."""

import json

import numpy as np
import pytest
from pyspark.sql.types import IntegerType, StructType

from coranto.errors import CorruptMessage
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import Flags, format_uuid
from coranto_consumers.spark.framings import AnyLines
from coranto_consumers.spark.source import JournalDataSource
from coranto_consumers.spark.special_lines import read_block

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


@pytest.mark.parametrize("tolerant", [False, True])
@pytest.mark.parametrize("pointer", ["/_meta/uuid", None])
def test_blank_lines_are_no_messages_and_marks_are_left_out(pointer, tolerant):
    found = read_block(JsonLines(pointer, tolerant=tolerant), "a/b", BLOCK, 100)
    assert found.blank is not None
    assert np.flatnonzero(found.blank).tolist() == [0, 2, 4]
    assert found.unreadable is None
    texts = [text.as_py().removesuffix(b"\n") for text in found.content]
    assert [text for row, text in enumerate(texts) if not found.blank[row]] == [
        line.removeprefix(MARK) for line in LINES if b"{" in line
    ]
    if pointer is not None:
        assert found.lines.uuids.clocks.tolist() == [0, 1 << 30, 0, 1 << 30, 0, 0, 0]


def test_other_lines_that_are_no_messages_are_errors_or_unreadable_as_before():
    block = b"\n" + MARK + b"nonsense\n" + b"nonsense\n"
    with pytest.raises(CorruptMessage, match="offset 11"):
        read_block(JsonLines(), "a/b", block, 10)
    found = read_block(JsonLines(tolerant=True), "a/b", block, 10)
    assert found.unreadable is not None
    assert found.unreadable.tolist() == [False, True, True]


def test_any_lines_stay_as_they_are():
    found = read_block(AnyLines(), "a/b", BLOCK, 0)
    assert found.blank is None
    assert [text.as_py() for text in found.content] == [line + b"\n" for line in LINES]


CONTENT = MARK + b"".join(
    line + b"\n" for line in (*(b'{"n":%d}' % n for n in range(3)), b"", b"  ", b'{"n":3}', b"\t")
)
"""The content of a file, of which Spark's reader makes these rows."""
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
