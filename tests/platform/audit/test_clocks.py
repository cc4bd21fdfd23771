"""Audits from machines whose clocks are wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coranto.audit import AuditOptions, JournalsCheck, Kind, Report, run_checks
from coranto.audit.clocks import CLOCK_SECONDS, seconds_ahead
from coranto.audit.memory import StoreMemory
from coranto.client import JournalClient
from coranto.client.heads import Heads
from coranto.testing.cluster import STORE_URL
from coranto.testing.sim.clocks import SimClock
from tests.platform.audit.conftest import Damaged, J, Play, kinds, one

DAY = 86_400.0


async def audit(journal: Damaged, skew: float, memory: StoreMemory | None = None) -> Report:
    """Audit from a machine whose clock is `skew` seconds ahead."""
    clock = SimClock(journal.world.timeline, skew=skew)
    check = JournalsCheck(
        journal.client, journal.stores, f"name={J}", AuditOptions(), clock=clock, memory=memory, at_replicas=False
    )
    return await run_checks(J, [check], clock=clock)


@pytest.mark.parametrize("skew", [DAY, -DAY])
def test_an_audit_by_a_wrong_clock_records_the_brokers_time(play: Play, skew: float) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        report = await audit(journal, skew)
        assert report.sound
        assert kinds(report) == {Kind.CLOCK_DIFFERS}
        (found,) = [each for each in report.findings if each.kind is Kind.CLOCK_DIFFERS]
        assert found.facts["ahead_seconds"] == pytest.approx(skew, abs=CLOCK_SECONDS)
        assert kinds(await journal.audit()) == set()

        journal.delete(journal.objects[0].fragment)
        await journal.later()
        assert Kind.CONTENT_LOST in kinds(await audit(journal, skew))
        report = await journal.audit()
        assert kinds(report) == {Kind.CONTENT_LOST}
        assert one(report, Kind.CONTENT_LOST)["spans"] == [[0, 1280]]

    play(1, story)


@pytest.mark.parametrize("witnessed", [True, False])
def test_a_record_from_the_future_hides_no_later_one(
    play: Play, monkeypatch: pytest.MonkeyPatch, witnessed: bool
) -> None:
    """Brokers that do not report their time cannot correct a clock."""

    async def story(journal: Damaged) -> None:
        memory = None if witnessed else StoreMemory(journal.stores.get(STORE_URL))
        with monkeypatch.context() as patched:
            heads = JournalClient.heads

            async def without_time(self: JournalClient, selector: str) -> Heads:
                return replace(await heads(self, selector), broker_time=0.0)

            patched.setattr(JournalClient, "heads", without_time)
            for _ in range(9):  # More than the number of kept records.
                assert (await audit(journal, DAY, memory)).sound
        journal.delete(journal.objects[0].fragment)
        await journal.later()
        report = await audit(journal, 0.0, memory)
        assert kinds(report) == {Kind.CONTENT_LOST, Kind.MEMORY_DAMAGED}
        assert [each.kind for each in report.errors] == [Kind.CONTENT_LOST]
        for _ in range(2):
            report = await audit(journal, 0.0, memory)
            assert kinds(report) == {Kind.CONTENT_LOST}, "the record was replaced"

    play(1, story)


def test_a_slow_answer_is_not_taken_for_clock_skew() -> None:
    assert seconds_ahead(100.0, 101.0, 0.0) == 0.0, "the broker does not report its time"
    assert seconds_ahead(100.0, 160.0, 130.0) == 0.0
    assert seconds_ahead(100.0, 101.0, 100.0 - CLOCK_SECONDS) == 0.0
    assert seconds_ahead(100.0, 101.0, 80.0) == 21.0
    assert seconds_ahead(100.0, 101.0, 180.0) == -79.0
