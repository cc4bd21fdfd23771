"""The differing fields of two specs, as text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from coranto.specs.durations import format_duration
from coranto.wire import protocol_pb2 as pb


def differences(old: Message, new: Message, path: str = "") -> Iterator[str]:
    """Yield `field: old → new` for each differing field of two messages of one type."""
    for field in old.DESCRIPTOR.fields:
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        where = f"{path}{field.name}"
        if isinstance(before, Message) and not isinstance(before, Duration | pb.LabelSet):
            yield from differences(before, after, f"{where}.")
        else:
            yield f"{where}: {_text(field, before)} → {_text(field, after)}"


def _text(field: Any, value: object) -> str:
    if isinstance(value, Duration):
        return format_duration(value)
    if isinstance(value, pb.LabelSet):
        return ", ".join(f"{label.name}={label.value}" for label in value.labels) or "none"
    if field.enum_type is not None and isinstance(value, int):
        found = field.enum_type.values_by_number.get(value)
        return str(found.name if found is not None else value)
    if field.is_repeated and isinstance(value, Iterable):
        return ", ".join(" ".join(str(item).split()) for item in value) or "none"
    return str(value) if value != "" else "none"
