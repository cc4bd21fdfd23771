"""Checks of clocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from coranto.checkup import Condition
from coranto.checkup.clock import clock_result
from coranto.testing import SyncCluster


@pytest.mark.parametrize(
    ("difference", "condition"), [(0.4, Condition.OK), (-30.0, Condition.WARNING), (3600.0, Condition.PROBLEM)]
)
def test_clocks_are_compared(difference: float, condition: Condition) -> None:
    assert clock_result("somebody", difference, 0.1).condition is condition


def test_a_client_with_another_clock_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from coranto.checkup import brokers
    from coranto.client import ClientConfig
    from coranto.client.loop import shared_loop

    with SyncCluster(brokers=1) as cluster:
        import time

        monkeypatch.setattr(brokers, "time", SimpleNamespace(time=lambda: time.time() - 1000))
        results = shared_loop().run(brokers.brokers(ClientConfig(cluster.endpoint)))
    (clock,) = [each for each in results if each.subject.startswith("clock of")]
    assert clock.condition is Condition.PROBLEM
    assert "ahead of" in clock.found
