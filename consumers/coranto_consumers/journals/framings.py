"""The framings of messages that are read in columns: lines, rows of CSV and fixed frames (option `framing`).

A range of lines may begin anywhere: the next newline shows where a line begins. Rows of CSV and frames may contain any
bytes. So with a *record framing*, a range must start where a message starts.
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from coranto.errors import InvalidInput
from coranto.messages.framing import DEFAULT_UUID_POINTER, MARK, JsonLines
from coranto_consumers.journals.discovery import ANY_LABELS, JournalLabels

if TYPE_CHECKING:
    from coranto.messages.csv_rows import CsvRows
    from coranto.messages.fixed_frame import FixedFrame

OPTIONS: Final = {
    "framing": "json: lines of JSON objects (default); lines: any lines, without UUIDs; csv; fixed: fixed frames",
    "uuidPointer": "JSON pointer to a message's UUID: /_meta/uuid (default), or none",
    "csvColumns": "number of columns of framing=csv, the UUID's included",
    "csvUuidColumn": "the UUID's column of framing=csv, counted from 0 (default 0), or none",
    "descriptorFile": "for framing=fixed: a file that `protoc --include_imports --descriptor_set_out` wrote",
    "descriptorSet": "for framing=fixed: the content of such a file as base64, instead of its name",
    "messageType": "for framing=fixed: full name of the messages' type among the descriptors; without it, no UUIDs. "
    "With a registry: name of a message type there, as shop.Order or shop.Order@3",
    "uuidField": "for framing=fixed: field of the messageType with the UUID: uuid (default), a path as meta.uuid, none",
}
_OF_FRAMING: Final = {
    "json": ("uuidPointer",),
    "lines": (),
    "csv": ("csvColumns", "csvUuidColumn"),
    "fixed": ("descriptorFile", "descriptorSet", "messageType", "uuidField"),
}


class AnyLines(JsonLines):
    """Lines of any text. They have no UUIDs, so each counts as committed."""

    has_objects = False

    def __init__(self, *, tolerant: bool = False) -> None:
        super().__init__(None, tolerant=tolerant)


@dataclass(frozen=True, slots=True)
class CsvRecords:
    """Rows of CSV with `columns` columns, the UUID's included. `uuid_column` is counted from 0; None: no UUIDs."""

    name = "csv"
    is_text = True

    columns: int
    uuid_column: int | None = 0
    tolerant: bool = False
    """True: a row that is malformed, or whose UUID cannot be read, is marked, and raises no error."""

    def framing(self) -> CsvRows[Any]:
        """Return the framing of the rows. Raises InvalidInput for a column that does not exist."""
        from coranto.messages.csv_rows import CsvRows, TextRows

        return CsvRows(TextRows(self.columns - (self.uuid_column is not None)), uuid_column=self.uuid_column)

    def payload_of(self, content: bytes) -> bytes:
        """Return the payload of a malformed row, without its newline and byte order mark."""
        return content.removesuffix(b"\n").removeprefix(MARK)


@dataclass(frozen=True, slots=True)
class FixedRecords:
    """Fixed frames. With a `message_type`, their payloads are protobuf messages of it; otherwise they have no UUIDs.

    `descriptors` is the output of `protoc --include_imports --descriptor_set_out`. `uuid_field` is the field with the
    UUID, or a path such as `meta.uuid`; None: the messages have no UUIDs.
    """

    name = "fixed"
    is_text = False

    descriptors: bytes = b""
    message_type: str | None = None
    uuid_field: str | None = "uuid"
    tolerant: bool = False
    """True: a frame that is not a message, or whose UUID cannot be read, is marked, and raises no error."""

    @classmethod
    def from_file(cls, path: Path | str, message_type: str, uuid_field: str | None = "uuid") -> Self:
        """Return the framing of a type from a descriptor file. Raises InvalidInput."""
        return cls(_read(path, "descriptors"), message_type, uuid_field)

    def framing(self) -> FixedFrame[Any]:
        """Return the framing of the frames. Raises InvalidInput for a type or field that does not exist."""
        from coranto.messages.fixed_frame import FixedFrame
        from coranto.messages.payloads import ProtobufPayload

        if self.message_type is None:
            return FixedFrame(_Opaque(), "application/octet-stream")
        return FixedFrame(ProtobufPayload(self.kind(), self.uuid_field))

    def payload_of(self, content: bytes) -> bytes:
        """Return the payload of a frame that is not a message; all content if it is not a frame."""
        from coranto.messages.fixed_frame import MAGIC, encode_frame

        header = len(encode_frame(b""))
        return content[header:] if content.startswith(MAGIC) else content

    def kind(self) -> Any:
        """Return the class of the messages. Raises InvalidInput for a type that does not exist."""
        from coranto.types.protobuf import message_class

        try:
            return message_class(self.descriptors, self.message_type or "")
        except InvalidInput as error:
            raise InvalidInput(error.message, field=f"option {error.field}") from error


