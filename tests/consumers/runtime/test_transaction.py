"""The order of begin, end and completion of transactions, and random histories that obey all rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto_consumers.runtime.transaction import (
    EmptyTransactionDeferred,
    Limits,
    NextStep,
    Prior,
    Transactions,
)


def started(limits: Limits = Limits()) -> Transactions:
    """Return a shard's transactions after the restored acknowledgements are written."""
    transactions = Transactions(limits)
    transactions.acknowledged(0.0)
    return transactions


def step(transactions: Transactions, now: float, *, ready: bool = False, pending: bool = False) -> NextStep:
    return transactions.next_step(now, ready=ready, pending=pending)


def test_restored_acknowledgements_are_written_before_the_first_commit():
    transactions = Transactions(Limits(0, 1))

    assert step(transactions, 0, ready=True) is NextStep.CONSUME
    transactions.consumed(0, 10)
    assert step(transactions, 0.5) is NextStep.WAIT
    with pytest.raises(InvalidInput, match="prior ACKNOWLEDGING"):
        transactions.start_commit(0.5)
    transactions.acknowledged(0.6)
    assert step(transactions, 0.6) is NextStep.COMMIT


def test_an_idle_shard_waits_only_for_messages():
    transactions = started()

    assert step(transactions, 100) is NextStep.WAIT
    assert transactions.reads(100)
    assert transactions.deadline(100) is None


def test_the_first_pause_of_input_ends_a_transaction():
    transactions = started(Limits(0, 10))
    transactions.consumed(1, 10)

    assert step(transactions, 1, ready=True) is NextStep.CONSUME
    assert step(transactions, 1) is NextStep.COMMIT


def test_a_pause_before_the_minimum_does_not_end_a_transaction():
    transactions = started(Limits(5, 10))
    transactions.consumed(1, 10)

    assert step(transactions, 2) is NextStep.WAIT
    assert transactions.deadline(2) == 6
    assert step(transactions, 5, ready=True) is NextStep.CONSUME
    assert step(transactions, 6) is NextStep.COMMIT


def test_input_without_a_pause_is_consumed_up_to_the_maximum():
    transactions = started(Limits(0, 10))
    transactions.consumed(1, 10)

    assert step(transactions, 10.9, ready=True) is NextStep.CONSUME
    assert transactions.deadline(10.9) == 11
    assert step(transactions, 11, ready=True) is NextStep.COMMIT
    assert not transactions.reads(11)


def test_a_minimum_above_the_maximum_is_lowered_to_it():
    transactions = started(Limits(20, 10))
    transactions.consumed(1, 10)

    assert transactions.deadline(1) == 11
    assert step(transactions, 10.9) is NextStep.WAIT
    assert step(transactions, 11) is NextStep.COMMIT


def test_pending_messages_hold_a_transaction_open_up_to_the_maximum():
    transactions = started(Limits(0, 10))
    transactions.consumed(1, 10)

    assert step(transactions, 2, pending=True) is NextStep.WAIT
    assert transactions.deadline(2) == 11
    assert step(transactions, 3) is NextStep.COMMIT
    assert step(transactions, 11, pending=True) is NextStep.COMMIT

    transactions.limits = Limits(0, 10, wait_for_acks=False)
    assert step(transactions, 2, pending=True) is NextStep.COMMIT


def test_the_next_transaction_consumes_during_the_prior_commit_and_commits_after_it():
    transactions = started(Limits(0, 10))
    transactions.consumed(1, 10)
    transactions.start_commit(1)

    assert not transactions.is_open
    assert step(transactions, 2, ready=True) is NextStep.CONSUME
    transactions.consumed(2, 20)
    assert step(transactions, 3) is NextStep.WAIT
    transactions.committed(4)
    assert step(transactions, 4) is NextStep.WAIT
    transactions.acknowledged(5)
    assert step(transactions, 5) is NextStep.COMMIT
    assert (transactions.completing.began, transactions.completing.committed) == (1, 4)
    assert (transactions.current.messages, transactions.current.bytes) == (1, 20)


