"""Messages of many types: each gets a UUID, is framed, read back, and used in transactions."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from decimal import Decimal
from typing import Any, Self
from uuid import UUID

import pyarrow as pa
import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.arrow_payload import ArrowPayload, arrow_frames
from coranto.messages.csv_rows import CsvRows, NamedRows
from coranto.messages.fixed_frame import FixedFrame, encode_frame
from coranto.messages.framing import Framing, JsonLines, iter_messages
from coranto.messages.models import ModelRows, Models, TypedLines
from coranto.messages.payloads import OwnPayload, ProtobufJson, ProtobufPayload
from coranto.messages.publisher import TransactionBuilder
from coranto.messages.sequencer import Sequencer, read_committed
from coranto.messages.uuids import ProducerClock
from coranto.wire import protocol_pb2 as pb
from tests.platform.messages.typed import BATCHES, UUID_1, UUID_2, A, Opaque


class Meta(BaseModel):
    uuid: UUID | None = None


class Order(BaseModel):
    """A model with a field for its UUID."""

    number: int
    price: Decimal = Decimal(0)
    at: dt.datetime | None = None
    meta: Meta | None = Field(default=None, alias="_meta")
    model_config = ConfigDict(populate_by_name=True)


class Strict(BaseModel):
    """A model without a field for a UUID, which refuses unknown keys."""

    model_config = ConfigDict(extra="forbid")
    number: int
    tags: frozenset[str] = frozenset()


class Item(BaseModel):
    """A flat model, like rows."""

    number: int
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float
    note: str | None = None
    uuid: UUID | None = None


class Row(TypedDict):
    a: int


class OptedOut(Opaque):
    """A class that cannot represent UUIDs."""

    def set_uuid(self, uuid: UUID) -> None:
        pass

    def get_uuid(self) -> UUID | None:
        return None

    def to_bytes(self) -> bytes:
        return self.text.encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Self:
        return cls(payload.decode())


TYPES: dict[str, tuple[Framing[Any], list[Any]]] = {
    "dicts": (JsonLines(), [{"a": n} for n in range(3)]),
    "pydantic models": (TypedLines(Order), [Order(number=n, price=Decimal("1.10")) for n in range(3)]),
    "pydantic models that forbid other keys": (TypedLines(Strict), [Strict(number=n) for n in range(3)]),
    "dataclasses": (TypedLines(Point, "/id"), [Point(n, -n) for n in range(3)]),
    "typed dicts": (TypedLines(Row), [Row(a=n) for n in range(3)]),
    "protobuf in lines": (TypedLines(ProtobufJson(pb.Label)), [pb.Label(name="n", value=str(n)) for n in range(3)]),
    "protobuf in frames": (FixedFrame(ProtobufPayload(pb.Label, "value")), [pb.Label(name=f"{n}") for n in range(3)]),
    "batches": (arrow_frames(), BATCHES),
    "own classes": (FixedFrame(OwnPayload(Opaque)), [Opaque(f"{n}") for n in range(3)]),
    "dicts in rows": (CsvRows(NamedRows(["a", "b"])), [{"a": f"{n}", "b": ""} for n in range(3)]),
    "dataclasses in rows": (CsvRows(ModelRows(Point)), [Point(n, -n, "é,") for n in range(3)]),
    "models in rows": (CsvRows(ModelRows(Item), uuid_column=1), [Item(number=n, name="a") for n in range(3)]),
}


def without_uuid(message: Any) -> Any:
    """Return a read message as the application wrote it."""
    match message:
        case Order():
            return message.model_copy(update={"meta": None})
        case Point():
            return dataclasses.replace(message, uuid=None)
        case pb.Label():
            return message.name
        case pa.RecordBatch():
            return message.to_pydict()
        case dict():
            return {key: value for key, value in message.items() if key != "_meta"}
    return message


@pytest.mark.parametrize("name", TYPES)
def test_every_type_works_in_transactions(name: str) -> None:
    framing, messages = TYPES[name]
    builder = TransactionBuilder(A, ProducerClock(lambda: 0), framing)
    content = b""
    for message in messages[:2]:
        builder.add("j", message)
    content += builder.take("j", 1 << 20)
    for intent in (builder.ack_intents(), builder.commit()):
        assert list(intent) == ["j"]
        content += intent.get("j", b"")
    builder.finish()
    for message in messages[2:]:
        builder.add("j", message)
    content += builder.take("j", 1 << 20)
    content += builder.rollback_intents().get("j", b"")

    # In arbitrary chunks, and all content twice.
    chunks = [content[at : at + 11] for at in range(0, len(content), 11)]
    read = list(iter_messages(framing, "j", chunks, 0))
    assert [envelope.flags for envelope in read] == [1, 1, 2, 2, 1, 2]  # The intents appear twice.
    again = list(iter_messages(framing, "j", [content], len(content)))
    committed = list(read_committed([*read, *again], Sequencer(), lambda _: ()))
    assert [without_uuid(envelope.message) for envelope in committed] == [without_uuid(m) for m in messages[:2]]
    assert {envelope.flags for envelope in committed} == {1}


def test_a_model_with_a_field_at_the_pointer_gets_its_uuid() -> None:
    framing = TypedLines(Order)
    order = Order(number=1, at=dt.datetime(2024, 2, 29, tzinfo=dt.UTC), _meta=Meta(uuid=UUID_2))
    line = framing.marshal(order, UUID_1)
    assert json.loads(line) == {
        "_meta": {"uuid": str(UUID_1)},
        "number": 1,
        "price": "0",
        "at": "2024-02-29T00:00:00Z",
    }
    assert order.meta == Meta(uuid=UUID_2)  # The caller's own UUID is unchanged.
    [envelope] = iter_messages(framing, "j", [line], 0)
    assert envelope.message.meta == Meta(uuid=UUID_1)
    assert envelope.uuid == str(UUID_1)
    [point] = iter_messages(
        TypedLines(Point, "/uuid"), "j", [TypedLines(Point, "/uuid").marshal(Point(1, 2), UUID_1)], 0
    )
    assert point.message == Point(1, 2, uuid=UUID_1)


def test_lines_of_models_are_readable_as_plain_lines() -> None:
    line = TypedLines(Strict).marshal(Strict(number=3, tags=frozenset({"a"})), UUID_1)
    [as_dict] = iter_messages(JsonLines(), "j", [line], 0)
    assert as_dict.message == {"_meta": {"uuid": str(UUID_1)}, "number": 3, "tags": ["a"]}
    [as_model] = iter_messages(TypedLines(Strict), "j", [line], 0)
    assert as_model.message == Strict(number=3, tags=frozenset({"a"}))


def test_messages_of_another_type_are_corrupt_only_when_decoded() -> None:
    [envelope] = iter_messages(TypedLines(Order), "j", [b'{"number":"many","price":[]}\n'], 70)
    assert envelope.clock == 0
    with pytest.raises(CorruptMessage, match=r"not a Order: number: .*; price: ") as caught:
        _ = envelope.message
    assert caught.value.offset == 70
    [envelope] = iter_messages(TypedLines(ProtobufJson(pb.Label)), "j", [b'{"name":5}\n'], 0)
    with pytest.raises(CorruptMessage, match=r"not a protocol\.Label"):
        _ = envelope.message
    [envelope] = iter_messages(FixedFrame(ProtobufPayload(pb.Label, None)), "j", [encode_frame(b"\xff")], 0)
    with pytest.raises(CorruptMessage, match=r"not a protocol\.Label"):
        _ = envelope.message


def test_messages_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must be of Order, not str"):
        TypedLines(Order).marshal("text", UUID_1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="must be a JSON object, which int is not"):
        TypedLines(int).marshal(3, UUID_1)
    with pytest.raises(InvalidInput, match="Opaque is not a type that pydantic understands"):
        TypedLines(Opaque)
    with pytest.raises(InvalidInput, match="message cannot be written"):
        FixedFrame(ProtobufPayload(pb.Label, "value")).marshal(pb.LabelSet(), UUID_1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"must be a pyarrow.RecordBatch, not dict"):
        ArrowPayload().encode({}, UUID_1)
    with pytest.raises(InvalidInput, match="the field tags is not a text or a number but list"):
        CsvRows(ModelRows(Strict)).marshal(Strict(number=1), UUID_1)
    with pytest.raises(InvalidInput, match="required but has no place"):
        JsonLines(None, require_uuid=True)


OPTED_OUT: list[tuple[Framing[Any], Any]] = [
    (FixedFrame(OwnPayload(OptedOut)), OptedOut("text")),
    (FixedFrame(ProtobufPayload(pb.Label, None)), pb.Label(name="a")),
    (JsonLines(None), {"a": 1}),
    (TypedLines(Row, None), Row(a=1)),
    (CsvRows(ModelRows(Point), uuid_column=None), Point(1, 2)),
]


@pytest.mark.parametrize(("framing", "message"), OPTED_OUT)
def test_types_without_uuid_fall_back_to_at_least_once(framing: Framing[Any], message: Any) -> None:
    """Each append is delivered, including repetitions. There is nothing to acknowledge or roll back."""
    assert framing.acknowledgement(UUID_2) == b""
    builder = TransactionBuilder(A, ProducerClock(lambda: 0), framing)
    builder.add("j", message)
    content = builder.take("j", 1 << 20)
    assert builder.ack_intents() == {}
    assert builder.commit() == {}
    builder.finish()
    builder.add("j", message)
    content += 2 * builder.take("j", 1 << 20)
    assert builder.rollback_intents() == {}
    envelopes = list(iter_messages(framing, "j", [content], 0))
    assert [envelope.clock for envelope in envelopes] == [0, 0, 0]
    sequencer: Sequencer[Any] = Sequencer()
    committed = [envelope.message for envelope in read_committed(envelopes, sequencer, lambda _: ())]
    assert committed == [message] * 3
    assert sequencer.checkpoint()["j"].producers == {}


def test_an_empty_field_is_none_if_that_is_the_default() -> None:
    framing = CsvRows(ModelRows(Point))
    line = framing.marshal(Point(1.5, 2), UUID_1)
    assert line == f"{UUID_1},1.5,2.0,,\n".encode()
    [row] = iter_messages(framing, "j", [line], 0)
    assert row.message == Point(1.5, 2, None, None)
    [row] = iter_messages(framing, "j", [line.replace(b"1.5", b"")], 0)
    with pytest.raises(CorruptMessage, match="not a Point: x: "):
        _ = row.message


def test_models_can_be_used_without_a_framing() -> None:
    models = Models(Row)
    assert models.to_json(Row(a=1)) == {"a": 1}
    assert models.from_json(b'{"a":1}', JsonLines()) == {"a": 1}
