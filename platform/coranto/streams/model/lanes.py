"""Lanes: producer ids that a multi-key writer uses for consecutive transactions. Pure.

A reader remembers each producer of a segment. So a writer uses few producer ids, and reuses one once its previous
transaction has ended in all segments. A late acknowledgement of the previous transaction must not end the next one: a
process that recovers the stream may have been paused for hours before it appends decided acknowledgements.

Therefore the registers of a segment name the transaction that is in progress on each lane:

===============================  =====================================================================================
`coranto.dev/lane-<producer>`    the producer's transaction whose events are in the segment, and whose end is not
===============================  =====================================================================================

The append of a transaction's events adds the register, on the condition that it is absent. The append of its end
removes it, on the condition that it still names this transaction. So each end is applied once, and registers hold only
lanes with transactions in progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Final, NamedTuple

from coranto import labels
from coranto.errors import CorruptData
from coranto.messages.uuids import ProducerId
from coranto.streams.model.stream import HELD_LABEL, RESTORED_LABEL
from coranto.wire import protocol_pb2 as pb

LANE_PREFIX: Final = "coranto.dev/lane-"
MAX_LANES: Final = 32
"""Maximum transactions in progress for one writer. A lane takes about 100 bytes of the 64 KiB of registers."""
CROWDED_LANES: Final = 64
"""A writer removes the abandoned lanes of a segment once there are this many.

Each proposal of a segment contains all its registers, so they should stay small.
"""
_ABANDONED: Final = 600 * 10_000_000 << 4  # Ten minutes, as a difference of clocks.


class LaneUse(NamedTuple):
    """The use of a lane by one transaction. `begin` is a clock below its events' clocks."""

    producer: ProducerId
    txn: str
    begin: int

    @property
    def label(self) -> str:
        return LANE_PREFIX + self.producer.hex()

    @property
    def value(self) -> str:
        return f"{self.txn}.{self.begin:x}"

    @classmethod
    def decode(cls, label: str, value: str) -> LaneUse:
        """Decode a register. Raises CorruptData."""
        txn, _, begin = value.partition(".")
        try:
            return cls(ProducerId(bytes.fromhex(label.removeprefix(LANE_PREFIX))), txn, int(begin, 16))
        except ValueError as error:
            raise CorruptData(f"{label}={value} is not a register of a lane: {error}") from error


class LanePool:
    """Pool of one writer's lanes. A lane is reused only after its last transaction is recorded as ended.

    Until then, a process that recovers the stream may assume that the transaction has not ended. A lane whose
    transaction is never passed to `add_ended`, such as after a failure, is not used again.
    """

    def __init__(self, new: Callable[[], ProducerId]) -> None:
        self._new = new
        self._free: deque[ProducerId] = deque()
        self._ended: list[LaneUse] = []

    def take(self) -> ProducerId:
        """Return a lane for a transaction."""
        return self._free.popleft() if self._free else self._new()

    def add_ended(self, *uses: LaneUse) -> None:
        """Add transactions that have ended in all of their segments."""
        self._ended += uses

    def take_ended(self) -> list[LaneUse]:
        """Remove and return the transactions to record as ended. Then call `free`, or `add_ended` after a failure."""
        found, self._ended = self._ended, []
        return found

    def free(self, uses: Iterable[LaneUse]) -> None:
        """Free the lanes of transactions that are recorded as ended."""
        self._free.extend(each.producer for each in uses)


class LaneStep(Enum):
    """A step of a transaction in one segment. One append makes it."""

    BEGIN = "begin"
    """Append the events. The lane must be free."""
    END = "end"
    """Append the acknowledgement. The lane must name this transaction."""
    END_AFTER_LOSS = "end after loss"
    """Append the acknowledgement although the registers were lost. The lane must not name another transaction."""
    DROP = "drop"
    """Append acknowledgements that make readers drop the events of a transaction that can never be decided."""
    DROP_OPEN = "drop open"
    """`DROP` for another process's transaction, which may have ended: the lane must still name it."""


class LaneChange(NamedTuple):
    """A step of the transaction that uses a lane."""

    step: LaneStep
    use: LaneUse


def parameters(changes: Iterable[LaneChange]) -> dict[str, Any]:
    """Return the arguments of `JournalClient.append` for one append that makes all these changes, or none."""
    include: dict[str, str] = {}
    exclude: dict[str, str] = {}
    union: dict[str, str] = {}
    subtract: dict[str, str] = {}
    for step, use in changes:
        if step in (LaneStep.BEGIN, LaneStep.END, LaneStep.DROP_OPEN):
            include[HELD_LABEL] = ""
        if step is LaneStep.BEGIN:
            exclude[use.label] = ""
            union[use.label] = use.value
        elif step in (LaneStep.END, LaneStep.DROP_OPEN):
            include[use.label] = use.value
            subtract[use.label] = use.value
        elif step is LaneStep.END_AFTER_LOSS:
            exclude[use.label] = ""
        else:
            subtract[use.label] = use.value
    found: dict[str, Any] = {}
    if include or exclude:
        found["check_registers"] = labels.label_selector(include=include, exclude=exclude)
    if union:
        found["union_registers"] = labels.label_set(union)
    if subtract:
        found["subtract_registers"] = labels.label_set(subtract)
    return found


def after_refusal(registers: pb.LabelSet, use: LaneUse) -> LaneStep | None:
    """Return the next step after `registers` refused an acknowledgement; None if the transaction has ended.

    If the registers were lost, it is unknown whether the transaction has ended. Ending it again is harmless while its
    lane is free.
    """
    found = labels.value_of(registers, use.label)
    if found:  # Another value means that a later transaction uses the lane.
        return LaneStep.END if found == use.value else None
    lost = not labels.value_of(registers, HELD_LABEL) or labels.value_of(registers, RESTORED_LABEL)
    return LaneStep.END_AFTER_LOSS if lost else None


def is_abandoned(use: LaneUse, clock: int) -> bool:
    """Return True if a transaction began at least ten minutes before or after `clock`: its writer has probably died."""
    return abs(clock - use.begin) >= _ABANDONED


def lanes_in(registers: pb.LabelSet) -> tuple[LaneUse, ...]:
    """Return the lanes with transactions in progress. Raises CorruptData."""
    return tuple(
        LaneUse.decode(label.name, label.value) for label in registers.labels if label.name.startswith(LANE_PREFIX)
    )
