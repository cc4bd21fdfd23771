"""Transactions on one routing key.

A transaction collects events in this process. Its commit is one append, which writes all of its events or nothing. Its
states:

::

    OPEN ──commit──> COMMITTING ──> COMMITTED
     │                   └────────> FAILED
     ├──abort, or an exception leaves the block──> ABORTED
     └──longer open than its timeout────────────> TIMED_OUT

`TABLE` defines the effect of every call in every state. All states but OPEN and COMMITTING are final.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import TracebackType
from typing import Final, Generic, Protocol, TypeVar

from coranto.errors import TransactionStateError, TransactionTimeout
from coranto.streams.model.registers import Fence
from coranto.streams.writer.shielded_future import ShieldedFuture
from coranto.streams.writer.units import CommitResult

E = TypeVar("E")


class TransactionState(Enum):
    __hash__ = object.__hash__  # Faster than the hash of `Enum`, which is in Python; each call uses it.

    OPEN = "open"
    COMMITTING = "being committed"
    COMMITTED = "committed"
    ABORTED = "aborted"
    TIMED_OUT = "timed out"
    FAILED = "failed"


class TransactionEvent(Enum):
    """The calls on a transaction, and the events that can happen to it."""

    __hash__ = object.__hash__

    WRITE = "write"
    COMMIT = "commit"
    ABORT = "abort"
    EXIT = "the block is left"
    RAISE = "an exception leaves the block"
    EXPIRE = "the timeout is over"
    SUCCEED = "the commit succeeded"
    FAIL = "the commit failed"


class TransactionAction(Enum):
    """The effect of a call."""

    TAKE = "take the event in"
    BEGIN = "begin to commit"
    JOIN = "await the commit that is under way"
    REPEAT = "give the result, or the error, once more"
    DISCARD = "drop the events"
    NOTHING = "nothing"
    REFUSE = "raise TransactionStateError"
    TOO_LATE = "raise TransactionTimeout"


_S, _C, _A = TransactionState, TransactionEvent, TransactionAction

TABLE: Final[Mapping[tuple[TransactionState, TransactionEvent], tuple[TransactionState, TransactionAction]]] = {
    (_S.OPEN, _C.WRITE): (_S.OPEN, _A.TAKE),
    (_S.OPEN, _C.COMMIT): (_S.COMMITTING, _A.BEGIN),
    (_S.OPEN, _C.ABORT): (_S.ABORTED, _A.DISCARD),
    (_S.OPEN, _C.EXIT): (_S.COMMITTING, _A.BEGIN),
    (_S.OPEN, _C.RAISE): (_S.ABORTED, _A.DISCARD),
    (_S.OPEN, _C.EXPIRE): (_S.TIMED_OUT, _A.DISCARD),
    (_S.COMMITTING, _C.WRITE): (_S.COMMITTING, _A.REFUSE),
    (_S.COMMITTING, _C.COMMIT): (_S.COMMITTING, _A.JOIN),
    (_S.COMMITTING, _C.ABORT): (_S.COMMITTING, _A.REFUSE),
    (_S.COMMITTING, _C.EXIT): (_S.COMMITTING, _A.JOIN),
    # The commit continues; `commit` still returns its outcome.
    (_S.COMMITTING, _C.RAISE): (_S.COMMITTING, _A.NOTHING),
    (_S.COMMITTING, _C.EXPIRE): (_S.COMMITTING, _A.NOTHING),
    (_S.COMMITTING, _C.SUCCEED): (_S.COMMITTED, _A.NOTHING),
    (_S.COMMITTING, _C.FAIL): (_S.FAILED, _A.NOTHING),
    (_S.COMMITTED, _C.WRITE): (_S.COMMITTED, _A.REFUSE),
    (_S.COMMITTED, _C.COMMIT): (_S.COMMITTED, _A.REPEAT),
    (_S.COMMITTED, _C.ABORT): (_S.COMMITTED, _A.REFUSE),
    (_S.COMMITTED, _C.EXIT): (_S.COMMITTED, _A.NOTHING),
    (_S.COMMITTED, _C.RAISE): (_S.COMMITTED, _A.NOTHING),
    (_S.COMMITTED, _C.EXPIRE): (_S.COMMITTED, _A.NOTHING),
    (_S.ABORTED, _C.WRITE): (_S.ABORTED, _A.REFUSE),
    (_S.ABORTED, _C.COMMIT): (_S.ABORTED, _A.REFUSE),
    (_S.ABORTED, _C.ABORT): (_S.ABORTED, _A.NOTHING),
    (_S.ABORTED, _C.EXIT): (_S.ABORTED, _A.NOTHING),
    (_S.ABORTED, _C.RAISE): (_S.ABORTED, _A.NOTHING),
    (_S.ABORTED, _C.EXPIRE): (_S.ABORTED, _A.NOTHING),
    (_S.TIMED_OUT, _C.WRITE): (_S.TIMED_OUT, _A.TOO_LATE),
    (_S.TIMED_OUT, _C.COMMIT): (_S.TIMED_OUT, _A.TOO_LATE),
    (_S.TIMED_OUT, _C.ABORT): (_S.TIMED_OUT, _A.NOTHING),
    # Leaving the block would look like a commit.
    (_S.TIMED_OUT, _C.EXIT): (_S.TIMED_OUT, _A.TOO_LATE),
    (_S.TIMED_OUT, _C.RAISE): (_S.TIMED_OUT, _A.NOTHING),
    (_S.TIMED_OUT, _C.EXPIRE): (_S.TIMED_OUT, _A.NOTHING),
    (_S.FAILED, _C.WRITE): (_S.FAILED, _A.REFUSE),
    (_S.FAILED, _C.COMMIT): (_S.FAILED, _A.REPEAT),
    (_S.FAILED, _C.ABORT): (_S.FAILED, _A.NOTHING),
    # `commit` raised already.
    (_S.FAILED, _C.EXIT): (_S.FAILED, _A.NOTHING),
    (_S.FAILED, _C.RAISE): (_S.FAILED, _A.NOTHING),
    (_S.FAILED, _C.EXPIRE): (_S.FAILED, _A.NOTHING),
}


def transition(
    state: TransactionState, call: TransactionEvent, *, name: str, timeout: float
) -> tuple[TransactionState, TransactionAction]:
    """Return the state after an event, and the action to take. `name` names the transaction in errors.

    Raises TransactionStateError for an event that the state refuses, and TransactionTimeout if the transaction was open
    for more than `timeout` seconds. The state then does not change.
    """
    after, action = TABLE[state, call]
    if action is TransactionAction.REFUSE:
        raise TransactionStateError(f"{call.value}: {name} is {state.value}")
    if action is TransactionAction.TOO_LATE:
        raise TransactionTimeout(
            f"{name} was open for more than {timeout:g} s, and was aborted; "
            "begin it again, with a longer timeout if it needs one"
        )
    return after, action


class Committer(Protocol[E]):
    """The part of the writer that a transaction needs."""

    def now(self) -> float:
        """Return the time in monotonic seconds."""
        ...

    async def opened(self, transaction: Transaction[E]) -> None:
        """Register an opened transaction. Raises TransactionInProgress before anything else is done."""
        ...

    def ended(self, transaction: Transaction[E]) -> None:
        """Unregister a transaction that was aborted or timed out."""
        ...

    def encode(self, event: E, size: int) -> bytes:
        """Encode an event for a transaction that has `size` bytes so far.

        Raises InvalidInput and MaxTransactionSizeExceeded.
        """
        ...

    def commit(self, transaction: Transaction[E], events: list[bytes]) -> ShieldedFuture[CommitResult]:
        """Begin to commit the events."""
        ...


class Transaction(Generic[E]):
    """A transaction on one routing key. Use as `async with writer.transaction(key) as txn:`; leaving the block commits.

    Not for concurrent use by tasks. A cancellation inside the block aborts the transaction. Cancelling `commit` only
    stops the waiting: the commit continues, and calling `commit` again returns its outcome.
    """

    def __init__(
        self,
        writer: Committer[E],
        key: str,
        key_hash: int,
        timeout: float,
        end_bytes: int,
        sequence: int | None,
        expected_offset: int | None,
        fence: Fence | None,
    ) -> None:
        """Use `StreamWriter.transaction` to create one. `end_bytes` is the size of its transaction end."""
        self.key = key
        self.key_hash = key_hash
        self.timeout = timeout
        self.sequence = sequence
        self.expected_offset = expected_offset
        self.fence = fence
        self.deadline = float("inf")
        """The time when it times out, in monotonic seconds."""
        self._writer = writer
        self._state = TransactionState.OPEN
        self._events: list[bytes] = []
        self._size = self._end_bytes = end_bytes
        self._done: ShieldedFuture[CommitResult] | None = None

    async def __aenter__(self) -> Transaction[E]:
        await self._writer.opened(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._call(TransactionEvent.RAISE)
            return
        action = self._call(TransactionEvent.EXIT)
        if action is TransactionAction.BEGIN:
            self._begin()
        if action in (TransactionAction.BEGIN, TransactionAction.JOIN):
            await self._outcome()

    @property
    def state(self) -> TransactionState:
        self.expire_if_due()
        return self.raw_state

    @property
    def raw_state(self) -> TransactionState:
        """The state, without checking the timeout."""
        self._note_outcome()
        return self._state

    @property
    def size(self) -> int:
        """Its bytes in the journal, including its end, as counted by the limit; 0 without events."""
        return self._size if self._events else 0

    def write(self, event: E) -> None:
        """Add an event. Nothing is sent.

        Raises InvalidInput for an invalid event, TransactionTimeout, and TransactionStateError if the transaction is
        not open. Raises MaxTransactionSizeExceeded, which leaves the transaction as it was.
        """
        if self._call(TransactionEvent.WRITE) is TransactionAction.TAKE:
            encoded = self._writer.encode(event, self._size)
            self._events.append(encoded)
            self._size += len(encoded)

    async def commit(self) -> CommitResult:
        """Commit, and return the position of the events. They are then durable and readable.

        Calling it again returns the same result, or raises the same error. A transaction without events commits without
        an append. Cancelling only stops the waiting. Raises WriteError, whose `outcome` says if the transaction
        may be durable, and errors of the client.
        """
        action = self._call(TransactionEvent.COMMIT)
        if action is TransactionAction.BEGIN:
            self._begin()
        return await self._outcome()

    def abort(self) -> None:
        """Drop the events. Raises TransactionStateError if the transaction is being committed or is committed."""
        self._call(TransactionEvent.ABORT)

    def expire_if_due(self) -> None:
        """Time out the transaction if it has been open for too long."""
        if self._state is TransactionState.OPEN and self._writer.now() >= self.deadline:
            self._apply(TransactionEvent.EXPIRE)

    # -- Internals -----------------------------------------------------------------------------------------------------

    def _call(self, call: TransactionEvent) -> TransactionAction:
        self.expire_if_due()
        self._note_outcome()
        return self._apply(call)

    def _note_outcome(self) -> None:
        """Update the state if the commit has ended. This is done on access, so that no task has to wait for it."""
        done = self._done
        if done is not None and self._state is TransactionState.COMMITTING and done.done():
            self._apply(TransactionEvent.FAIL if done.cancelled() or done.exception() else TransactionEvent.SUCCEED)

    def _apply(self, call: TransactionEvent) -> TransactionAction:
        self._state, action = transition(
            self._state, call, name=f"the transaction on {self.key!r}", timeout=self.timeout
        )
        if action is TransactionAction.DISCARD:
            self._events.clear()
            self._writer.ended(self)
        return action

    def _begin(self) -> None:
        events, self._events = self._events, []
        self._done = self._writer.commit(self, events)

    async def _outcome(self) -> CommitResult:
        assert self._done is not None
        return await self._done.outcome()
