"""Bodies of webhooks as rows with their places."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.ingest.source import Poison, SourceRow
from coranto.ingest.webhook.bodies import JSON, LINES, field_of, has_known_type, rows_of


def texts(body: bytes, type: str = JSON) -> list[bytes | str | None]:
    return [row.text if isinstance(row, SourceRow) else place for place, row in rows_of(body, type)]


def test_objects_arrays_and_lines_keep_their_text() -> None:
    assert texts(b' {"a": 1.0} ') == [b'{"a": 1.0}']
    assert texts(b'\n[{"a": 1.0},{"b":\n2}, 3]') == [b'{"a": 1.0}', b'{"b":2}', "item 2"]
    assert texts(b'{"a":1}\r\n\n[2]\n{"b":3}', LINES[0]) == [b'{"a":1}', "line 3", b'{"b":3}']
    assert texts(b"[]") == []
    assert texts(b"", LINES[0]) == []
    assert texts(b"1") == ["the body"]


def test_a_body_that_is_not_json() -> None:
    with pytest.raises(InvalidInput, match="the body is not JSON"):
        rows_of(b"[{}", JSON)
    [(place, row)] = rows_of(b"\xff", JSON)
    assert isinstance(row, Poison)
    assert (place, row.problem[:11]) == ("the body", "is not JSON")


def test_a_field_of_the_only_row() -> None:
    assert field_of(rows_of(b'{"id": "a"}', JSON), "id") == "a"
    for body in (b'{"id": 1}', b'[{"id": "a"}, {}]', b"{}", b"[]", b"[1]"):
        assert field_of(rows_of(body, JSON), "id") == ""


def test_known_types() -> None:
    assert all(map(has_known_type, (JSON, "application/problem+json", *LINES)))
    assert not any(map(has_known_type, ("text/plain", "application/octet-stream", "application/xml")))


@pytest.mark.parametrize("other", [b"7", b"[{}]"])
def test_an_item_that_is_no_row_leaves_the_others_as_they_are(other: bytes) -> None:
    alone = rows_of(b' [ {"a": 1.50 } ,\t{"a":[1, 2]} ] ', JSON)
    assert [row.text for _, row in alone if isinstance(row, SourceRow)] == [b'{"a": 1.50 }', b'{"a":[1, 2]}']
    rows = rows_of(b'[{"a": 1.50 },{"a":[1, 2]},%b]' % other, JSON)
    assert rows[:2] == alone
    assert isinstance(rows[2][1], Poison)
