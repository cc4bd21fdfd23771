"""A stream's segments as tables, maps and HTML."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from coranto.streams.control.scaling import Merge, Split, transition
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.pictures import key_map, segment_row
from coranto.streams.model.positions import PendingMessages, SegmentPosition, StreamPosition
from coranto.streams.model.stream import Segment, Stream
from coranto.streams.writer.units import CommitResult

NAME = "shop/<orders>"  # Not a stream's name, but it must be escaped.


def scaled(*changes: Split | Merge, begin: int = 2) -> Stream:
    """Return a stream after successive changes."""
    ranges = KeyRange.FULL.split(begin)
    segments = {number: Segment(number, 0, f"{NAME}/{number}", keys) for number, keys in enumerate(ranges)}
    for change in changes:
        planned = transition(Stream(NAME, segments), [change])
        for each in planned.predecessors:
            segments[each.number] = Segment(
                each.number, each.epoch, each.journal, each.range, each.predecessors, True, sealed_at=10 * each.number
            )
        segments = {**segments, **{each.number: each for each in planned.successors}}
    return Stream(NAME, segments)


def held(stream: Stream, epochs: int | None = None) -> dict[str, list[int | None]]:
    return {str(keys): list(numbers) for keys, numbers in key_map(stream, epochs=epochs).rows}


def test_the_map_shows_the_segments_of_each_key_range() -> None:
    stream = scaled(Split(1), Merge((0, 2)))
    assert key_map(stream).epochs == (0, 1, 2)
    assert held(stream) == {"[0, 0.5)": [0, 0, 4], "[0.5, 0.75)": [1, 2, 4], "[0.75, 1)": [1, 3, 3]}
    assert held(stream, 2) == {"[0, 0.5)": [0, 4], "[0.5, 0.75)": [2, 4], "[0.75, 1)": [3, 3]}
    assert held(stream, 1) == {"[0, 0.75)": [4], "[0.75, 1)": [3]}


def test_truncated_segments_are_not_on_the_map() -> None:
    stream = scaled(Split(1))
    left = Stream(NAME, {number: each for number, each in stream.segments.items() if number != 1})
    assert held(left) == {"[0, 0.5)": [0, 0], "[0.5, 0.75)": [None, 2], "[0.75, 1)": [None, 3]}


def test_rows_shorten_long_lists() -> None:
    stream = scaled(Split(0, 6), Merge((2, 3)))
    rows = {number: segment_row(stream, each, {1: 7}) for number, each in stream.segments.items()}
    assert rows[0] == ("0", "0", "[0, 0.5)", "0", "0 (0 B)", "succeeded by 2 to 7", "-")
    assert rows[1] == ("1", "0", "[0.5, 1)", "0", "7 (7 B)", "active", "-")
    assert rows[8][-2:] == ("active", "2, 3")


def test_notebooks_show_boxes_and_a_table() -> None:
    stream = scaled(Split(1), Merge((0, 2)))
    html = stream._repr_html_()
    page = ElementTree.fromstring(html)  # So all text is escaped and all elements are closed.
    boxes = [each for each in page.iter() if each.tag.endswith("}g")]
    titles = [found.text or "" for found in page.iter() if found.tag.endswith("}title")]
    assert len(boxes) == len(titles) == len(stream.segments)
    assert titles[0] == f"{NAME}/0: keys [0, 0.5), succeeded by 4"
    places = [each.attrib for each in page.iter() if each.tag.endswith("}rect")]
    width = int(places[1]["width"])
    assert [int(each["x"]) // width for each in places] == [0, 0, 1, 1, 2]
    assert [int(each["width"]) // width for each in places] == [2, 1, 1, 2, 1]
    assert len(page.findall(".//tbody/tr")) == 5
    assert "2 active segments, epoch 2" in html


def test_a_sealed_stream_is_marked() -> None:
    one = Segment(0, 0, f"{NAME}/0", KeyRange.FULL, sealing=True, sealed_at=3, end_of_stream=True)
    stream = Stream(NAME, {0: one})
    assert stream.last() == (one,)
    assert "</b>, sealed, epoch 0" in stream._repr_html_()


def test_a_position_is_shown_as_a_table() -> None:
    pending = (PendingMessages("0" * 12, 1, 2),)
    position = StreamPosition({0: SegmentPosition(7), 1: SegmentPosition(5, pending), 2: SegmentPosition(9, (), True)})
    rows = re.findall(r"<tr>(<td>.*?)</tr>", position._repr_html_())
    assert [re.findall(r"<td>(.*?)</td>", row) for row in rows] == [
        ["0", "7", "-", "-"],
        ["1", "5", "1", "-"],
        ["2", "9", "-", "yes"],
    ]


def test_a_committed_transaction_is_shown_as_a_table() -> None:
    html = CommitResult("shop/orders/segment/00000002", 2, 68, 258, 5, 11, 1)._repr_html_()
    assert "<th>begin</th><th>end</th>" in html
    assert "<td>68</td><td>258</td>" in html
