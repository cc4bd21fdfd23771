"""A journal's registers: the check by an append, and the registers after its commit. Pure."""

from __future__ import annotations

from typing import Final

from coranto import labels
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb

MAX_REGISTERS_BYTES: Final = 64 << 10
"""The largest encoded size of a journal's registers, because every proposal and commit record has all of them.

A stream's segment with 64 writers and all of its fences takes less than half of it.
"""


def match(request: pb.AppendRequest, registers: pb.LabelSet) -> bool:
    """Return True if the registers match the append's selector. Empty registers match unless the append is strict."""
    if not request.HasField("check_registers"):
        return True
    return not (registers.labels or is_strict(request)) or labels.matches(request.check_registers, registers)


def is_strict(request: pb.AppendRequest) -> bool:
    """Return True if the append's check includes the register `labels.HELD`, and so fails on lost registers.

    Lost registers are empty. Empty registers pass every other check.
    """
    if not request.HasField("check_registers"):
        return False
    return any(label.name == labels.HELD for label in request.check_registers.include.labels)


def change(request: pb.AppendRequest) -> bool:
    """Return True if the append changes registers. Such an append must have content."""
    return request.HasField("union_registers") or request.HasField("subtract_registers")


def after(request: pb.AppendRequest, registers: pb.LabelSet) -> pb.LabelSet:
    """Return the registers after the append: subtract first, then union, which replaces existing values.

    Raises InvalidInput if they would grow beyond MAX_REGISTERS_BYTES. Larger registers, from an earlier version, may
    keep their size or shrink.
    """
    result = registers
    if request.HasField("subtract_registers"):
        result = labels.subtract(result, request.subtract_registers)
    if request.HasField("union_registers"):
        result = labels.union(request.union_registers, result)
    if result is not registers:
        _require_bounded(registers, result)
    return result


def replaced(request: pb.AppendRequest, registers: pb.LabelSet) -> pb.LabelSet | None:
    """Return the registers after an append that checks some of them by name and value, and replaces one value.

    This is a fast path for writers of streams: one pass validates the append, matches the registers, and computes the
    new ones. None means that the append has another form or does not match; it may still be valid.
    """
    check, replacements = request.check_registers, request.union_registers.labels
    if len(replacements) != 1 or check.exclude.labels or request.content or request.HasField("subtract_registers"):
        return None
    new = replacements[0]
    name_replaced, position, last = new.name, -1, ""
    asked = iter(check.include.labels)
    wanted = next(asked, None)
    for index, label in enumerate(registers.labels):
        name = label.name
        if name == last:
            return None  # It has several values.
        last = name
        if wanted is not None and name == wanted.name:
            if wanted.value and wanted.value != label.value:
                return None
            wanted = next(asked, None)
        if name == name_replaced:
            position = index
    if wanted is not None or position < 0 or new.prefix or not labels.is_plain_value(new.value):
        return None
    result = pb.LabelSet()
    result.CopyFrom(registers)
    result.labels[position].value = new.value
    if len(new.value) > len(registers.labels[position].value):
        try:
            _require_bounded(registers, result)
        except InvalidInput:
            return None
    return result


def _require_bounded(before: pb.LabelSet, result: pb.LabelSet) -> None:
    size = result.ByteSize()
    if size <= MAX_REGISTERS_BYTES or size <= before.ByteSize():
        return
    raise InvalidInput(
        f"the journal's registers would take {size} bytes, which is more than {MAX_REGISTERS_BYTES}; "
        "subtract registers that are no longer needed, or keep such data in the journal's content",
        field="union_registers",
    )
