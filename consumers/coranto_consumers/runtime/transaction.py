"""When consumer transactions begin, end and complete. Pure: it reads no clock and waits for nothing.

Transactions of a shard are pipelined: while one commits, the next one consumes messages already.

::

    the current one    IDLE ──consumed()──> OPEN ──start_commit()──┐
                         ^                                         │ becomes the prior one, and the next is IDLE
    the prior one      DONE <──acknowledged()── ACKNOWLEDGING <──committed()── COMMITTING

A transaction has at least one message. It may begin to commit only once the prior one is DONE: its store commit has
completed, and then all acknowledgements of what it published have been appended. So there are never two commits under
way, and no acknowledgement of an uncommitted transaction is ever written. What is left to a shard that starts are the
acknowledgements of the checkpoint that it restored; therefore its prior transaction is ACKNOWLEDGING at first.

The current transaction ends at the first pause of its input after `min_seconds`, or after `max_seconds` in any case.
A pause in which read messages still await their producer's acknowledgement does not count, unless the shard's spec says
so: the acknowledgement is likely to come soon, and to complete what was read.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from coranto.errors import CorantoError, InvalidInput


class DeferToNextTransaction(Exception):
    """Raised by an application's `consume_message` to have the transaction end before this message.

    The next transaction begins with it. At a transaction's first message it is an error.
    """


class EmptyTransactionDeferred(CorantoError):
    """An application deferred the first message of a transaction, for which there is no other to wait for."""


class Step(enum.Enum):
    """What to do next."""

    CONSUME = "consume a message that is ready"
    WAIT = "wait: for a message if `reads`, for the prior transaction, and until `deadline`"
    COMMIT = "begin to commit"
    END = "all messages were consumed, and all transactions are done"


class Prior(enum.Enum):
    """Where the prior transaction stands."""

    COMMITTING = "its store commit is under way"
    ACKNOWLEDGING = "it has committed; its acknowledgements are being appended"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a transaction consumes, in seconds from its first message."""

    min_seconds: float = 0.0
    max_seconds: float = 1.0
    wait_for_acks: bool = True

    def __post_init__(self) -> None:
        if self.min_seconds < 0 or self.max_seconds <= 0:
            raise InvalidInput(f"a transaction of {self.min_seconds:g} to {self.max_seconds:g} s makes no sense")


@dataclass(slots=True)
class Times:
    """When a transaction reached its stages, as monotonic readings, and what it consumed."""

    began: float = 0.0
    stalled: float = 0.0
    """When it could consume no more for want of time, and had to wait for the prior one."""
    commit_began: float = 0.0
    committed: float = 0.0
    acknowledged: float = 0.0
    messages: int = 0
    bytes: int = 0


class Transactions:
    """The transactions of one shard, from its start on. All `now` are monotonic readings, in seconds."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        """May be replaced at any time."""
        self.prior = Prior.ACKNOWLEDGING
        self.current = Times()
        self.completing = Times()
        """The prior transaction's."""
        self._deferred = False
        self._ended = False

    @property
    def is_open(self) -> bool:
        """Whether the current transaction has messages."""
        return self.current.messages > 0

    def reads(self, now: float) -> bool:
        """Whether the current transaction takes further messages."""
        if self._deferred or self._ended:
            return False
        return not self.is_open or now < self.current.began + self.limits.max_seconds

    def deadline(self, now: float) -> float | None:
        """When to ask for the next step again, should nothing happen before. None: nothing changes by itself."""
        if not self.is_open or not self.reads(now):
            return None
        minimum = self.current.began + min(self.limits.min_seconds, self.limits.max_seconds)
        return minimum if now < minimum else self.current.began + self.limits.max_seconds

    def next_step(self, now: float, *, ready: bool, pending: bool) -> Step:
        """What to do. `ready`: input is there already. `pending`: what was read awaits an acknowledgement."""
        reads = self.reads(now)
        if ready and reads:
            return Step.CONSUME
        if self.is_open and not reads and not self.current.stalled:
            self.current.stalled = now
        if self.prior is not Prior.DONE:
            return Step.WAIT
        if not self.is_open:
            return Step.END if self._ended else Step.WAIT
        if reads and now < self.current.began + self.limits.min_seconds:
            return Step.WAIT
        if reads and pending and self.limits.wait_for_acks:
            return Step.WAIT
        return Step.COMMIT

    def consumed(self, now: float, size: int) -> None:
        """A message of `size` bytes was consumed."""
        if not self.is_open:
            self.current.began = now
        self.current.messages += 1
        self.current.bytes += size

    def deferred(self) -> None:
        """The application wants the message that it was given to begin the next transaction.

        Raises EmptyTransactionDeferred.
        """
        if not self.is_open:
            raise EmptyTransactionDeferred(
                "the application deferred the first message of a transaction; a transaction cannot be empty"
            )
        self._deferred = True

    def ended(self) -> None:
        """There will be no further input: commit what there is."""
        self._ended = True

    def start_commit(self, now: float) -> None:
        """The current transaction begins to commit, and the next one may consume."""
        if not self.is_open or self.prior is not Prior.DONE:
            raise InvalidInput(f"no transaction can begin to commit: prior {self.prior.name}, open {self.is_open}")
        self.current.commit_began = now
        self.current.stalled = self.current.stalled or now
        self.completing, self.current = self.current, Times()
        self.prior = Prior.COMMITTING
        self._deferred = False

    def committed(self, now: float) -> None:
        """The prior transaction's store commit has completed: acknowledgements may be appended."""
        if self.prior is not Prior.COMMITTING:
            raise InvalidInput(f"the prior transaction is {self.prior.name}, and cannot commit")
        self.completing.committed = now
        self.prior = Prior.ACKNOWLEDGING

    def acknowledged(self, now: float) -> None:
        """All acknowledgements of the prior transaction are in their journals."""
        if self.prior is not Prior.ACKNOWLEDGING:
            raise InvalidInput(f"the prior transaction is {self.prior.name}: nothing of it can be acknowledged")
        self.completing.acknowledged = now
        self.prior = Prior.DONE
