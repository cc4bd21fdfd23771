"""The limits of writing to etcd: per caller, in total, and their recovery over time."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from coranto.coordination.etcd import Delete, Op, Put
from coranto.errors import Unavailable
from coranto.member.call_errors import code_of
from coranto.member.etcd_budget import HISTORY_SECONDS, EtcdBudget, EtcdBudgetExceeded, EtcdBudgetMetrics
from coranto.security.admission import UNRESTRICTED, caller_of
from coranto.security.tokens import Capability, Claims, scope_of
from tests.platform.member.clock import ManualClock

ALICE, BOB = "alice", "bob"


class Database:
    """An etcd that reports its use, or does not answer."""

    def __init__(self) -> None:
        self.in_use = 0
        self.unavailable = False
        self.requests = 0

    async def bytes_in_use(self) -> int:
        self.requests += 1
        if self.unavailable:
            raise Unavailable("by the test")
        return self.in_use


class Setting:
    def __init__(self, caller_bytes: int = 0, total_bytes: int = 0) -> None:
        self.registry = CollectorRegistry()
        self.clock, self.database = ManualClock(), Database()
        self.budget = EtcdBudget(
            self.database,  # type: ignore[arg-type]
            self.clock,
            EtcdBudgetMetrics(self.registry),
            caller_bytes=lambda _: caller_bytes,
            total_bytes=total_bytes,
        )

    def spend(self, caller: str, *ops: Op) -> int:
        return asyncio.run(self.budget.spend(caller, ops))

    def refused(self, limit: str) -> float | None:
        return self.registry.get_sample_value("coranto_etcd_writes_refused_total", {"limit": limit})


def test_each_caller_has_a_budget_that_recovers_over_time() -> None:
    setting = Setting(caller_bytes=10_000)
    put = Put("k", b"x" * 4000)
    assert setting.spend(ALICE, put) == setting.spend(ALICE, put) > 4000
    with pytest.raises(
        EtcdBudgetExceeded, match=r"alice has written 8514 bytes.*etcd_caller_bytes.*Try again in (\d+)"
    ):
        setting.spend(ALICE, put)
    assert setting.refused("caller") == 1
    setting.spend(BOB, put)
    setting.spend(ALICE, Delete("k"))
    setting.clock.advance(HISTORY_SECONDS / 2)
    setting.spend(ALICE, put)
    with pytest.raises(EtcdBudgetExceeded) as refused:
        setting.spend(ALICE, put)
    setting.clock.advance(float(str(refused.value).partition("again in ")[2].partition(" ")[0]))
    cost = setting.spend(ALICE, put)
    setting.budget.give_back(ALICE, cost)
    setting.spend(ALICE, put)
    with pytest.raises(EtcdBudgetExceeded, match="Make smaller changes"):
        setting.spend(BOB, *[put] * 3)
    assert code_of(refused.value).name == "RESOURCE_EXHAUSTED"


def test_small_changes_cost_the_size_of_their_history_in_etcd() -> None:
    setting = Setting(caller_bytes=10_000)
    for _ in range(38):
        setting.spend(ALICE, Put("k", b""))
    with pytest.raises(EtcdBudgetExceeded):
        setting.spend(ALICE, Put("k", b""))


def test_writes_to_a_database_above_the_limit_are_refused() -> None:
    setting = Setting(total_bytes=10_000)
    setting.spend(ALICE, Put("k", b"x" * 9000))
    setting.spend(ALICE, Put("k", b"x" * 900))
    with pytest.raises(EtcdBudgetExceeded, match=r"has 10414 bytes in use, and the limit is 10000 \(max_etcd_bytes"):
        setting.spend(BOB, Put("k", b""))
    setting.spend(BOB, Delete("k"))
    assert setting.database.requests == 1
    setting.clock.advance(5)
    setting.spend(BOB, Put("k", b""))  # etcd was queried again.
    setting.clock.advance(5)
    setting.database.in_use, setting.database.unavailable = 20_000, True
    setting.spend(BOB, Put("k", b""))
    setting.database.unavailable = False
    with pytest.raises(EtcdBudgetExceeded):
        setting.spend(BOB, Put("k", b""))
    assert setting.refused("total") == 2


def test_without_limits_writes_are_counted_and_not_refused() -> None:
    setting = Setting()
    for _ in range(10):
        setting.spend(ALICE, Put("k", b"x" * 1_000_000))
    assert setting.database.requests == 0
    assert setting.registry.get_sample_value("coranto_etcd_bytes_total") > 10_000_000  # type: ignore[operator]


def test_the_number_of_remembered_callers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coranto.member.etcd_budget._MAX_CALLERS", 3)
    setting = Setting(caller_bytes=1000)
    for number in range(10):
        setting.spend(f"caller {number}", Put("k", b"x" * 700))
    assert len(setting.budget._spent) == 3
    with pytest.raises(EtcdBudgetExceeded):
        setting.spend("caller 9", Put("k", b"x" * 700))


def test_callers_are_identified_by_their_token_or_address() -> None:
    assert caller_of(UNRESTRICTED, "ipv4:10.0.0.1:4711") == caller_of(UNRESTRICTED, "ipv4:10.0.0.1:4712")
    assert caller_of(UNRESTRICTED, "ipv4:10.0.0.1:4711") != caller_of(UNRESTRICTED, "ipv4:10.0.0.2:4711")
    assert caller_of(UNRESTRICTED, "ipv6:%5B::1%5D:4711") == "the caller at ipv6:%5B::1%5D"
    assert caller_of(UNRESTRICTED, "unix:") == "the caller at unix:"
    scope = scope_of(["a/journal"])
    early, late = (Claims(Capability.NOTE, scope, at, at + 60) for at in (0.0, 100.0))
    assert caller_of(early, "ipv4:10.0.0.1:1") == caller_of(late, "ipv4:10.0.0.2:1")
    others = (Claims(Capability.NOTE, scope_of(["b"])), Claims(Capability.APPLY, scope))
    assert len({caller_of(each, "") for each in (early, *others)}) == 3
    named = (Claims(Capability.NOTE, scope, subject="alice"), Claims(Capability.APPLY, subject="alice"))
    assert {caller_of(each, "") for each in named} == {"the bearer alice"}
