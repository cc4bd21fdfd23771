"""Rows as events: bytes and digits are kept, and errors say why a row cannot be an event."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import random
from collections.abc import Sequence
from itertools import product
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.ingest import rows
from coranto.ingest.rows import RowEncoder, UnparsedRows, dead_letter_of, encode_rows, parse_object, plain
from coranto.ingest.source import Poison, SourceRow
from coranto.messages.uuids import Flags, ProducerId, build_uuid
from coranto.streams.model.events import JsonEvents
from coranto.types import parse_fields

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.builds(
    lambda fields, key, ascii: json.dumps({**fields, "k": key}, ensure_ascii=ascii).encode("utf-8", "surrogatepass"),
    st.dictionaries(st.sampled_from(["n", "é", "\n", "", "_met"]) | st.text(max_size=3), VALUES, max_size=4),
    st.text(max_size=3),
    st.booleans(),
)
ODD = [
    *(b"", b"{}", b"{ }", b"1", b"[{}]", b"null", b'"k"', b"\xff", b"{", b"}"),
    *(b'{"k":"a"}{"k":"b"}', b'{"k":"a"},{"k":"b"}', b'{"k":"a"}\0', b'\x0b{"k":"a"}', b'\xef\xbb\xbf{"k":"a"}'),
    *(b' {"k":"a"} ', b' {"k":"a"}\t\r\n', b'{"k":\n"a"}', b'{"k":\r"a"}', b'{"k":"%b"}' % (b"x" * 400)),
    *(b'{"k":%b}' % each for each in (b"1", b"null", b'"\xff"', b'"\\ud800"', b"1e400", b"NaN", b"{}", b"\\u00e9")),
    *(b'{"k":"a","k":%b}' % each for each in (b'"b"', b"7", b"null")),
    *(b'{"k":"a","n":%b}' % each for each in (b'"1"', b"1.0", b'{"_meta":1}', b"9" * 5000)),
    *(b'{"_meta":{"a":1},"k":"a"}', b'{"\\u005fmeta":{"uuid":"x"},"k":"a"}', b'{"k":"a","_meta":3}'),
]
UUID = build_uuid(ProducerId(b"\x01\x02\x03\x04\x05\x06"), 17 << 4, Flags.CONTINUE_TXN)


def event(row: SourceRow, **options: Any) -> Any:
    key, line = RowEncoder(**options).encode(row)
    assert line.count(b"\n") == 1
    stamped = JsonEvents().stamp(line, UUID)
    [envelope] = JsonEvents().decoder("j", 0).feed(stamped, 0)
    assert envelope.uuid == str(UUID)
    return key, json.loads(stamped)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"a":1}', b'{"a":1}'),
        (b' {"a": 0.12345678901234567890, "b": 1e400}\r\n', None),
        (b'{"a":\n [1,\n2]}', b'{"a":[1,2]}'),
        (b'{"a":12345678901234567890123}', b'{"a":12345678901234567890123}'),
        (b"{}", b"{}"),
        (b'{ "\xc3\xa9" : "\\u00e9" }', b'{ "\xc3\xa9" : "\\u00e9" }'),
    ],
)
def test_objects_keep_their_text_in_one_line(content: bytes, text: bytes | None) -> None:
    if text is None:
        with pytest.raises(InvalidInput, match="is not JSON"):
            parse_object(content)
        return
    fields, found = parse_object(content)
    assert found == text
    assert json.loads(found) == fields
    _, decoded = event(SourceRow("k", fields, found, b'"at":1'))
    assert decoded.pop("_meta") == {"uuid": str(UUID), "at": 1}
    assert decoded == fields


@pytest.mark.parametrize(
    "content", [b"", b"1", b"[1]", b"null", b'{"a":NaN}', b'{"a":"\xff"}', b'{"a":1}{"b":2}', b'{"a":"\\ud800"}', b"{"]
)
def test_texts_that_are_not_objects_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"^is (not )?JSON"):
        parse_object(content)


def test_random_rows_are_encoded_like_by_the_format() -> None:
    chosen, format = random.Random(5), JsonEvents()
    values = [None, True, 0, -(2**70), 1.5, 1e300, "", "é 🙂", "\n\r", "x" * 100_000, [], [1, {"a": None}], {"b": {}}]
    for number in range(300):
        fields = {f"{chosen.choice('aé_')}{at}": chosen.choice(values) for at in range(chosen.randrange(5))}
        if number % 7 == 0:
            fields["_meta"] = {"theirs": number}
        meta = chosen.choice([b"", b'"at":%d' % number])
        text = chosen.choice([None, json.dumps(fields, indent=chosen.choice([None, 1])).encode()])
        row = SourceRow(chosen.choice(["", "k", "é"]), fields, None)
        if text is not None:
            found, line = parse_object(text)
            row = row._replace(fields=found, text=line)
        expected = {**fields, "_meta": {**fields.get("_meta", {}), **json.loads(b"{%b}" % meta)}}
        assert event(row._replace(meta=meta)) == (row.key, json.loads(format.stamp(format.encode(expected), UUID)))


def test_the_key_comes_from_the_source_or_a_field() -> None:
    row = SourceRow("k", {"customer": "ada", "n": 7, "none": None})
    assert event(row)[0] == "k"
    assert event(row, key_field="customer")[0] == "ada"
    assert event(row, key_field="n")[0] == "7"
    for name in ("none", "missing"):
        with pytest.raises(InvalidInput, match=f"has no field '{name}'"):
            event(row, key_field=name)


def test_metadata_of_a_row_and_of_its_source_are_merged() -> None:
    row = SourceRow("k", {"_meta": {"uuid": "theirs", "trace": "t"}, "n": 1}, None, b'"at":1')
    assert event(row)[1] == {"_meta": {"uuid": str(UUID), "trace": "t", "at": 1}, "n": 1}
    with pytest.raises(InvalidInput, match="reserved for metadata"):
        event(SourceRow("k", {"_meta": 3}))


def test_rows_without_fields_or_metadata() -> None:
    assert event(SourceRow("k", {}, None, b'"deleted":true', True))[1] == {
        "_meta": {"uuid": str(UUID), "deleted": True}
    }
    assert event(SourceRow("k", {}))[1] == {"_meta": {"uuid": str(UUID)}}
    assert event(SourceRow("k", {"a": 1}))[1] == {"_meta": {"uuid": str(UUID)}, "a": 1}


def test_the_type_is_checked_except_for_deletions() -> None:
    fields = parse_fields("n INT NOT NULL")
    with pytest.raises(InvalidInput, match=r"does not fit shop.N@1: n is NOT NULL"):
        event(SourceRow("k", {}), fields=fields, type_name="shop.N@1")
    event(SourceRow("k", {}, is_deletion=True), fields=fields, type_name="shop.N@1")
    event(SourceRow("k", {"n": 1, "_meta": {"a": 1}}), fields=fields, type_name="shop.N@1")


def test_rows_that_are_too_large_or_have_no_json_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 200)
    with pytest.raises(InvalidInput, match="it may have 200"):
        event(SourceRow("k", {"a": "x" * 200}))
    for value in (float("nan"), object()):
        with pytest.raises(InvalidInput, match="cannot be written as JSON"):
            event(SourceRow("k", {"a": value}))


KEYS: Final = ("", "k", "n")
TYPES: Final = (None, "k STRING", "k STRING NOT NULL, n BIGINT")
METAS: Final = ((b'"at":1', b'"at":2'), (b"", b""), (b'"at":1', b""))


def require_the_same(texts: list[bytes], key: str, type: str | None, metas: Sequence[bytes]) -> None:
    """Assert that rows encoded together become the same events or poison as one by one."""
    encoder = RowEncoder(key, None if type is None else parse_fields(type), "shop.N@1")
    chosen = [metas[number % len(metas)] for number in range(len(texts))]
    given = UnparsedRows(["request"] * len(texts), texts, chosen, lambda *given: Poison(str(given), "is text"))

    def poison_of(row: SourceRow, number: int, error: InvalidInput) -> Poison:
        return Poison(str(number), error.message, row.key.encode(), row.text)

    for keeps in (True, False):
        together, one_by_one = (
            encode_rows(encoder, each, poison_of, keeps_poison=keeps) for each in (given, iter(given))
        )
        assert [list(each) for each in together] == [list(each) for each in one_by_one]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd[:40]))
def test_odd_texts_are_encoded_like_rows(odd: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 400)
    for texts, key, type, metas in product(([odd], [b'{"k":"a"}', odd]), KEYS, TYPES, METAS):
        require_the_same(texts, key, type, metas)


@given(
    st.lists(OBJECTS | st.sampled_from(ODD), max_size=6),
    st.sampled_from(KEYS),
    st.sampled_from(TYPES),
    st.sampled_from(METAS),
)
def test_texts_are_encoded_like_rows(texts: list[bytes], key: str, type: str | None, metas: Sequence[bytes]) -> None:
    require_the_same(texts, key, type, metas)


@pytest.mark.parametrize(("key", "type"), [("", None), ("k", None), ("k", "k STRING")])
def test_plain_texts_are_not_parsed_row_by_row(key: str, type: str | None) -> None:
    encoder = RowEncoder(key, None if type is None else parse_fields(type))
    given = UnparsedRows(["a"] * 2, [b'{"k":"b"}', b' {"k": "c"}\r'], [b'"at":1', b'"at":2'], Poison)
    found = encoder.encode_texts(given)
    assert found is not None
    assert list(found[0]) == (["b", "c"] if key else ["a", "a"])
    assert [json.loads(each)["_meta"]["at"] for each in found[1]] == [1, 2]


def test_plain_values() -> None:
    zone = dt.timezone(dt.timedelta(hours=2))
    given = {
        "time": dt.datetime(2026, 3, 1, 12, tzinfo=zone),
        "local": dt.datetime(2026, 3, 1, 12),
        "day": dt.date(2026, 3, 1),
        "price": decimal.Decimal("1.10"),
        "bytes": b"\x00",
        "many": [1, (None, True)],
        "floats": [1.5, float("nan"), float("inf"), float("-inf")],
    }
    assert plain(given) == {
        "time": "2026-03-01T10:00:00Z",
        "local": "2026-03-01T12:00:00",
        "day": "2026-03-01",
        "price": "1.10",
        "bytes": "AA==",
        "many": [1, [None, True]],
        "floats": [1.5, "NaN", "Infinity", "-Infinity"],
    }
    with pytest.raises(InvalidInput, match="timedelta"):
        plain(dt.timedelta(1))


def test_a_dead_letter_has_every_byte() -> None:
    letter = dead_letter_of("loads", "a/0", Poison("offset 3", "is not JSON", b"\xff", b"\x00"))
    assert base64.b64decode(str(letter["value"])) == b"\x00"
    assert base64.b64decode(str(letter["key"])) == b"\xff"
    assert dead_letter_of("loads", "a/0", Poison("offset 3", "is long")).keys() == {
        "ingest",
        "split",
        "place",
        "problem",
    }