def test_a_transaction_at_its_maximum_stalls_until_the_prior_one_is_done():
    transactions = started(Limits(0, 1))
    transactions.consumed(0, 1)
    transactions.start_commit(0)
    transactions.consumed(1, 1)

    assert step(transactions, 5, ready=True) is NextStep.WAIT
    assert transactions.deadline(5) is None
    transactions.committed(6)
    transactions.acknowledged(6)
    assert step(transactions, 6, ready=True) is NextStep.COMMIT
    transactions.start_commit(6)
    assert (transactions.completing.stalled, transactions.completing.commit_began) == (5, 6)


def test_a_deferred_message_ends_the_transaction_immediately():
    transactions = started(Limits(5, 10))
    transactions.consumed(1, 10)
    transactions.deferred()

    assert step(transactions, 1, ready=True, pending=True) is NextStep.COMMIT
    transactions.start_commit(1)
    assert transactions.reads(1)
    transactions.committed(1)
    transactions.acknowledged(1)
    assert step(transactions, 1, ready=True) is NextStep.CONSUME


def test_the_first_message_cannot_be_deferred():
    with pytest.raises(EmptyTransactionDeferred):
        started().deferred()


def test_at_the_end_of_input_open_messages_commit_and_the_shard_ends():
    transactions = started(Limits(5, 10))
    transactions.consumed(1, 10)
    transactions.ended()

    assert step(transactions, 1, pending=True) is NextStep.COMMIT
    transactions.start_commit(1)
    assert step(transactions, 1) is NextStep.WAIT
    transactions.committed(2)
    transactions.acknowledged(2)
    assert step(transactions, 2) is NextStep.END


def test_stages_follow_one_another_in_order():
    transactions = started()
    for wrong in (transactions.committed, transactions.acknowledged, transactions.start_commit):
        with pytest.raises(InvalidInput):
            wrong(1)
    transactions.consumed(1, 1)
    transactions.start_commit(1)
    with pytest.raises(InvalidInput, match="prior transaction is COMMITTING"):
        transactions.acknowledged(1)


def test_invalid_limits_are_refused():
    for wrong in ((-1.0, 1.0), (0.0, 0.0)):
        with pytest.raises(InvalidInput):
            Limits(*wrong)


@given(
    st.floats(0, 5),
    st.floats(0.1, 5),
    st.lists(st.tuples(st.floats(0, 2), st.booleans(), st.booleans(), st.integers(0, 9)), max_size=60),
)
def test_messages_commit_in_order_and_once_in_any_history(minimum, maximum, history):
    """The shard chooses its steps; time, input and the completion of running operations are random."""
    transactions = Transactions(Limits(minimum, maximum))
    now = 0.0
    consumed = 0
    commits: list[int] = []
    completed: list[int] = []
    for passes, ready, pending, event in history:
        now += passes
        if transactions.prior is Prior.COMMITTING and event < 4:
            transactions.committed(now)
        elif transactions.prior is Prior.ACKNOWLEDGING and event < 4:
            transactions.acknowledged(now)
            if commits:
                completed.append(commits[-1])
        found = step(transactions, now, ready=ready, pending=pending)
        if found is NextStep.CONSUME:
            if event == 9 and transactions.is_open:
                transactions.deferred()
            else:
                transactions.consumed(now, 1)
                consumed += 1
        elif found is NextStep.COMMIT:
            assert transactions.prior is Prior.DONE
            assert transactions.is_open
            transactions.start_commit(now)
            commits.append(consumed)
        else:
            assert found is NextStep.WAIT
            # The shard always waits for an event.
            assert (
                transactions.reads(now)
                or transactions.prior is not Prior.DONE
                or transactions.deadline(now) is not None
            )
            deadline = transactions.deadline(now)
            assert deadline is None or deadline > now
    assert commits == sorted(set(commits))
    assert completed == sorted(set(completed))
    assert set(completed) <= set(commits)
