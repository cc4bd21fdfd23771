"""The state machine of consumer transactions. Pure: it reads no clock and waits for nothing.

Transactions of a shard are pipelined: while one commits, the next one already consumes messages.

::

    the current one    IDLE ──consumed()──> OPEN ──start_commit()──┐
                         ^                                         │ becomes the prior one, and the next is IDLE
    the prior one      DONE <──acknowledged()── ACKNOWLEDGING <──committed()── COMMITTING

A transaction has at least one message. It may begin to commit only once the prior one is DONE: the prior store commit
has completed, and then all acknowledgements of the messages that it published have been appended. So two commits are
never in progress together, and no acknowledgement of an uncommitted transaction is ever written. A shard that starts
still has to append the acknowledgements of its restored checkpoint, so its prior transaction is ACKNOWLEDGING at first.

The current transaction ends at the first pause of its input after `min_seconds`, and at the latest after `max_seconds`.
A pause does not count while messages that were read await their producer's acknowledgement, unless the shard's spec
disables this: the acknowledgement is likely to come soon, and to commit these messages.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from coranto.errors import CorantoError, InvalidInput


class DeferToNextTransaction(Exception):
    """Raised by an application's `consume_message` to end the transaction before this message.

    The next transaction begins with the message. Deferring the first message of a transaction is an error.
    """


class EmptyTransactionDeferred(CorantoError):
    """An application deferred the first message of a transaction, which cannot be empty."""


class NextStep(enum.Enum):
    """The next step of a shard."""

    CONSUME = "consume a message that is ready"
    WAIT = "wait: for a message if `reads`, for the prior transaction, and until `deadline`"
    COMMIT = "begin to commit"
    END = "all messages were consumed, and all transactions are done"


class Prior(enum.Enum):
    """The state of the prior transaction."""

    COMMITTING = "its store commit is under way"
    ACKNOWLEDGING = "it has committed; its acknowledgements are being appended"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a transaction's consuming time, in seconds from its first message."""

    min_seconds: float = 0.0
    max_seconds: float = 1.0
    wait_for_acks: bool = True
    max_messages: int | None = None
    """The maximum number of messages in a transaction, during a search for a rejected message. Then a transaction
    begins only after the prior one is done, so that a failure is of one of them."""

    def __post_init__(self) -> None:
        if self.min_seconds < 0 or self.max_seconds <= 0:
            raise InvalidInput(
                f"a transaction of {self.min_seconds:g} to {self.max_seconds:g} s is impossible; "
                "the minimum must not be above the maximum, and neither below 0"
            )


PHASES: Final = ("consuming", "stalled", "committing", "acknowledging")
"""The phases of a transaction: `stalled` is the wait for the prior one."""


@dataclass(slots=True)
class Times:
    """The times of a transaction's stages, as monotonic readings, and its messages and bytes."""

    began: float = 0.0
    stalled: float = 0.0
    """The time when it stopped consuming, and began to wait for the prior one."""
    commit_began: float = 0.0
    committed: float = 0.0
    acknowledged: float = 0.0
    messages: int = 0
    acknowledgements: int = 0
    bytes: int = 0

    @property
    def pulled(self) -> int:
        """The number of messages and acknowledgements."""
        return self.messages + self.acknowledgements

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """The phases of a transaction that is acknowledged, with their beginnings and ends."""
        reached = (self.began, self.stalled, self.commit_began, self.committed, self.acknowledged)
        return list(zip(PHASES, reached[:-1], reached[1:], strict=True))


