"""Registered types as sources in columns of a shard."""

from __future__ import annotations

import pyarrow as pa
import pytest

from coranto.errors import InvalidInput
from coranto.labels import CONTENT_TYPE, JSON_LINES, MESSAGE_TYPE, label_set
from coranto.messages.column_parser import LineParser
from coranto.types import Catalog, Compatibility, CsvForm, JsonForm, MessageType, TypeVersion, parse_fields
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.runtime.message_types import columns_of

FIELDS = "id BIGINT NOT NULL, at TIMESTAMP, price DECIMAL(5, 2), lines ARRAY<STRUCT<item: STRING>>"


def version(fields: str = FIELDS, form: JsonForm | CsvForm | None = None) -> TypeVersion:
    definition = MessageType("shop.Order", form or JsonForm("/id_of"), parse_fields(fields))
    return TypeVersion(1, definition, Compatibility.BACKWARD, 0.0)


def test_batches_have_the_fields_of_the_type_and_its_uuids() -> None:
    columns = columns_of(version(), misfits=MisfitPolicy.NULLS)
    assert (columns.pointer, columns.misfits) == ("/id_of", MisfitPolicy.NULLS)
    line = b'{"id":1,"at":"2024-02-29T12:00:00Z","price":1.5,"lines":[{"item":"x"}]}\n'
    table, doubtful = LineParser(columns.schema).parse(pa.array([line]))
    assert not doubtful.any()
    [row] = table.to_pylist()
    assert (row["id"], str(row["at"]), str(row["price"]), row["lines"]) == (
        1,
        "2024-02-29 12:00:00+00:00",
        "1.50",
        [{"item": "x"}],
    )


def test_fields_may_be_chosen() -> None:
    assert columns_of(version(), fields=["price", "id"]).schema.names == ["price", "id"]
    assert columns_of(version("id INT, day DATE"), fields=["id"]).schema.names == ["id"]


@pytest.mark.parametrize(
    ("of", "fields", "problem"),
    [
        (version("a STRING", CsvForm()), (), r"shop\.Order@1 has the framing csv, and batches are of JSON"),
        (version(), ("x",), r"shop\.Order@1 has no field x; it has id, at, price, lines"),
        (version("id INT, day DATE"), (), r"day of shop\.Order@1 is DATE, which batches do not have: leave it out"),
        (version("a ARRAY<MAP<STRING, INT>>"), (), r"a\[\] of shop\.Order@1 is MAP<STRING, INT>, which batches"),
    ],
)
def test_messages_that_do_not_come_in_batches_are_refused(
    of: TypeVersion, fields: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        columns_of(of, fields=fields)


def test_the_type_of_a_source_is_that_of_its_label() -> None:
    catalog = Catalog("types/registry")
    catalog.feed(version().to_line())
    labels = label_set({CONTENT_TYPE: JSON_LINES, MESSAGE_TYPE: "shop.Order"})
    assert catalog.find_for({"shop/orders": labels}) == version()
