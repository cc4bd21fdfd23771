"""The rows of webhook bodies, with their places."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.ingest.source import Poison, SourceRow
from coranto.ingest.webhook.bodies import JSON, LINES, field_of, has_known_type, parts_of, rows_of


def placed(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    parts = parts_of(body, content_type)
    return [(parts.place(number), content) for number, content in enumerate(parts.contents)]


def test_objects_arrays_and_lines_keep_their_text() -> None:
    assert placed(b' {"a": 1.0} ', JSON) == [("the body", b' {"a": 1.0} ')]
    items = b'{"a": 1.50 }', b'{"b":\n[2]}', b"3"
    assert placed(b'\n[ {"a": 1.50 } ,\t{"b":\n[2]}, 3]', JSON) == [
        *(("item 0", items[0]), ("item 1", items[1]), ("item 2", items[2]))
    ]
    assert placed(b'{"a":1}\r\n\n[2]\n{"b":3}', LINES[0]) == [
        *(("line 1", b'{"a":1}\r'), ("line 3", b"[2]"), ("line 4", b'{"b":3}'))
    ]
    assert placed(b"[]", JSON) == placed(b"", LINES[0]) == []
    assert placed(b"1", JSON) == [("the body", b"1")]


def test_a_body_that_is_not_json_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the body is not JSON"):
        parts_of(b"[{}", JSON)
    assert placed(b"\xff", JSON) == [("the body", b"\xff")]


def test_rows_have_the_key_of_the_request_and_their_numbers() -> None:
    rows = rows_of(parts_of(b'[{"a":1},2]', JSON), "k", b'"item":')
    assert list(rows) == [
        SourceRow("k", {"a": 1}, b'{"a":1}', b'"item":0'),
        Poison("item 1", "is JSON, but int and not an object", None, b"2"),
    ]


def test_a_field_of_the_only_row() -> None:
    assert field_of(parts_of(b'{"id": "a"}', JSON), "id") == "a"
    for body in (b'{"id": 1}', b'[{"id": "a"}, {}]', b"{}", b"[]", b"[1]"):
        assert field_of(parts_of(body, JSON), "id") == ""


def test_known_types() -> None:
    assert all(map(has_known_type, (JSON, "application/problem+json", *LINES)))
    assert not any(map(has_known_type, ("text/plain", "application/octet-stream", "application/xml")))
