"""T16: each call in each state of a transaction, by the table and by a real transaction."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coranto.errors import TransactionStateError, TransactionTimeout, Unavailable
from coranto.streams.writer.shielded_future import ShieldedFuture
from coranto.streams.writer.transactions import (
    TABLE,
    Transaction,
    TransactionAction,
    TransactionEvent,
    TransactionState,
)
from coranto.streams.writer.units import CommitResult

RESULT = CommitResult("journal", 0, 0, 10, 7, 1, 0)
STATES = list(TransactionState)
USERS_CALLS = (
    TransactionEvent.WRITE,
    TransactionEvent.COMMIT,
    TransactionEvent.ABORT,
    TransactionEvent.EXIT,
    TransactionEvent.RAISE,
)


class Writer:
    """The parts of a writer that a transaction needs. The test sets the time and completes the commits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.ends: list[TransactionState] = []
        self.commits: list[list[bytes]] = []
        self.done: ShieldedFuture[CommitResult] = ShieldedFuture(loop=asyncio.get_running_loop())

    def now(self) -> float:
        return self.seconds

    async def opened(self, transaction: Transaction[Any]) -> None:
        transaction.deadline = self.seconds + transaction.timeout

    def ended(self, transaction: Transaction[Any]) -> None:
        self.ends.append(transaction.raw_state)

    def encode(self, event: Any, size: int) -> bytes:
        return bytes(event)

    def commit(self, transaction: Transaction[Any], events: list[bytes]) -> ShieldedFuture[CommitResult]:
        self.commits.append(events)
        return self.done


async def in_state(state: TransactionState) -> tuple[Writer, Transaction[Any]]:
    """Return a transaction with one event in this state."""
    writer = Writer()
    txn: Transaction[Any] = Transaction(writer, "key", 7, 10.0, 3, None, None, None)
    await txn.__aenter__()
    txn.write(b"event")
    if state is TransactionState.ABORTED:
        txn.abort()
    elif state is TransactionState.TIMED_OUT:
        writer.seconds = 10.0
    elif state is not TransactionState.OPEN:
        commit = asyncio.create_task(txn.commit())
        await asyncio.sleep(0)
        if state is TransactionState.COMMITTED:
            writer.done.set_result(RESULT)
            await commit
        elif state is TransactionState.FAILED:
            writer.done.set_exception(Unavailable("no answer"))
            with pytest.raises(Unavailable):
                await commit
        else:
            commit.cancel()
            await asyncio.gather(commit, return_exceptions=True)
    assert txn.state is state
    return writer, txn


async def call(txn: Transaction[Any], what: TransactionEvent) -> Any:
    if what is TransactionEvent.WRITE:
        return txn.write(b"another")
    if what is TransactionEvent.COMMIT:
        return await txn.commit()
    if what is TransactionEvent.ABORT:
        return txn.abort()
    error = ValueError("of the block") if what is TransactionEvent.RAISE else None
    return await txn.__aexit__(type(error) if error else None, error, None)


def test_t16_the_table_is_total() -> None:
    driven = {(state, what) for state in STATES for what in (*USERS_CALLS, TransactionEvent.EXPIRE)}
    committing = {
        (TransactionState.COMMITTING, TransactionEvent.SUCCEED),
        (TransactionState.COMMITTING, TransactionEvent.FAIL),
    }
    assert set(TABLE) == driven | committing
    final = set(STATES) - {TransactionState.OPEN, TransactionState.COMMITTING}
    assert all(after is before for (before, _), (after, _) in TABLE.items() if before in final)


@pytest.mark.parametrize("what", USERS_CALLS, ids=lambda what: what.name)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
async def test_t16_every_call_in_every_state_follows_the_table(state: TransactionState, what: TransactionEvent) -> None:
    writer, txn = await in_state(state)
    after, action = TABLE[state, what]
    commits, ends = len(writer.commits), len(writer.ends)
    task = asyncio.create_task(call(txn, what))
    await asyncio.sleep(0)
    if action in (TransactionAction.BEGIN, TransactionAction.JOIN):
        assert not task.done()
        assert txn.raw_state is TransactionState.COMMITTING
        writer.done.set_result(RESULT)
        result = await task
        assert result == (RESULT if what is TransactionEvent.COMMIT else None)
        after = TransactionState.COMMITTED
    elif action is TransactionAction.REFUSE:
        with pytest.raises(TransactionStateError, match=state.value):
            await task
    elif action is TransactionAction.TOO_LATE:
        with pytest.raises(TransactionTimeout):
            await task
    elif action is TransactionAction.REPEAT and state is TransactionState.FAILED:
        with pytest.raises(Unavailable):
            await task
    elif action is TransactionAction.REPEAT:
        assert await task == RESULT
    else:
        assert await task is None
    assert txn.raw_state is after
    assert len(writer.commits) == commits + (action is TransactionAction.BEGIN)
    assert len(writer.ends) == ends + (action is TransactionAction.DISCARD)
    if action is TransactionAction.TAKE:
        assert txn.size == 3 + len(b"event") + len(b"another")


async def test_t16_a_second_commit_has_the_same_result() -> None:
    writer, txn = await in_state(TransactionState.COMMITTING)
    commits = [asyncio.create_task(txn.commit()) for _ in range(2)]
    await asyncio.sleep(0)
    writer.done.set_result(RESULT)
    assert await asyncio.gather(*commits, txn.commit()) == [RESULT, RESULT, RESULT]
    assert writer.commits == [[b"event"]]


@pytest.mark.parametrize("fails", [False, True])
async def test_an_immediately_completed_commit_ends_the_transaction_once(fails: bool) -> None:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    writer = Writer()
    if fails:
        writer.done.set_exception(Unavailable("no answer"))
    else:
        writer.done.set_result(RESULT)
    txn: Transaction[Any] = Transaction(writer, "key", 7, 10.0, 3, None, None, None)
    await txn.__aenter__()
    txn.write(b"event")
    await asyncio.gather(txn.commit(), return_exceptions=True)
    assert txn.state is (TransactionState.FAILED if fails else TransactionState.COMMITTED)
    await asyncio.sleep(0)
    assert not problems
