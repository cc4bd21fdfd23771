"""Flow control of one journal's appends, as a pure state machine over clock readings.

The pipeline of a journal is owned by one append at a time, so a client that sends slowly holds up all others. Two rates
keep that in bounds (both in bytes per second):

* **minimum rate**: a client starts with one second of credit, is charged the minimum rate as time passes and credited
  what it sends, up to one second's worth. Out of credit is *underflow*, and its append is rolled back. Time in which
  we hold the client back ourselves is not charged to it.
* **maximum rate** of the journal (0: none): a token bucket that starts with one second of tokens and banks up to ten.
  A chunk that finds too few tokens waits for the rest. The bucket belongs to the journal, so its balance carries over
  from one append to the next. Once the route has changed the limit is lifted for the append in progress: a new
  topology becomes consistent only when this append is done.
"""

from __future__ import annotations

from coranto_broker.rpc.rolled_back import AppendUnderflow

BURST_SECONDS = 1.0
BANK_SECONDS = 10.0


class FlowControl:
    """Balances of one journal. Times are monotonic seconds; calls come with times that do not go backwards."""

    def __init__(self) -> None:
        self._max_rate = 0
        self._min_rate = 0
        self._tokens = 0.0  # What may be sent now without waiting.
        self._credit = 0.0  # How far the client is ahead of the minimum rate.
        self._owed = 0.0  # Tokens still missing for the chunk at hand.
        self._at: float | None = None  # When the balances were last brought up to date.
        self.total_chunks = 0
        self.delayed_chunks = 0

    @property
    def throttled(self) -> bool:
        """Whether the chunk at hand has to wait for tokens."""
        return self._owed > 0

    def start(self, min_rate: int, max_rate: int, now: float) -> None:
        """Begin an append. `max_rate` 0 is unlimited."""
        self._owed = 0.0
        if self._at is None:
            self._tokens = max_rate * BURST_SECONDS
        else:
            self._max_rate = max_rate
            self._earn(now)
        self._at = now
        self._max_rate, self._min_rate = max_rate, min_rate
        self._credit = min_rate * BURST_SECONDS
        self.total_chunks = self.delayed_chunks = 0

    def tick(self, now: float) -> None:
        """Let time pass. Raises AppendUnderflow when the client has fallen behind the minimum rate."""
        if self._at is None or now <= self._at:
            return
        if not self.throttled:
            self._credit -= self._min_rate * (now - self._at)
        self._earn(now)
        self._at = now
        self._pay()
        if self._min_rate and self._credit <= 0:
            raise AppendUnderflow(self._min_rate)

    def forgive(self, now: float) -> None:
        """Let time pass without charging the client: it was ours."""
        if self._at is not None and now > self._at:
            self._earn(now)
            self._at = now

    def chunk(self, size: int) -> None:
        """Account for a received chunk. It may be used at once unless `throttled` now holds."""
        self.total_chunks += 1
        self._credit = min(self._credit + size, self._min_rate * BURST_SECONDS)
        if self._max_rate:
            self._owed = float(size)
            self._pay()
            if self._owed:
                self.delayed_chunks += 1

    def affords(self, size: int) -> bool:
        """Whether there are tokens for `size` further bytes, as of the last reading."""
        return not size or not self._max_rate or self._tokens >= size

    def spend(self, size: int) -> None:
        """Take the tokens of content that comes from elsewhere than the client whose append was begun."""
        if self._max_rate:
            self._tokens -= size

    def lift(self) -> None:
        """Stop limiting this append: the journal's route has changed."""
        self._max_rate = 0
        self._owed = 0.0

    def seconds_until_underflow(self) -> float:
        """How long the client may stay silent from the last reading on."""
        return self._credit / self._min_rate if self._min_rate else float("inf")

    def seconds_until_paid(self) -> float:
        """How long the chunk at hand has to wait from the last reading on; 0 when it need not."""
        return self._owed / self._max_rate if self._owed else 0.0

    def _earn(self, now: float) -> None:
        if self._at is not None and now > self._at:
            earned = self._tokens + self._max_rate * (now - self._at)
            self._tokens = min(earned, self._max_rate * BANK_SECONDS)

    def _pay(self) -> None:
        paid = min(self._tokens, self._owed)
        self._tokens -= paid
        self._owed -= paid
        if self._owed < 1e-6:  # Less than any byte: what is left is rounding.
            self._owed = 0.0