class _Opaque:
    def encode(self, message: bytes | None, uuid: object) -> bytes:
        return message or b""

    def decode(self, payload: bytes) -> bytes:
        return payload

    def uuid_parts(self, payload: bytes) -> None:
        return None


Records: TypeAlias = CsvRecords | FixedRecords
ReadFraming: TypeAlias = JsonLines | Records


def name_of(framing: ReadFraming) -> str:
    """Return the name of a framing, as in the option."""
    if isinstance(framing, JsonLines):
        return "lines" if isinstance(framing, AnyLines) else "json"
    return framing.name


def as_tolerant(framing: ReadFraming) -> ReadFraming:
    """Return a copy of a framing that marks messages with an unreadable UUID instead of raising an error."""
    if isinstance(framing, AnyLines):
        return AnyLines(tolerant=True)
    if isinstance(framing, JsonLines):
        return JsonLines(framing.pointer, tolerant=True)
    return replace(framing, tolerant=True)


def parse_framing(given: Mapping[str, str], *, tolerant: bool) -> ReadFraming:
    """Parse the options of a framing. Their keys are in lower case. Raises InvalidInput."""
    name = given.get("framing", "json").lower()
    if name not in _OF_FRAMING:
        raise InvalidInput(f"{given['framing']!r} is not one of {', '.join(_OF_FRAMING)}", field="option framing")
    for other, options in _OF_FRAMING.items():
        for option in options:
            if other != name and option.lower() in given:
                raise InvalidInput(f"is for framing={other}, not for {name}: leave it out", field=f"option {option}")
    if name == "json":
        pointer = given.get("uuidpointer", DEFAULT_UUID_POINTER)
        try:
            return JsonLines(None if pointer == "none" else pointer, tolerant=tolerant)
        except InvalidInput as error:
            raise InvalidInput(error.message, field="option uuidPointer") from error
    if name == "lines":
        return AnyLines(tolerant=tolerant)
    records = _csv(given) if name == "csv" else _fixed(given)
    records.framing()  # Raises InvalidInput.
    return replace(records, tolerant=tolerant)


def labels_of(framing: ReadFraming) -> JournalLabels:
    """Return the required labels of journals with a framing. Framings other than JSON require none."""
    return JournalLabels() if name_of(framing) == "json" else ANY_LABELS


def chosen_framing(framing: ReadFraming | None, uuid_pointer: str) -> ReadFraming:
    """Return the framing for a consumer's parameters. Raises InvalidInput."""
    if framing is None:
        return JsonLines(uuid_pointer)
    if uuid_pointer != DEFAULT_UUID_POINTER:
        raise InvalidInput("is for lines of JSON without the parameter framing; leave one out", field="uuid_pointer")
    if isinstance(framing, JsonLines):
        return framing
    framing.framing()  # Raises InvalidInput.
    return framing


def require_json(framing: ReadFraming, what: str) -> JsonLines:
    """Return the framing if it is lines of JSON. Raises InvalidInput otherwise; `what` begins the message."""
    if not isinstance(framing, JsonLines) or isinstance(framing, AnyLines):
        raise InvalidInput(f"{what} lines of JSON, and not framing={name_of(framing)}", field="option framing")
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
    sources = [name for name in ("descriptorFile", "descriptorSet") if name.lower() in given]
    if len(sources) > 1:
        raise InvalidInput("descriptorSet is given, too; leave one of them out", field="option descriptorFile")
    if bool(sources) != ("messagetype" in given):
        raise InvalidInput(
            "goes together with descriptorFile or descriptorSet: give both or neither", field="option messageType"
        )
    if not sources:
        if "uuidfield" in given:
            raise InvalidInput("is a field of the messageType: name that, too", field="option uuidField")
        return FixedRecords()
    try:
        descriptors = (
            _read(given["descriptorfile"], "option descriptorFile")
            if "descriptorfile" in given
            else b64decode(given["descriptorset"], validate=True)
        )
    except (Base64Error, ValueError) as error:
        raise InvalidInput(f"not base64: {error}", field="option descriptorSet") from error
    field = given.get("uuidfield", "uuid")
    return FixedRecords(descriptors, given["messagetype"], None if field.lower() == "none" else field)


def _read(path: Path | str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror}; it is a file of the driver", field=field
        ) from error
