"""Flow control of one journal's appends, as a pure state machine over clock readings.

One append at a time owns the pipeline of a journal, so a client that sends slowly delays all others. Two rates limit
this (both in bytes per second):

* **minimum rate**: a client starts with one second of credit. It is charged the minimum rate as time passes and
  credited the bytes that it sends, up to one second's worth. A client without credit is in *underflow*, and its append
  is rolled back. Time while the broker delays the client is not charged.
* **maximum rate** of the journal (0: none): a token bucket that starts with one second of tokens and holds at most ten
  seconds of them. A chunk waits for missing tokens. The bucket belongs to the journal, so its balance carries over from
  one append to the next. Once the Route has changed, the limit is lifted for the append in progress, because a new
  topology becomes consistent only after this append.
"""

from __future__ import annotations

from coranto_broker.rpc.rolled_back import AppendUnderflow

BURST_SECONDS = 1.0
BANK_SECONDS = 10.0


class FlowControl:
    """The balances of one journal. Times are monotonic seconds and must not go backwards from call to call."""

    def __init__(self) -> None:
        self._max_rate = 0
        self._min_rate = 0
        self._tokens = 0.0  # Bytes that may be sent without waiting.
        self._credit = 0.0  # The client's lead over the minimum rate, in bytes.
        self._debt = 0.0  # Missing tokens of the current chunk.
        self._at: float | None = None  # Time of the last update of the balances.
        self.total_chunks = 0
        self.delayed_chunks = 0

    @property
    def throttled(self) -> bool:
        """True if the current chunk must wait for tokens."""
        return self._debt > 0

    def start(self, min_rate: int, max_rate: int, now: float) -> None:
        """Start an append. A `max_rate` of 0 means unlimited."""
        self._debt = 0.0
        if self._at is None:
            self._tokens = max_rate * BURST_SECONDS
        else:
            self._max_rate = max_rate
            self._refill(now)
        self._at = now
        self._max_rate, self._min_rate = max_rate, min_rate
        self._credit = min_rate * BURST_SECONDS
        self.total_chunks = self.delayed_chunks = 0

    def tick(self, now: float) -> None:
        """Update the balances. Raises AppendUnderflow if the client has fallen behind the minimum rate."""
        if self._at is None or now <= self._at:
            return
        if not self.throttled:
            self._credit -= self._min_rate * (now - self._at)
        self._refill(now)
        self._at = now
        self._settle_debt()
        if self._min_rate and self._credit <= 0:
            raise AppendUnderflow(self._min_rate)

    def forgive(self, now: float) -> None:
        """Update the balances without charging the client, because the broker delayed it."""
        if self._at is not None and now > self._at:
            self._refill(now)
            self._at = now

    def chunk(self, size: int) -> None:
        """Account for a received chunk of `size` bytes. It must wait if `throttled` is True afterwards."""
        self.total_chunks += 1
        self._credit = min(self._credit + size, self._min_rate * BURST_SECONDS)
        if self._max_rate:
            self._debt = float(size)
            self._settle_debt()
            if self._debt:
                self.delayed_chunks += 1

    def can_spend(self, size: int) -> bool:
        """Return True if there were tokens for `size` more bytes at the last update."""
        return not size or not self._max_rate or self._tokens >= size

    def spend(self, size: int) -> None:
        """Take tokens for `size` bytes of appends other than the started one."""
        if self._max_rate:
            self._tokens -= size

    def lift(self) -> None:
        """Stop limiting this append, because the journal's Route has changed."""
        self._max_rate = 0
        self._debt = 0.0

    def seconds_until_underflow(self) -> float:
        """Return the seconds that the client may stay silent after the last update."""
        return self._credit / self._min_rate if self._min_rate else float("inf")

    def seconds_until_paid(self) -> float:
        """Return the seconds that the current chunk must wait after the last update."""
        return self._debt / self._max_rate if self._debt else 0.0

    def _refill(self, now: float) -> None:
        if self._at is not None and now > self._at:
            earned = self._tokens + self._max_rate * (now - self._at)
            self._tokens = min(earned, self._max_rate * BANK_SECONDS)

    def _settle_debt(self) -> None:
        paid = min(self._tokens, self._debt)
        self._tokens -= paid
        self._debt -= paid
        if self._debt < 1e-6:  # Far less than a byte: a rounding error.
            self._debt = 0.0
