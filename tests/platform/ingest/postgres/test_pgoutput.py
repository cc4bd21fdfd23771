"""Messages of pgoutput as in the server's documentation."""

from __future__ import annotations

import struct

import pytest

from coranto.errors import CorruptData
from coranto.ingest.postgres.pgoutput import (
    UNCHANGED,
    Column,
    RowChange,
    TableRelation,
    TransactionBegin,
    TransactionCommit,
    Truncate,
    format_lsn,
    is_change,
    parse,
    parse_lsn,
    table_of,
)

NEW = struct.pack(">Hc", 3, b"t") + struct.pack(">I", 2) + b"ab" + b"n" + b"u"
OLD = struct.pack(">Hc", 2, b"n") + b"n"
OID = struct.pack(">I", 16385)
COLUMNS = b"\x01id\0" + struct.pack(">Ii", 20, -1) + b"\x00cents\0" + struct.pack(">Ii", 1700, 655366)
MESSAGES = {
    b"B" + struct.pack(">qqi", 0x100000002, 5, 771): TransactionBegin(0x100000002, 5, 771),
    b"C\0" + struct.pack(">qqq", 1, 9, 5): TransactionCommit(9),
    b"R" + OID + b"public\0orders\0f" + struct.pack(">H", 2) + COLUMNS: TableRelation(
        16385, "public", "orders", "f", (Column("id", 20, -1, True), Column("cents", 1700, 655366, False))
    ),
    b"I" + OID + b"N" + NEW: RowChange(16385, None, [b"ab", None, UNCHANGED], False, False),
    b"U" + OID + b"N" + NEW: RowChange(16385, None, [b"ab", None, UNCHANGED], False, True),
    b"U" + OID + b"O" + OLD + b"N" + NEW: RowChange(16385, [None, None], [b"ab", None, UNCHANGED], True, True),
    b"U" + OID + b"K" + OLD + b"N" + NEW: RowChange(16385, [None, None], [b"ab", None, UNCHANGED], False, True),
    b"D" + OID + b"O" + OLD: RowChange(16385, [None, None], None, True, False),
    b"D" + OID + b"K" + OLD: RowChange(16385, [None, None], None, False, False),
    b"T" + struct.pack(">IBII", 2, 1, 16385, 16390): Truncate((16385, 16390)),
    b"O" + struct.pack(">q", 5) + b"other\0": None,
    b"Y" + OID + b"public\0mood\0": None,
}


@pytest.mark.parametrize("content", MESSAGES, ids=lambda content: chr(content[0]))
def test_each_message(content: bytes) -> None:
    assert parse(content) == MESSAGES[content]


def test_changes_name_their_table() -> None:
    changes = [content for content, message in MESSAGES.items() if isinstance(message, RowChange)]
    assert [content for content in MESSAGES if is_change(content)] == changes
    assert {table_of(content) for content in changes} == {16385}
    assert not is_change(b"")
    with pytest.raises(CorruptData, match="cannot be read"):
        table_of(b"I\0\0")


@pytest.mark.parametrize("content", [each for each in MESSAGES if each[0] not in b"OY"], ids=lambda each: chr(each[0]))
def test_a_truncated_message_is_an_error(content: bytes) -> None:
    for end in range(len(content)):
        if content[:1] == b"C" and end > 18:
            continue  # The rest is the time.
        with pytest.raises(CorruptData):
            parse(content[:end])


@pytest.mark.parametrize("content", [b"?", b"I" + OID + b"N" + struct.pack(">Hc", 1, b"b")])
def test_unknown_messages_are_an_error(content: bytes) -> None:
    with pytest.raises(CorruptData, match="unknown kind"):
        parse(content)


def test_positions() -> None:
    assert format_lsn(0x16_0374_D848) == "16/374D848"
    assert parse_lsn("16/374D848") == 0x16_0374_D848
    for text in ("", "16", "x/1", "1/y"):
        with pytest.raises(CorruptData, match="not a position in the log"):
            parse_lsn(text)
