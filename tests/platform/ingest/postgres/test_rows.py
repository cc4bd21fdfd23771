"""Messages of a transaction as rows: their numbers, their text, and poison between them."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest

from coranto.errors import CorruptData
from coranto.ingest.postgres.options import PostgresOptions
from coranto.ingest.postgres.pgoutput import Column, TableRelation, TransactionBegin
from coranto.ingest.postgres.rows import Shape, TableRows
from coranto.ingest.postgres.values import ColumnType, ColumnTypes
from coranto.ingest.source import Poison, SourceRow
from coranto.messages.json_codec import encode_json

BEGIN = TransactionBegin(0x100000002, 5_000_001, -1)
COLUMNS = {"id": 20, "name": 25, "price": 1700, "rate": 701, "ok": 16, "at": 1184, "many": 1016}
RELATION = TableRelation(
    16385, "public", "orders", "d", tuple(Column(name, kind, -1, name == "id") for name, kind in COLUMNS.items())
)


def made(**options: Any) -> tuple[TableRows, Shape]:
    types = ColumnTypes()
    types.add(1016, ColumnType(1016, element=20))
    rows = TableRows(PostgresOptions("postgresql://x/y", "shop", **options), types, lambda numbers: None)
    return rows, rows.shape(RELATION, RELATION.columns, ("id",))


def insert(*values: str | None, kind: bytes = b"I") -> bytes:
    parts = [
        b"n" if each is None else b"t%b%b" % (struct.pack(">I", len(each.encode())), each.encode()) for each in values
    ]
    return b"%b%bN%b%b" % (kind, struct.pack(">I", 16385), struct.pack(">H", len(values)), b"".join(parts))


def test_the_text_of_random_rows_equals_their_fields() -> None:
    chosen = random.Random(9)
    rows, shape = made()
    texts = ["", "é 🙂", 'a "quoted"\n\\ text', "x" * 100_000, "\x01\x7f"]
    times = ["2026-11-29 12:00:00.123456+00", "infinity", "0044-03-15 00:00:00+00 BC", "10000-01-01 00:00:00+00"]
    payloads = []
    for number in range(200):
        others = (
            *(chosen.choice([None, *texts]), chosen.choice([None, "1.10", "NaN"])),
            *(chosen.choice([None, "1e+300", "0.1", "Infinity"]), chosen.choice([None, "t", "f"])),
            *(chosen.choice([None, *times]), chosen.choice([None, "{}", "{1,NULL,-3}", "{{1},{2}}"])),
        )
        payloads.append(insert(str(number), *others))
    for number, row in enumerate(rows.changed(BEGIN, 1, [shape] * len(payloads), payloads)):
        assert isinstance(row, SourceRow)
        assert row.key == f"public.orders/{number}"
        assert row.fields["id"] == number
        assert row.text == encode_json(row.fields)
        assert json.loads(b"{%b}" % row.meta)["seq"] == number + 1


def test_times_have_the_form_of_message_types() -> None:
    rows, shape = made()
    times = ["2026-11-29 12:00:00.5+00", "0044-03-15 00:00:00+00 BC", "-infinity"]
    payloads = [insert("1", None, None, None, None, each, None) for each in times]
    found = [row.fields["at"] for row in rows.changed(BEGIN, 1, [shape] * 3, payloads) if isinstance(row, SourceRow)]
    assert found == ["2026-11-29T12:00:00.5Z", "0044-03-15T00:00:00Z BC", "-infinity"]


def test_all_changes_are_numbered_including_those_without_rows() -> None:
    one = insert("1", *[None] * 6)
    toasted = one[:-1] + b"u"
    for truncate, names in (("event", ("public.orders", "public.lines")), ("fail", ("public.orders",)), ("skip", ())):
        rows, shape = made(truncate=truncate)
        payloads = [one, b"", toasted.replace(b"I", b"U", 1), one]
        found = list(rows.changed(BEGIN, 7, [shape, names, shape, shape], payloads))
        kinds = [type(each) for each in found]
        middle = [Poison if truncate == "fail" else SourceRow] * len(names)
        assert kinds == [SourceRow, *middle, Poison, SourceRow]
        numbers = [json.loads(b"{%b}" % each.meta)["seq"] for each in found if isinstance(each, SourceRow)]
        assert numbers == [7, *[8] * (len(names) if truncate == "event" else 0), 10]
        [lacking] = [each for each in found if isinstance(each, Poison) and "lacks many" in each.problem]
        assert lacking.place.startswith("change 9 of the transaction at 1/2 (xid 4294967295), table public.orders")
        assert lacking.key == b"public.orders/1"


def test_a_truncated_message_is_an_error_after_the_earlier_rows() -> None:
    rows, shape = made()
    one = insert("1", *[None] * 6)
    found = rows.changed(BEGIN, 1, [shape] * 2, [one, one[:-1]])
    assert isinstance(next(found), SourceRow)
    with pytest.raises(CorruptData, match="cannot be read"):
        next(found)
