"""A journal's registers: the check by an append, and the registers after its commit. Pure."""

from __future__ import annotations

from typing import Final

from coranto import labels
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb

MAX_REGISTERS_BYTES: Final = 64 << 10
"""The maximum encoded size of a journal's registers, because every proposal and commit record has all of them.

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
    size = result.ByteSize() if result is not registers else 0
    if size > MAX_REGISTERS_BYTES and size > registers.ByteSize():
        raise InvalidInput(
            f"the journal's registers would take {size} bytes, which is more than {MAX_REGISTERS_BYTES}; "
            "subtract registers that are no longer needed, or keep such data in the journal's content",
            field="union_registers",
        )
    return result
