"""The calls and observations of journals' clients: the input of a check.

The content of every append is unique and names the append, so that a journal's bytes can be read as a list of
appends::

    @<number of the append, 6 digits>:<length in bytes, 5 digits>:<payload>
"""

from __future__ import annotations

import enum
import random
import re
from dataclasses import dataclass, field

from coranto.errors import CorantoError, CorruptData, Outcome, RegisterMismatch, StatusError
from coranto.wire import protocol_pb2 as pb

HEADER = re.compile(rb"@(\d{6}):(\d{5}):")
MIN_CONTENT = 14


class OperationKind(enum.Enum):
    APPEND = "append"
    BARRIER = "barrier"
    """A zero-byte append: reads the head and the registers through the primary."""
    HEAD = "head"
    """A call for the write head as any broker of the Route knows it."""


class OperationOutcome(enum.Enum):
    """The outcome of an operation, as in Jepsen's histories: ok, fail (certainly not applied) or info (unknown)."""

    OPEN = "open"
    OK = "ok"
    FAIL = "fail"
    INFO = "info"


@dataclass(slots=True, eq=False)
class Operation:
    """One call of a client. Times are virtual seconds."""

    number: int
    client: str
    kind: OperationKind
    journal: str
    invoked: float
    content: bytes = b""
    offset: int = 0
    check: pb.LabelSelector | None = None
    union: pb.LabelSet | None = None
    subtract: pb.LabelSet | None = None
    outcome: OperationOutcome = OperationOutcome.OPEN
    returned: float = float("inf")
    begin: int = -1
    end: int = -1
    registers: pb.LabelSet | None = None
    refusal: pb.Status.ValueType = pb.OK
    error: str = ""

    def failed(self, error: CorantoError) -> None:
        """Record an error as the outcome."""
        unknown = isinstance(error, CorruptData) or error.outcome is Outcome.UNKNOWN
        self.outcome = OperationOutcome.INFO if unknown else OperationOutcome.FAIL
        self.error = f"{type(error).__name__}: {error}"
        if isinstance(error, StatusError):
            self.refusal = error.status
        if isinstance(error, RegisterMismatch):
            self.registers = error.registers

    def __str__(self) -> str:
        what = f"{self.kind.value} {self.number} of {self.client} to {self.journal} at {self.invoked:.3f}"
        if self.outcome is OperationOutcome.OK:
            return f"{what}: ok [{self.begin}, {self.end}) at {self.returned:.3f}"
        return f"{what}: {self.outcome.value} at {self.returned:.3f} {self.error[:160]}"


@dataclass(frozen=True, slots=True)
class Observation:
    """Bytes that a reader received. `by` names the reader and the source."""

    by: str
    journal: str
    offset: int
    content: bytes
    at: float


@dataclass(slots=True)
class History:
    """All operations and observations of one run, in order of their beginnings."""

    operations: list[Operation] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)

    def begin(self, client: str, kind: OperationKind, journal: str, at: float) -> Operation:
        operation = Operation(len(self.operations), client, kind, journal, at)
        self.operations.append(operation)
        return operation


def unique_content(number: int, rng: random.Random, low: int, high: int) -> bytes:
    """Return content of `low` to `high` bytes for the append of that number."""
    length = max(MIN_CONTENT, rng.randint(low, high))
    head = b"@%06d:%05d:" % (number, length)
    payload = rng.randbytes((length + 1) // 2).hex().encode()
    return head + payload[: length - len(head)]
