"""Definitions of message types as YAML documents, such as::

    type: shop.Order
    description: Orders as the shop takes them.
    framing: json
    fields:
      id: BIGINT NOT NULL
      customer: STRING
      lines: "ARRAY<STRUCT<item: STRING NOT NULL, count: INT>>"

`framing` is `json` (default), `csv`, `fixed` or `lines`. There are `uuidPointer` for json, `csvUuidColumn` for csv, and
for fixed `descriptorFile` (a file next to the document) or `descriptorSet` (base64), `messageType` (default: the type's
name) and `uuidField`. `fields` may also be one text. If omitted, they are all fields of a protobuf message.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final

import yaml

from coranto.errors import InvalidInput
from coranto.specs.yaml_fields import dump_document, entries_of, line_error, line_of, read_document, read_text
from coranto.types.definitions import KEYS, MessageType

_FILE: Final = "descriptorFile"
_KEYS: Final = (*KEYS, _FILE)


def parse_type_document(text: str, folder: Path) -> MessageType:
    """Return the definition in a document. `folder` has the files that it names. Raises InvalidInput."""
    plain = read_document(text, lambda node: _plain(node, folder))
    if plain is None:
        raise InvalidInput("the document is empty; give it the keys type, framing and fields")
    return MessageType.of_plain(plain)


def format_type_document(definition: MessageType) -> str:
    """Return the document of a definition."""
    return dump_document(definition.to_plain())


def _plain(node: yaml.Node, folder: Path) -> dict[str, object]:
    entries = entries_of(node, _KEYS)
    plain: dict[str, object] = {
        name: read_text(entry) for name, entry in entries.items() if name not in ("fields", _FILE)
    }
    if (fields := entries.get("fields")) is not None:
        plain["fields"] = _fields(fields)
    if (file := entries.get(_FILE)) is not None:
        if "descriptorSet" in plain:
            raise line_error(line_of(file), "descriptorSet is given, too; leave one of them out")
        path = folder / read_text(file)
        try:
            plain["descriptorSet"] = base64.b64encode(path.read_bytes()).decode()
        except OSError as error:
            raise line_error(line_of(file), f"{path} cannot be read: {error.strerror}") from error
    return plain


def _fields(node: yaml.Node) -> str | dict[str, str]:
    if isinstance(node, yaml.SequenceNode):
        raise line_error(line_of(node), "fields are no list: write each as `name: TYPE`, without a dash")
    if not isinstance(node, yaml.MappingNode):
        return read_text(node)
    found: dict[str, str] = {}
    for key, value in node.value:
        name = read_text(key)
        if name in found:
            raise line_error(line_of(key), f"the field {name!r} is given twice")
        found[name] = read_text(value)
    return found
