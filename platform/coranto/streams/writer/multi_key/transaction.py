"""One transaction on several routing keys: its states, its events, and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from coranto.effects import Clock
from coranto.streams.writer.transactions import (
    TABLE,
    TransactionAction,
    TransactionEvent,
    TransactionState,
    transition,
)

E = TypeVar("E")


class MultiKeyPosition(NamedTuple):
    """The position of a transaction's events in one segment: within [begin, end) of its journal."""

    segment: int
    journal: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class MultiKeyResult:
    """A committed transaction, with the positions of its events by segment.

    `visible` is false if an acknowledgement could not be appended within the writer's retry timeout. The transaction is
    committed nevertheless, and readers get its other events once the stream is resumed or another writer is opened.
    """

    txn: str
    positions: tuple[MultiKeyPosition, ...]
    visible: bool = True


class MultiKeyTransaction(Generic[E]):
    """A transaction on several keys, with the states of `coranto.streams.writer.transactions.Transaction`."""

    def __init__(
        self,
        encode: Callable[[E, int], bytes],
        commit: Callable[[Sequence[str], Sequence[bytes]], Awaitable[MultiKeyResult]],
        clock: Clock,
        timeout: float,
    ) -> None:
        """`encode` gets an event and the size of the events before it. `commit` gets the keys and the encoded events.

        Unless it was committed, the transaction is aborted `timeout` seconds from now.
        """
        self._encode = encode
        self._commit = commit
        self._clock = clock
        self._timeout = timeout
        self._deadline = clock.monotonic() + timeout
        self._state = TransactionState.OPEN
        self._keys: list[str] = []
        self._events: list[bytes] = []
        self._size = 0
        self._task: asyncio.Task[MultiKeyResult] | None = None

    async def __aenter__(self) -> MultiKeyTransaction[E]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._apply(TransactionEvent.RAISE)
            return
        action = self._apply(TransactionEvent.EXIT)
        if action in (TransactionAction.BEGIN, TransactionAction.JOIN):
            await self._outcome(action)

    @property
    def state(self) -> TransactionState:
        self._expire()
        return self._state

    def write(self, key: str, event: E) -> None:
        """Add an event. Nothing is sent.

        Raises InvalidInput for an invalid event, TransactionTimeout, and TransactionStateError if the transaction is
        not open. Raises MaxTransactionSizeExceeded, which leaves the transaction as it was.
        """
        if self._apply(TransactionEvent.WRITE) is TransactionAction.TAKE:
            encoded = self._encode(event, self._size)
            self._keys.append(key)
            self._events.append(encoded)
            self._size += len(encoded)

    async def commit(self) -> MultiKeyResult:
        """Commit, and return the positions of the events. They are then durable, and readable if `visible` is true.

        Cancelling only stops the waiting: a later `commit` returns the outcome. Raises StreamSealed,
        TransactionTimeout, WriteError, whose `outcome` says if the transaction may be committed, and errors of the
        client.
        """
        return await self._outcome(self._apply(TransactionEvent.COMMIT))

    def abort(self) -> None:
        """Drop the events. Raises TransactionStateError if the transaction is being committed or is committed."""
        self._apply(TransactionEvent.ABORT)

    def _expire(self) -> None:
        if self._state is TransactionState.OPEN and self._clock.monotonic() >= self._deadline:
            self._state, _ = TABLE[self._state, TransactionEvent.EXPIRE]
            self._drop()

    def _apply(self, call: TransactionEvent) -> TransactionAction:
        self._expire()
        self._state, action = transition(self._state, call, name="the transaction", timeout=self._timeout)
        if action is TransactionAction.DISCARD:
            self._drop()
        return action

    def _drop(self) -> None:
        self._keys, self._events = [], []

    async def _outcome(self, action: TransactionAction) -> MultiKeyResult:
        if action is TransactionAction.BEGIN:
            self._task = asyncio.create_task(self._committed())
        assert self._task is not None
        return await asyncio.shield(self._task)

    async def _committed(self) -> MultiKeyResult:
        keys, events = self._keys, self._events
        self._drop()
        try:
            result = await self._commit(keys, events) if events else MultiKeyResult("", ())
        except BaseException:
            self._state, _ = TABLE[self._state, TransactionEvent.FAIL]
            raise
        self._state, _ = TABLE[self._state, TransactionEvent.SUCCEED]
        return result
