"""The journals of a table: read order, missing content, and content that needs Spark."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput, OffsetJump, StreamTruncated
from coranto.messages.checkpoints import Source
from coranto.streams import Split
from coranto_consumers.journals.discovery import ContentExtent, open_journals
from coranto_consumers.tables import read_table
from coranto_consumers.tables.inputs import find_layout, no_key_in_several, present_journals, require_content
from tests.consumers.tables.shop import Shop, table_file


def test_segments_are_read_after_their_predecessors(shop: Shop) -> None:
    stream = shop.stream()
    shop.write(stream, {"id": 1}, {"id": 2})
    [first] = shop.streams.describe(stream).active()
    shop.streams.scale(stream, [Split(first.number, 2)])
    present = present_journals(shop.client, read_table(table_file(f"{{stream: {stream}}}", "sqlite:////s.db")))
    assert len(present) == 3
    assert open_journals(present, {}) == {first.journal}
    assert open_journals(present, {first.journal: present[first.journal].head - 1}) == {first.journal}
    assert len(open_journals(present, {first.journal: present[first.journal].head})) == 3


def test_missing_unread_content_is_an_error() -> None:
    present = {"a": ContentExtent(100, 200), "b": ContentExtent(0, 50)}
    require_content(present, {"a": Source(100), "b": Source(60), "gone": Source(5)})
    with pytest.raises(OffsetJump):
        require_content(present, {"a": Source(99)})


def test_a_segment_truncated_before_it_was_read_is_an_error(shop: Shop) -> None:
    stream = shop.stream()
    [first] = shop.streams.describe(stream).active()
    scaled = shop.streams.scale(stream, [Split(first.number, 2)])
    shop.streams.truncate(stream, {each.number: 0 for each in scaled.active()})
    present = present_journals(shop.client, read_table(table_file(f"{{stream: {stream}}}", "sqlite:////s.db")))
    with pytest.raises(StreamTruncated):
        require_content(present, {first.journal: Source(1)})
    known = {first.journal: Source(1), **{each.journal: Source(0) for each in scaled.active()}}
    require_content(present, known)


def test_types_that_need_spark_and_missing_journals_are_refused(shop: Shop) -> None:
    name = f"{shop.name}/csv"
    shop.create(name)
    spec = read_table(table_file(f"{{journal: {name}}}", "sqlite:////s.db", columns="id BIGINT, day DATE"))
    with pytest.raises(
        InvalidInput, match="day is DATE, which needs Spark: add `runner: spark`, or read it as a STRING"
    ):
        find_layout(shop.client, spec)
    with pytest.raises(InvalidInput, match="no journal matches"):
        find_layout(shop.client, read_table(table_file("{journal: no/such}", "sqlite:////s.db")))


@pytest.mark.parametrize(
    ("input", "mode", "refused"),
    [
        ("{prefix: a/}", "upsert", True),
        ("{prefix: a/, keyed: true}", "upsert", False),
        ("{prefix: a/}", "append", False),
        ("{stream: a/b}", "changes", False),
    ],
)
def test_several_journals_with_a_key_must_be_keyed(input: str, mode: str, refused: bool) -> None:
    spec = read_table(table_file(input, "sqlite:////s.db", mode))
    assert (no_key_in_several(spec, ["a/1", "a/2"]) is not None) == refused
    assert no_key_in_several(spec, ["a/1"]) is None
