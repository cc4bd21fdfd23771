"""The framings that the source reads: lines, rows of CSV and fixed frames (option `framing`).

A range of lines may begin anywhere, because the next newline tells where a line begins. Rows of CSV may have newlines
in their fields, and frames have any bytes in them. So a journal of these is read by one task, from the beginning of a
message on.
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from coranto.errors import InvalidInput
from coranto.messages.framing import DEFAULT_UUID_POINTER, JsonLines

if TYPE_CHECKING:
    from coranto.messages.framing import Framing

OPTIONS: Final = {
    "framing": "json: lines of JSON objects (default); lines: any lines, without UUIDs; csv; fixed: fixed frames",
    "uuidPointer": "JSON pointer to a message's UUID: /_meta/uuid (default)",
    "csvColumns": "number of columns of framing=csv, the UUID's included",
    "csvUuidColumn": "the UUID's column of framing=csv, counted from 0 (default 0), or none",
    "descriptorSet": "for framing=fixed: a FileDescriptorSet of protobuf (`protoc --descriptor_set_out`), as base64",
    "messageType": "for framing=fixed: full name of the messages' type in the descriptorSet; without it, no UUIDs",
    "uuidField": "for framing=fixed: field of the messageType with the UUID: uuid (default), or a path as meta.uuid",
}
_OF_FRAMING: Final = {
    "json": ("uuidPointer",),
    "lines": (),
    "csv": ("csvColumns", "csvUuidColumn"),
    "fixed": ("descriptorSet", "messageType", "uuidField"),
}


@dataclass(frozen=True, slots=True)
class CsvRecords:
    """Rows of CSV with `columns` columns, the UUID's included."""

    name = "csv"
    is_text = True

    columns: int
    uuid_column: int | None = 0

    def framing(self) -> Framing[Any]:
        """Return the framing of the rows. Raises InvalidInput for a column that there is not."""
        from coranto.messages.csv_rows import CsvRows, TextRows

        return CsvRows(TextRows(self.columns - (self.uuid_column is not None)), uuid_column=self.uuid_column)


@dataclass(frozen=True, slots=True)
class FixedRecords:
    """Fixed frames, of protobuf messages of a type if one is given. Others have no UUIDs."""

    name = "fixed"
    is_text = False

    descriptors: bytes = b""
    message_type: str = ""
    uuid_field: str = "uuid"

    def framing(self) -> Framing[Any]:
        """Return the framing of the frames. Raises InvalidInput for a type or field that there is not."""
        from coranto.messages.fixed_frame import FixedFrame
        from coranto.messages.payloads import ProtobufPayload

        if not self.message_type:
            return FixedFrame(_Opaque(), "application/octet-stream")
        return FixedFrame(ProtobufPayload(self._kind(), self.uuid_field))

    def _kind(self) -> Any:
        from google.protobuf import descriptor_pb2, message_factory
        from google.protobuf.message import DecodeError

        try:
            known = message_factory.GetMessages(descriptor_pb2.FileDescriptorSet.FromString(self.descriptors).file)
        except (DecodeError, TypeError, KeyError) as error:
            raise InvalidInput(
                f"not a set of file descriptors: {error}; write it by protoc --include_imports --descriptor_set_out",
                field="option descriptorSet",
            ) from error
        if self.message_type not in known:
            raise InvalidInput(
                f"there is no {self.message_type} in the descriptorSet; there are {', '.join(sorted(known))}",
                field="option messageType",
            )
        return known[self.message_type]


class _Opaque:
    """The codec of payloads of which nothing is known."""

    def encode(self, message: bytes | None, uuid: object) -> bytes:
        return message or b""

    def decode(self, payload: bytes) -> bytes:
        return payload

    def uuid_parts(self, payload: bytes) -> None:
        return None


Records: TypeAlias = CsvRecords | FixedRecords
"""A framing of messages that are not lines."""
ReadFraming: TypeAlias = JsonLines | Records


def parse_framing(given: Mapping[str, str], *, tolerant: bool) -> ReadFraming:
    """Return the framing that options choose. Their keys are in lower case. Raises InvalidInput."""
    name = given.get("framing", "json").lower()
    if name not in _OF_FRAMING:
        raise InvalidInput(f"{given['framing']!r} is not one of {', '.join(_OF_FRAMING)}", field="option framing")
    for other, options in _OF_FRAMING.items():
        for option in options:
            if other != name and option.lower() in given:
                raise InvalidInput(f"is for framing={other}, not for {name}: leave it out", field=f"option {option}")
    if name == "json":
        try:
            return JsonLines(given.get("uuidpointer", DEFAULT_UUID_POINTER), tolerant=tolerant)
        except InvalidInput as error:
            raise InvalidInput(error.message, field="option uuidPointer") from error
    if name == "lines":
        return JsonLines(None, tolerant=tolerant)
    records = _csv(given) if name == "csv" else _fixed(given)
    records.framing()  # Raises InvalidInput.
    return records


def require_lines(framing: ReadFraming, what: str) -> JsonLines:
    """Return the framing if it is one of lines. Raises InvalidInput for another; `what` begins its text."""
    if not isinstance(framing, JsonLines):
        raise InvalidInput(f"{what} lines, and not framing={framing.name}", field="option framing")
    return framing


def _csv(given: Mapping[str, str]) -> CsvRecords:
    columns, uuid = given.get("csvcolumns", ""), given.get("csvuuidcolumn", "0")
    if not columns.isascii() or not columns.isdigit() or not int(columns):
        raise InvalidInput(
            f"{columns!r} is not the number of columns: framing=csv needs it, the UUID's column included",
            field="option csvColumns",
        )
    if uuid.lower() == "none":
        return CsvRecords(int(columns), None)
    if not uuid.isascii() or not uuid.isdigit() or int(uuid) >= int(columns):
        raise InvalidInput(
            f"{uuid!r} is neither none nor a column from 0 to {int(columns) - 1}", field="option csvUuidColumn"
        )
    return CsvRecords(int(columns), int(uuid))


def _fixed(given: Mapping[str, str]) -> FixedRecords:
    if ("descriptorset" in given) != ("messagetype" in given):
        raise InvalidInput("goes together with descriptorSet: give both or neither", field="option messageType")
    try:
        descriptors = b64decode(given.get("descriptorset", ""), validate=True)
    except (Base64Error, ValueError) as error:
        raise InvalidInput(f"not base64: {error}", field="option descriptorSet") from error
    return FixedRecords(descriptors, given.get("messagetype", ""), given.get("uuidfield", "uuid"))
