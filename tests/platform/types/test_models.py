"""Message types of pydantic models, dataclasses and typed dicts."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID, uuid4

import pydantic
import pytest
from pydantic import BaseModel, Field

from coranto.errors import InvalidInput
from coranto.messages import TypedLines
from coranto.types import CsvForm, JsonForm, format_fields, type_of_model
from coranto.types.writing import require_message


class Kind(enum.Enum):
    PLAIN = "plain"
    RUSH = "rush"


class Rank(enum.IntEnum):
    ONE = 1


class Line(BaseModel):
    item: str
    count: int | None = None


class Order(BaseModel):
    id: int
    at: pydantic.AwareDatetime
    day: dt.date
    local: pydantic.NaiveDatetime | None = None
    price: Annotated[Decimal, Field(max_digits=12, decimal_places=2)]
    rate: Decimal
    kind: Kind
    rank: Rank
    shape: Literal["round", "square"]
    lines: list[Line]
    tags: dict[str, float]
    parts: tuple[int, ...]
    customer: UUID
    token: bytes
    alias: str = Field(serialization_alias="Alias")
    uuid: UUID | None = None


ORDER = Order(
    id=1,
    at=dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC),
    day=dt.date(2024, 2, 29),
    price=Decimal("12.50"),
    rate=Decimal("0.1234567"),
    kind=Kind.RUSH,
    rank=Rank.ONE,
    shape="round",
    lines=[Line(item="lamp"), Line(item="bulb", count=2)],
    tags={"a": 1.5},
    parts=(1, 2),
    customer=uuid4(),
    token=b"x",
    alias="y",
)


def test_a_model_becomes_the_fields_of_its_json():
    found = type_of_model(Order, "shop.Order", JsonForm("/uuid"), "Orders.")
    assert (found.name, found.description, found.form) == ("shop.Order", "Orders.", JsonForm("/uuid"))
    assert format_fields(found.fields) == (
        "id BIGINT NOT NULL, at TIMESTAMP NOT NULL, day DATE NOT NULL, local TIMESTAMP_NTZ, "
        "price DECIMAL(12, 2) NOT NULL, rate STRING NOT NULL, kind STRING NOT NULL, rank BIGINT NOT NULL, "
        "shape STRING NOT NULL, lines ARRAY<STRUCT<item: STRING NOT NULL, count: BIGINT>> NOT NULL, "
        "tags MAP<STRING, DOUBLE> NOT NULL, parts ARRAY<BIGINT> NOT NULL, customer STRING NOT NULL, "
        "token STRING NOT NULL, Alias STRING NOT NULL"
    )


def test_messages_of_a_model_fit_its_type():
    framing = TypedLines(Order, "/uuid")
    written = framing.lines.unmarshal(framing.marshal(ORDER, str(uuid4())))
    require_message(written, type_of_model(Order, form=JsonForm("/uuid")).fields, ("uuid",))


def test_dataclasses_and_typed_dicts_become_types():
    @dataclasses.dataclass
    class Row:
        name: str
        count: int | None
        is_new: bool

    class Loose(TypedDict):
        name: str
        count: NotRequired[int]

    assert format_fields(type_of_model(Row, form=CsvForm()).fields) == (
        "name STRING NOT NULL, count BIGINT, is_new BOOLEAN NOT NULL"
    )
    found = type_of_model(Loose)
    assert found.name == "Loose"
    assert format_fields(found.fields) == "name STRING NOT NULL, count BIGINT"


class Endless(BaseModel):
    inner: Endless | None = None


class Mixed(BaseModel):
    x: int | str


class Anything(BaseModel):
    x: Any


class Pair(BaseModel):
    x: tuple[int, str]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Endless, "Endless contains itself"),
        (Mixed, "x is .*more than one type"),
        (Anything, "x is .*has no type here"),
        (Pair, "x is .*has no type here"),
        (int, "int is not a model, dataclass or typed dict"),
        (dict[str, int], r"dict\[str, int\] is not a model, dataclass or typed dict"),
    ],
)
def test_models_without_types_are_refused(kind, problem):
    with pytest.raises(InvalidInput, match=problem):
        type_of_model(kind)


def test_digits_may_be_bounded_in_an_optional_decimal():
    class Priced(BaseModel):
        price: Annotated[Decimal, Field(max_digits=9, decimal_places=2)] | None = None
        other: Decimal | None = Field(None, max_digits=5, decimal_places=1)

    assert format_fields(type_of_model(Priced).fields) == "price DECIMAL(9, 2), other DECIMAL(5, 1)"


def test_excluded_fields_are_not_in_the_type():
    class Account(BaseModel):
        id: int
        password: str = Field("x", exclude=True)

    found = type_of_model(Account)
    assert format_fields(found.fields) == "id BIGINT NOT NULL"
    require_message(Account(id=1).model_dump(mode="json"), found.fields)


def test_the_uuid_is_omitted_at_any_place():
    class Meta(BaseModel):
        uuid: UUID

    class Traced(Meta):
        trace: str

    class Event(BaseModel):
        meta: Meta
        id: int

    class TracedEvent(Event):
        meta: Traced

    at = JsonForm("/meta/uuid")
    assert format_fields(type_of_model(Event, form=at).fields) == "id BIGINT NOT NULL"
    assert format_fields(type_of_model(TracedEvent, form=at).fields) == (
        "meta STRUCT<trace: STRING NOT NULL> NOT NULL, id BIGINT NOT NULL"
    )
