"""Kafka records as rows: keys, headers, times, tombstones, and poison values."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from coranto.errors import InvalidInput
from coranto.ingest.kafka.options import META, KafkaOptions
from coranto.ingest.kafka.records import RecordRows, values_of
from coranto.ingest.rows import UnparsedRows
from coranto.ingest.source import Poison, SourceRow


@dataclass
class Record:
    content: bytes | None = b'{"n": 1}'
    name: bytes | None = b"k"
    time: tuple[int, int] = (1, 17)
    header: list[tuple[str, bytes | None]] = field(default_factory=list)

    def value(self) -> bytes | None:
        return self.content

    def key(self) -> bytes | None:
        return self.name

    def offset(self) -> int:
        return 8

    def timestamp(self) -> tuple[int, int]:
        return self.time

    def headers(self) -> Any:
        return self.header or None


def row(record: Record, **options: Any) -> SourceRow | Poison | None:
    given = KafkaOptions("k:9092", ("orders",), **options)
    return next(iter(RecordRows(given, values_of(given)).rows("orders", 3, [record])), None)


def meta(found: SourceRow | Poison | None) -> Any:
    assert isinstance(found, SourceRow)
    return json.loads(b"{%b}" % found.meta)


def test_a_record_is_a_row_with_its_origin() -> None:
    found = row(Record())
    assert isinstance(found, SourceRow)
    assert (found.key, found.fields, found.text, found.is_deletion) == ("k", {"n": 1}, b'{"n": 1}', False)
    assert meta(found) == {"topic": "orders", "partition": 3, "offset": 8, "timestamp": 17}


@pytest.mark.parametrize("names", [(), *((each,) for each in META), META, META[1:3], META[3:]])
def test_the_parts_of_a_record_are_configurable(names: tuple[str, ...]) -> None:
    record = Record(header=[("a", b"x"), ("a", b"\xff"), ("b", None)])
    every = {
        "topic": "orders",
        "partition": 3,
        "offset": 8,
        "timestamp": 17,
        "key": "k",
        "headers": [["a", "x"], ["a", {"base64": "/w=="}], ["b", None]],
    }
    assert meta(row(record, meta=names)) == {name: every[name] for name in names}


def test_a_record_without_a_time_or_a_key() -> None:
    found = row(Record(name=None, time=(0, -1)), meta=("timestamp", "key"))
    assert meta(found) == {"timestamp": None, "key": None}
    assert isinstance(found, SourceRow)
    assert found.key == "orders/3"


def test_tombstones() -> None:
    found = row(Record(None, b'{"id": 7}'), meta=())
    assert isinstance(found, SourceRow)
    assert (found.fields, found.is_deletion) == ({"id": 7}, True)
    assert meta(found) == {"key": '{"id": 7}', "deleted": True}
    for key in (b"\xff", b"{no", b"k", None):
        bare = row(Record(None, key), meta=())
        assert isinstance(bare, SourceRow)
        assert bare.fields == {}
    assert row(Record(None), tombstones=False) is None


def test_tombstones_have_an_operation_for_tables() -> None:
    found = row(Record(None, b'{"id": 7}'), operation="op")
    assert isinstance(found, SourceRow)
    assert (found.fields, found.text, found.is_deletion) == ({"op": "delete", "id": 7}, None, True)
    kept = row(Record(), operation="op")
    assert isinstance(kept, SourceRow)
    assert (kept.fields, kept.text) == ({"n": 1}, b'{"n": 1}')


@pytest.mark.parametrize("record", [Record(b'{"op": 1}'), Record(None, b'{"op": 1}')])
def test_a_record_with_the_field_of_the_operation_is_poison(record: Record) -> None:
    problem = "has a field 'op', which `operation` names: choose another name"
    assert row(record, operation="op") == Poison("offset 8", problem, record.name, record.content)


def test_keys_of_any_bytes_are_routing_keys() -> None:
    keys = {key: row(Record(name=key)) for key in (b"\xff", b"\xfe", "é".encode())}
    assert len({found.key for found in keys.values() if isinstance(found, SourceRow)}) == 3


def test_values_that_are_not_objects_are_poison() -> None:
    found = row(Record(b"[1]"))
    assert found == Poison("offset 8", "is JSON, but list and not an object", b"k", b"[1]")


def test_texts() -> None:
    found = row(Record(b"a line"), value="text")
    assert isinstance(found, SourceRow)
    assert (found.fields, found.text) == ({"value": "a line"}, None)
    assert row(Record(b"\xff"), value="text") == Poison("offset 8", "is not UTF-8", b"k", b"\xff")
    with pytest.raises(InvalidInput):
        values_of(KafkaOptions("k", ("t",))).decode(b"1")


def test_poison_between_records_leaves_the_others_unchanged() -> None:
    values = [b'{"n": 0}', b"{", None, b'{"n":\n1}', b'{"n": "\xff"}', b'{"n": 2}']
    given = KafkaOptions("k:9092", ("orders",), tombstones=False)
    found = list(RecordRows(given, values_of(given)).rows("orders", 3, list(map(Record, values))))
    assert [each.value if isinstance(each, Poison) else each.text for each in found] == [
        *(b'{"n": 0}', b"{", b'{"n":1}', b'{"n": "\xff"}', b'{"n": 2}')
    ]
    assert [isinstance(each, Poison) for each in found] == [False, True, False, True, False]


def test_json_records_are_the_same_rows_together_and_one_by_one() -> None:
    """Rows next to a tombstone are made one by one."""
    records = [
        Record(),
        Record(b'{"n":\n2}', None, (0, -1)),
        Record(b"{"),
        Record(b" {}", b"\xff", (1, 5), [("a", b"x")]),
    ]
    for names, some in product(((), META, META[:4], META[3:]), (records, records[2:])):
        given = KafkaOptions("k:9092", ("orders",), meta=names, tombstones=False)
        rows = RecordRows(given, values_of(given))
        together, one_by_one = (rows.rows("orders", 3, each) for each in (some, [*some, Record(None)]))
        assert isinstance(together, UnparsedRows)
        assert not isinstance(one_by_one, UnparsedRows)
        assert list(together) == list(one_by_one)
