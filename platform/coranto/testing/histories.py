"""Histories: recorded calls and observations of journals' clients, for checkers.

The content of every append is unique and names the append, so that a journal's bytes can be read as a list of
appends::

    @<number of the append, 6 digits or more>:<length in bytes, 5 digits>:<payload>

`RecordedClient` records the calls of a real client. `coranto.testing.history_files` writes a history for external
checkers.
"""

from __future__ import annotations

import enum
import random
import re
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field

from coranto.client import JournalClient
from coranto.client.values import AppendResult
from coranto.errors import CorantoError, CorruptData, InvalidInput, Outcome, RegisterMismatch, StatusError
from coranto.wire import protocol_pb2 as pb

HEADER = re.compile(rb"@(\d{6,12}):(\d{5}):")
MIN_CONTENT = 14
MAX_CONTENT = 99_999


class OperationKind(enum.Enum):
    APPEND = "append"
    BARRIER = "barrier"
    """A zero-byte append: reads the head and the registers through the primary."""
    HEAD = "head"
    """A call for the write head as any broker of the Route knows it."""
    READ = "read"
    """A zero-byte append, and then a read of all content before its offset."""


class OperationOutcome(enum.Enum):
    """The outcome of an operation, as in Jepsen's histories: ok, fail (certainly not applied) or info (unknown)."""

    OPEN = "open"
    OK = "ok"
    FAIL = "fail"
    INFO = "info"


@dataclass(slots=True, eq=False)
class Operation:
    """One call of a client. Times are seconds of one clock: virtual, or monotonic on one machine."""

    number: int
    client: str
    kind: OperationKind
    journal: str
    invoked: float
    content: bytes = b""
    """The content of an append, or the result of a read."""
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

    def succeeded(self, begin: int, end: int, registers: pb.LabelSet) -> None:
        """Record success at [begin, end), with the registers after it."""
        self.begin, self.end, self.registers = begin, end, registers
        self.outcome = OperationOutcome.OK

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
    """All operations and observations of one run, in order of their beginnings.

    Operations are numbered from `first` on. Histories that are merged must not share numbers.
    """

    operations: list[Operation] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    first: int = 0

    def begin(self, client: str, kind: OperationKind, journal: str, at: float) -> Operation:
        operation = Operation(self.first + len(self.operations), client, kind, journal, at)
        self.operations.append(operation)
        return operation


def unique_content(number: int, rng: random.Random, low: int, high: int) -> bytes:
    """Return content of `low` to `high` bytes for the append of that number."""
    length = max(MIN_CONTENT, rng.randint(low, high))
    size = length - MIN_CONTENT
    return numbered_content(number, rng.randbytes((size + 1) // 2).hex().encode()[:size])


def numbered_content(number: int, payload: bytes) -> bytes:
    """Return content with this payload for the append of that number. Raises InvalidInput if it is too large."""
    head = b"@%06d:" % number
    length = len(head) + 6 + len(payload)
    if length > MAX_CONTENT:
        raise InvalidInput(f"has {len(payload)} bytes; at most {MAX_CONTENT - len(head) - 6} fit", field="payload")
    return head + b"%05d:" % length + payload


def numbers_in(content: bytes) -> list[tuple[int, int]]:
    """Return the appends in a journal's content, in their order: the number and the offset of each.

    Raises InvalidInput for content that is not a list of whole appends.
    """
    found: list[tuple[int, int]] = []
    position = 0
    while position < len(content):
        match = HEADER.match(content, position)
        if match is None or position + int(match[2]) > len(content):
            raise InvalidInput(f"is not a whole append at offset {position}", field="content")
        found.append((int(match[1]), position))
        position += int(match[2])
    return found


class RecordedClient:
    """A client of a real cluster whose calls are recorded.

    Each call returns its operation. Errors of the cluster become outcomes. A cancelled call stays open: its outcome is
    unknown. Only recorded clients may change registers and content.
    """

    def __init__(self, client: JournalClient, history: History, name: str) -> None:
        """Record the calls of `client` in `history` under a name. The client must not retry unknown outcomes."""
        self._client = client
        self._history = history
        self._name = name

    async def append(
        self,
        journal: str,
        payload: bytes = b"",
        *,
        offset: int = 0,
        check_registers: pb.LabelSelector | None = None,
        union_registers: pb.LabelSet | None = None,
        subtract_registers: pb.LabelSet | None = None,
    ) -> Operation:
        """Append unique content with a payload, under the conditions of `JournalClient.append`.

        Raises InvalidInput for a payload of more than about 99,980 bytes.
        """
        operation = self._begin(OperationKind.APPEND, journal)
        operation.content = numbered_content(operation.number, payload)
        operation.offset, operation.check = offset, check_registers
        operation.union, operation.subtract = union_registers, subtract_registers
        work = self._client.append(
            journal,
            operation.content,
            offset=offset,
            check_registers=check_registers,
            union_registers=union_registers,
            subtract_registers=subtract_registers,
        )
        return await self._finish(operation, self._applied(operation, work))

    async def barrier(self, journal: str) -> Operation:
        """Make a zero-byte append: a linearizable read of the journal's end and registers."""
        operation = self._begin(OperationKind.BARRIER, journal)
        return await self._finish(operation, self._applied(operation, self._client.append(journal, b"")))

    async def read(self, journal: str) -> Operation:
        """Read all content, linearizably: up to the offset of a zero-byte append at the start of the call."""
        operation = self._begin(OperationKind.READ, journal)

        async def work() -> None:
            result = await self._client.append(journal, b"")
            if result.end:
                chunks = self._client.read(journal, 0, block=True, end_offset=result.end, fail_on_jump=True)
                operation.content = b"".join([chunk.content async for chunk in chunks])
            operation.succeeded(result.begin, result.end, result.registers)

        return await self._finish(operation, work())

    def _begin(self, kind: OperationKind, journal: str) -> Operation:
        return self._history.begin(self._name, kind, journal, time.monotonic())

    async def _applied(self, operation: Operation, work: Awaitable[AppendResult]) -> None:
        result = await work
        operation.succeeded(result.begin, result.end, result.registers)

    async def _finish(self, operation: Operation, work: Awaitable[None]) -> Operation:
        try:
            await work
        except CorantoError as error:
            operation.failed(error)
        operation.returned = time.monotonic()
        return operation
