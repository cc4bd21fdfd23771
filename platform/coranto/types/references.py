"""References to message types: `shop.Order`, `shop.Order@3`, and the labels of journals that name a type.

The label `app.gazette.dev/message-type` of a journal names the type of its messages, and never a version: its messages
may be of all versions. An additional `content-type` has to agree with the type's framing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from coranto import labels
from coranto.errors import InvalidInput
from coranto.names import shown
from coranto.types.definitions import MessageType, validate_type_name
from coranto.wire import protocol_pb2 as pb

_VERSION: Final = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_SHOWN: Final = 10


class TypeReference(NamedTuple):
    """The name of a type, and one of its versions; None: the latest."""

    name: str
    version: int | None = None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"


def parse_reference(text: str, *, field: str = "type") -> TypeReference:
    """Return the reference of a text: a name, optionally followed by `@` and a version. Raises InvalidInput."""
    name, at, version = text.partition("@")
    try:
        validate_type_name(name)
    except InvalidInput as error:
        raise InvalidInput(error.message, field=field) from error
    if at and not _VERSION.fullmatch(version):
        raise InvalidInput(f"{shown(text)} has no version after @: write it as {name}@3", field=field)
    return TypeReference(name, int(version) if at else None)


def type_named_by(journals: Mapping[str, pb.LabelSet], *, field: str = "journals") -> str:
    """Return the name of the type that the labels of all journals name.

    Raises InvalidInput, which lists the journals by type, if a journal names no type, or if they name several types.
    """
    by_type: dict[str, list[str]] = {}
    for journal, found in sorted(journals.items()):
        by_type.setdefault(labels.value_of(found, labels.MESSAGE_TYPE), []).append(journal)
    if not by_type:
        raise InvalidInput("there are no journals whose labels could name a message type", field=field)
    if len(by_type) == 1 and "" not in by_type:
        return next(iter(by_type))
    summary = "; ".join(f"{name or 'none'}: {_listed(members)}" for name, members in sorted(by_type.items()))
    if list(by_type) == [""]:
        raise InvalidInput(
            f"no journal has the label {labels.MESSAGE_TYPE} ({_listed(by_type[''])}): add it, or name a message type",
            field=field,
        )
    raise InvalidInput(
        f"journals name different message types ({summary}): select journals of one type, or name a message type",
        field=field,
    )


def _listed(journals: list[str]) -> str:
    more = len(journals) - _SHOWN
    return ", ".join(journals[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def require_content_type(journal: str, found: pb.LabelSet, definition: MessageType, *, field: str = "journals") -> None:
    """Raise InvalidInput for a journal whose `content-type` differs from the type's. The label may be missing."""
    summary = labels.value_of(found, labels.CONTENT_TYPE)
    if summary and definition.content_type and summary != definition.content_type:
        raise InvalidInput(
            f"journal {journal} has {labels.CONTENT_TYPE} {summary}, and messages of {definition.name} are "
            f"{definition.content_type}: correct the label, or leave the journal out",
            field=field,
        )