class Transactions:
    """The transactions of one shard, from its start on. Every `now` is a monotonic reading in seconds."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        """May be replaced at any time."""
        self.prior = Prior.ACKNOWLEDGING
        self.current = Times()
        self.completing = Times()
        """The times of the prior transaction."""
        self._deferred = False
        self._ended = False

    @property
    def is_open(self) -> bool:
        """True if the current transaction has messages or acknowledgements."""
        return self.current.pulled > 0

    def messages_under_way(self, *, only_one: bool) -> int:
        """Return the number of messages of the open transaction or of the prior one, whichever is larger.

        With `only_one`, only one of them is in progress: the prior one if it is committing, otherwise the open one.
        """
        if not only_one:
            return max(self.current.pulled, self.completing.pulled)
        return self.completing.pulled if self.prior is Prior.COMMITTING else self.current.pulled

    def reads(self, now: float) -> bool:
        """Return True if the current transaction takes further messages."""
        if self._deferred or self._ended:
            return False
        most = self.limits.max_messages
        if most is not None and (self.current.pulled >= most or (not self.is_open and self.prior is not Prior.DONE)):
            return False
        return not self.is_open or now < self.current.began + self.limits.max_seconds

    def deadline(self, now: float) -> float | None:
        """Return the time to call `next_step` again if nothing happens before. None: there is no deadline."""
        if not self.is_open or not self.reads(now):
            return None
        minimum = self.current.began + min(self.limits.min_seconds, self.limits.max_seconds)
        return minimum if now < minimum else self.current.began + self.limits.max_seconds

    def next_step(self, now: float, *, ready: bool, pending: bool, in_partial_set: bool = False) -> NextStep:
        """Return the next step. `ready`: there is input. `pending`: messages already read await an acknowledgement.

        `in_partial_set`: the transaction must take further input before it ends, regardless of its limits.
        """
        if in_partial_set:
            return NextStep.CONSUME
        reads = self.reads(now)
        if ready and reads:
            return NextStep.CONSUME
        if self.is_open and not reads and not self.current.stalled:
            self.current.stalled = now
        if self.prior is not Prior.DONE:
            return NextStep.WAIT
        if not self.is_open:
            return NextStep.END if self._ended else NextStep.WAIT
        if reads and now < self.current.began + self.limits.min_seconds:
            return NextStep.WAIT
        if reads and pending and self.limits.wait_for_acks:
            return NextStep.WAIT
        return NextStep.COMMIT

    def consumed(self, now: float, size: int, messages: int = 1, acknowledgements: int = 0) -> None:
        """Record that messages and acknowledgements of `size` bytes were consumed."""
        if not self.is_open:
            self.current.began = now
        self.current.messages += messages
        self.current.acknowledgements += acknowledgements
        self.current.bytes += size

    def deferred(self) -> None:
        """Record that the application deferred a message to the next transaction.

        Raises EmptyTransactionDeferred if the current transaction has no messages.
        """
        if not self.is_open:
            raise EmptyTransactionDeferred(
                "the application deferred the first message of a transaction; a transaction cannot be empty: "
                "defer later messages only"
            )
        self._deferred = True

    def ended(self) -> None:
        """Record that there is no further input: commit the current transaction."""
        self._ended = True

    def start_commit(self, now: float) -> None:
        """Record that the current transaction begins to commit. The next one may consume."""
        if not self.is_open or self.prior is not Prior.DONE:
            raise InvalidInput(f"no transaction can begin to commit: prior {self.prior.name}, open {self.is_open}")
        self.current.commit_began = now
        self.current.stalled = self.current.stalled or now
        self.completing, self.current = self.current, Times()
        self.prior = Prior.COMMITTING
        self._deferred = False

    def committed(self, now: float) -> None:
        """Record that the prior transaction's store commit has completed. Acknowledgements may be appended."""
        if self.prior is not Prior.COMMITTING:
            raise InvalidInput(f"the prior transaction is {self.prior.name}, and cannot commit")
        self.completing.committed = now
        self.prior = Prior.ACKNOWLEDGING

    def acknowledged(self, now: float) -> None:
        """Record that all acknowledgements of the prior transaction are in their journals."""
        if self.prior is not Prior.ACKNOWLEDGING:
            raise InvalidInput(f"the prior transaction is {self.prior.name}: nothing of it can be acknowledged")
        self.completing.acknowledged = now
        self.prior = Prior.DONE
