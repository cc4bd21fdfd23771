"""Framings of message types for publishers and readers in Python; JSON framings check each message."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from coranto.errors import InvalidInput
from coranto.messages.csv_rows import CsvRows, NamedRows
from coranto.messages.fixed_frame import FixedFrame
from coranto.messages.framing import Framing, JsonLines, JsonObject
from coranto.types.catalog import TypeVersion
from coranto.types.definitions import CsvForm, FixedForm, JsonForm
from coranto.types.writing import require_message


class CheckedJson(JsonLines):
    """`JsonLines` that reject messages that do not fit a version of a type. Reading is the same as with `JsonLines`."""

    def __init__(self, version: TypeVersion) -> None:
        form = version.definition.form
        if not isinstance(form, JsonForm):
            raise InvalidInput(
                f"{version.name} has the framing {form.name}, and not json: use framing_of", field="version"
            )
        super().__init__(form.uuid_pointer)
        self.version = version

    def marshal(self, message: JsonObject, uuid: str | UUID) -> bytes:
        try:
            require_message(message, self.version.definition.fields, self.path)
        except InvalidInput as error:
            raise InvalidInput(f"does not fit {self.version}: {error.message}", field="message") from error
        return super().marshal(message, uuid)


def framing_of(version: TypeVersion) -> Framing[Any]:
    """Return the framing of a type's messages, for publishers and readers.

    Messages are dicts of JSON, which are checked when they are written; rows of CSV as dicts of texts; or objects of
    the protobuf class. Raises InvalidInput for lines and frames without known fields, because the type does not define
    their content.
    """
    definition = version.definition
    match definition.form:
        case JsonForm():
            return CheckedJson(version)
        case CsvForm(uuid_column):
            return CsvRows(NamedRows([field.name for field in definition.fields]), uuid_column=uuid_column)
        case FixedForm(descriptors, message, uuid_field) if message:
            from coranto.messages.payloads import ProtobufPayload
            from coranto.types.protobuf import message_class

            return FixedFrame(ProtobufPayload(message_class(descriptors, message), uuid_field))
    raise InvalidInput(
        f"{version} has the framing {definition.form.name} of messages without known fields: use a framing of "
        "coranto.messages",
        field="version",
    )
