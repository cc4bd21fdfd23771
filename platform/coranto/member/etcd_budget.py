"""Limits of callers' writes to etcd: the bytes of each caller, and of the whole database.

etcd keeps every version of a key until its history is compacted. At its quota it rejects all changes, including those
that the cluster needs. So each caller has a budget in bytes. Its writes consume the budget, which refills within the
time that etcd usually keeps its history. All additions are rejected while etcd's database has too many bytes in use.
Deletions are never rejected.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter

from coranto.coordination.etcd import Coordinator, Op, Put
from coranto.effects import Clock
from coranto.errors import LimitExceeded, Unavailable

HISTORY_SECONDS: Final = 1200.0
"""The longest time that an etcd with a retention of ten minutes keeps an old version of a key."""
_CHANGE_BYTES: Final = 256
"""The bytes that etcd keeps with each change of a key, in its database and its index."""
_MAX_CALLERS: Final = 10_000
_CHECK_SECONDS: Final = 5.0
_log = structlog.get_logger(__name__)


class EtcdBudgetExceeded(LimitExceeded):
    """A change was rejected because its caller, or all callers, have written too much to etcd. Nothing was changed."""


class EtcdBudgetMetrics:
    """The counters of callers' writes to etcd."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.written = Counter("coranto_etcd_bytes", "Bytes that callers have written to etcd.", registry=registry)
        self.refused = Counter(
            "coranto_etcd_writes_refused",
            "Changes that were refused because too much was written to etcd: by the caller, or in total.",
            ["limit"],
            registry=registry,
        )
        for limit in ("caller", "total"):  # Export both series from the start, with value 0.
            self.refused.labels(limit)


class EtcdBudget:
    """Admits changes of etcd by callers, identified by a text (`coranto.security.admission.caller_of`)."""

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Clock,
        metrics: EtcdBudgetMetrics,
        *,
        caller_bytes: Callable[[str], int],
        total_bytes: int,
        note_refusal: Callable[[str], None] | None = None,
    ) -> None:
        """Create a budget. 0 means no limit.

        `caller_bytes` returns a caller's limit per HISTORY_SECONDS. `total_bytes` is the limit of the database.

        `note_refusal` is called with each caller that exceeds its own limit.
        """
        self._coordinator = coordinator
        self._clock = clock
        self._metrics = metrics
        self._caller_bytes = caller_bytes
        self._total_bytes = total_bytes
        self._note_refusal = note_refusal
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (bytes, time), oldest first.
        self._in_use = 0
        self._checked_at = -math.inf

    async def spend(self, caller: str, ops: Sequence[Op]) -> int:
        """Take the bytes of a change from the caller's budget, and return them. Raises EtcdBudgetExceeded."""
        cost = sum(_CHANGE_BYTES + len(op.key) + (len(op.value) if isinstance(op, Put) else 0) for op in ops)
        if any(isinstance(op, Put) for op in ops):
            await self._require_capacity()
            self._require_budget(caller, cost)
        self._add(caller, cost)
        self._in_use += cost
        self._metrics.written.inc(cost)
        return cost

    def give_back(self, caller: str, cost: int) -> None:
        """Return the bytes of a change that was not applied."""
        self._add(caller, -cost)
        self._in_use -= cost

    def _require_budget(self, caller: str, cost: int) -> None:
        limit = self._caller_bytes(caller)
        excess = self._spent_by(caller) + cost - limit
        if not limit or excess <= 0:
            return
        if self._note_refusal is not None:
            self._note_refusal(caller)
        seconds = math.ceil(excess * HISTORY_SECONDS / limit)
        when = f"Try again in {seconds} s" if cost <= limit else "Make smaller changes"
        self._refuse(
            "caller",
            caller,
            f"{caller} has written {round(self._spent_by(caller))} bytes to etcd in the last minutes and would write "
            f"{cost} more; its limit is {limit} within {HISTORY_SECONDS / 60:g} minutes "
            f"(etcd_caller_bytes). {when}, or have an operator raise the limit",
        )

    async def _require_capacity(self) -> None:
        if not self._total_bytes:
            return
        if self._clock.monotonic() - self._checked_at >= _CHECK_SECONDS:
            self._checked_at = self._clock.monotonic()
            try:
                self._in_use = await self._coordinator.bytes_in_use()
            except Unavailable:
                self._checked_at = -math.inf  # The change itself fails if etcd is unavailable.
        if self._in_use >= self._total_bytes:
            self._refuse(
                "total",
                "",
                f"etcd's database has {self._in_use} bytes in use, and the limit is {self._total_bytes} "
                "(max_etcd_bytes). Deletions are still accepted. Let etcd compact its history, delete unneeded "
                "keys, or raise the limit together with etcd's --quota-backend-bytes",
            )

    def _refuse(self, limit: str, caller: str, reason: str) -> None:
        self._metrics.refused.labels(limit).inc()
        _log.warning("etcd_budget.refused", limit=limit, caller=caller)
        raise EtcdBudgetExceeded(f"{reason}. Nothing was changed")

    def _spent_by(self, caller: str) -> float:
        spent, at = self._spent.get(caller, (0.0, 0.0))
        return max(0.0, spent - (self._clock.monotonic() - at) * self._caller_bytes(caller) / HISTORY_SECONDS)

    def _add(self, caller: str, cost: int) -> None:
        self._spent[caller] = max(0.0, self._spent_by(caller) + cost), self._clock.monotonic()
        self._spent.move_to_end(caller)
        if len(self._spent) > _MAX_CALLERS:
            self._spent.popitem(last=False)
