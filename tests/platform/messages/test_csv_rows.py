"""CSV: rows from arbitrary chunks, corrupt rows, and the fixtures of Gazette's own framing."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.csv_rows import CsvRows, NamedRows, TextRows
from coranto.messages.framing import IncompleteTail, iter_messages
from coranto.messages.reading import ReadUncommitted
from coranto.messages.uuids import Flags, ProducerId, UuidParts, format_uuid

A = ProducerId(b"\x01AAAAA")
UUID_TEXT = format_uuid(A, 160, Flags.CONTINUE_TXN)
OTHER_TEXT = format_uuid(A, 320, Flags.CONTINUE_TXN)
ROWS = CsvRows(TextRows(2))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.text('",\r\n a', max_size=6)


def cut(content: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted([0, len(content), *(at % (len(content) + 1) for at in cuts)])
    return [content[begin:end] for begin, end in itertools.pairwise(marks)]


def test_rows_are_quoted_where_necessary() -> None:
    assert ROWS.marshal(["123", 'qu"ote'], UUID_TEXT) == f'{UUID_TEXT},123,"qu""ote"\n'.encode()
    assert CsvRows(TextRows(1)).marshal(["567,891"], UUID_TEXT) == f'{UUID_TEXT},"567,891"\n'.encode()
    assert ROWS.acknowledgement(UUID_TEXT) == f"{UUID_TEXT},,\n".encode()
    assert ROWS.content_type == "text/csv"


@given(st.lists(st.lists(texts, min_size=2, max_size=2), max_size=5), st.lists(st.integers(0, 500)), st.integers(0, 2))
def test_rows_round_trip_in_any_chunks_and_for_other_readers(
    rows: list[list[str]], cuts: list[int], column: int
) -> None:
    framing = CsvRows(TextRows(2), uuid_column=column)
    written = [framing.marshal(row, format_uuid(A, 160 * (n + 1), 1)) for n, row in enumerate(rows)]
    content = b"".join(written)
    tails: list[IncompleteTail] = []
    read = list(iter_messages(framing, "j", cut(content, cuts), 1000, tails.append))
    assert [list(envelope.message) for envelope in read] == rows
    assert [(envelope.clock, envelope.flags) for envelope in read] == [(160 * (n + 1), 1) for n in range(len(rows))]
    assert [content[e.begin - 1000 : e.end - 1000] for e in read] == written
    assert not tails
    by_others = list(csv.reader(io.StringIO(content.decode(), newline="")))
    assert [[*row[:column], *row[column + 1 :]] for row in by_others] == rows


def test_windows_line_ends_are_accepted_and_empty_lines_are_not_rows() -> None:
    content = f'{UUID_TEXT},a,b\r\n\n\r\n{UUID_TEXT},"c",""\r\n'.encode()
    read = list(iter_messages(ROWS, "j", [content], 0))
    assert [list(envelope.message) for envelope in read] == [["a", "b"], ["c", ""]]
    assert [envelope.begin for envelope in read] == [0, 45]
    assert read[-1].end == len(content)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("not-a-uuid,bar,baz", "not a UUID of 36 characters"),
        ("uuid,first,second", "not a UUID"),
        (f"{UUID_TEXT},baz", "a row of 3 columns was expected, not of 2"),
        (f"{UUID_TEXT},a,b,c", "not of 4"),
        (f'{UUID_TEXT},a"b,c', "quotes do not match"),
        (f'{UUID_TEXT},"a"b,c', "quotes do not match"),
        ("6ba7b810-9dad-41d1-80b4-00c04fd430c8,a,b", "not a version 1 UUID"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_corrupt_rows_are_reported_by_offset_and_skipped(row: str, problem: str, size: int) -> None:
    good = ROWS.marshal(["a", "b"], UUID_TEXT)
    content = good + row.encode() + b"\n" + good
    decoder = ROWS.decoder("a/b", 100)
    read, errors = [], []
    for at in range(0, len(content), size):
        piece = content[at : at + size]
        while True:
            try:
                for envelope in decoder.feed(piece):
                    read.append(envelope.begin)  # noqa: PERF401 - those before an error count.
                break
            except CorruptMessage as error:
                errors.append(error)
                piece = b""
    assert read == [100, 100 + len(content) - len(good)]
    [error] = errors
    assert (error.journal, error.offset) == ("a/b", 100 + len(good))
    assert problem in str(error)


def test_an_unclosed_quote_does_not_hide_later_rows() -> None:
    framing = CsvRows(TextRows(2), max_row_bytes=200)
    good = framing.marshal(["a", "b"], UUID_TEXT)
    decoder = framing.decoder("j", 0)
    assert list(decoder.feed(f'{UUID_TEXT},"a,b\n'.encode() + good)) == []
    assert decoder.finish() is not None
    with pytest.raises(CorruptMessage, match="quotes do not match"):
        list(decoder.feed(good * 3))
    assert len(list(decoder.feed(b""))) == 4


def test_an_incomplete_row_is_reported() -> None:
    content = ROWS.marshal(["a", "b"], UUID_TEXT)
    tails: list[IncompleteTail] = []
    assert list(iter_messages(ROWS, "j", [content[:-1]], 10, tails.append)) == []
    assert tails == [IncompleteTail("j", 10, len(content) - 1)]
    decoder = ROWS.decoder("j", 0)
    assert list(decoder.feed(content[:-5])) == []
    with pytest.raises(CorruptMessage, match="content continues at offset 500"):
        list(decoder.feed(content, 500))
    assert [envelope.begin for envelope in decoder.feed(b"")] == [500]
    with pytest.raises(InvalidInput, match="was fed before"):
        list(decoder.feed(content, 500))


def test_without_a_uuid_rows_are_delivered_at_least_once() -> None:
    [row] = iter_messages(ROWS, "j", [b",a,b\n"], 0)
    assert row.clock == 0
    bare = CsvRows(TextRows(1), uuid_column=None)
    assert bare.marshal(["a"], UUID_TEXT) == b"a\n"
    assert bare.marshal([""], UUID_TEXT) == b'""\n'
    assert bare.acknowledgement(UUID_TEXT) == b""
    read = list(iter_messages(bare, "j", [b'a\n""\n'], 0))
    assert [(row.clock, list(row.message)) for row in read] == [(0, ["a"]), (0, [""])]


def test_named_columns() -> None:
    framing = CsvRows(NamedRows(["city", "zip"]), uuid_column=2)
    line = framing.marshal({"zip": "1010", "city": "Wien, 1. Bezirk"}, UUID_TEXT)
    assert line == f'"Wien, 1. Bezirk",1010,{UUID_TEXT}\n'.encode()
    [row] = iter_messages(framing, "j", [line], 0)
    assert row.message == {"city": "Wien, 1. Bezirk", "zip": "1010"}
    assert UuidParts(row.producer, row.clock, row.flags) == UuidParts(A, 160, 1)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (["a"], "2 columns besides its UUID, not 1"),
        ("ab", "a sequence of texts"),
        (["a", 1], "cannot be written as CSV"),
        (["a", "\ud800"], "cannot be written as CSV"),
    ],
)
def test_values_that_a_row_cannot_hold_are_refused(message: Sequence[str], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        ROWS.marshal(message, UUID_TEXT)


def test_invalid_framings_are_refused() -> None:
    with pytest.raises(InvalidInput, match="column 3 among 2 others"):
        CsvRows(TextRows(2), uuid_column=3)
    with pytest.raises(InvalidInput, match="a row needs a column"):
        CsvRows(TextRows(0), uuid_column=None)
    with pytest.raises(InvalidInput, match="different names"):
        NamedRows(["a", "a"])
    with pytest.raises(InvalidInput, match="the columns are a, b; the message has a, c"):
        CsvRows(NamedRows(["a", "b"])).marshal({"a": "", "c": ""}, UUID_TEXT)


def test_payloads_that_are_not_text_are_corrupt_when_decoded() -> None:
    [row] = iter_messages(ROWS, "j", [UUID_TEXT.encode() + b",\xff,b\n"], 0)
    with pytest.raises(CorruptMessage, match="not a row of UTF-8"):
        _ = row.message


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("torn", [f"{UUID_TEXT},fo", f"{UUID_TEXT},foo,ba", UUID_TEXT, "x", f'{UUID_TEXT},"a",b', ","])
@pytest.mark.parametrize("texts", [["a", "b"], ['say "hi"', "two\nlines"], ["", ""], [OTHER_TEXT, OTHER_TEXT]])
def test_the_row_after_a_torn_one_is_read(torn: str, texts: list[str], size: int) -> None:
    good, after = ROWS.marshal(["a", "b"], UUID_TEXT), ROWS.marshal(texts, OTHER_TEXT)
    content = good + torn.encode() + after + good
    begin = len(good) + len(torn.encode())
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    errors: list[CorruptMessage] = []
    read = list(ReadUncommitted(ROWS, "j", chunks, 0, on_corrupt=errors.append))
    assert [(each.begin, each.end) for each in read] == [
        (0, len(good)),
        (begin, begin + len(after)),
        (len(content) - len(good), len(content)),
    ]
    assert (read[1].uuid, list(read[1].message)) == (OTHER_TEXT, texts)
    [error] = errors
    assert error.offset == len(good)
    assert f"the next one begins at offset {begin}" in str(error)


@pytest.mark.parametrize("ends_with", ["quote", "length"])
@pytest.mark.parametrize("torn", [f'{UUID_TEXT},"a "" b', '"'])
def test_rows_after_a_torn_quote_are_read_once_it_is_detected(torn: str, ends_with: str) -> None:
    framing = CsvRows(TextRows(2), max_row_bytes=2000)
    rows = [framing.marshal(["a", f"{n}"], OTHER_TEXT) for n in range(10 if ends_with == "quote" else 100)]
    if ends_with == "quote":
        rows.append(framing.marshal(["a", "b,c"], OTHER_TEXT))
    content = torn.encode() + b"".join(rows)
    errors: list[CorruptMessage] = []
    read = list(ReadUncommitted(framing, "j", [content], 0, on_corrupt=errors.append))
    assert [each.content + b"\n" for each in read] == rows
    [error] = errors
    assert (error.offset, read[0].begin) == (0, len(torn))


def test_without_proof_of_a_next_row_the_whole_line_is_corrupt() -> None:
    framing = CsvRows(TextRows(2), uuid_column=1)
    row = framing.marshal(["a", "b"], UUID_TEXT)
    errors: list[CorruptMessage] = []
    content = b"x,y,z" + row + row
    [read] = ReadUncommitted(framing, "j", [content], 0, on_corrupt=errors.append)
    assert [error.offset for error in errors] == [0]
    assert read.end == len(content)
