"""Restarts of brokers after crashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto.cluster.brokers import Restarts
from coranto.errors import ClusterError
from tests.platform.cluster.children import child


def test_a_process_is_restarted_with_backoff_and_then_abandoned(tmp_path: Path) -> None:
    """Ten restarts: the first immediately, the others after growing pauses. A longer life resets the count."""
    restarts = Restarts()
    pauses = []
    now = 0.0
    for _ in range(10):
        dead = child(tmp_path, ["/bin/false"])
        dead.wait(120)
        dead.started = now
        begin = now
        while not restarts.due(now, dead):
            now += 0.1
        pauses.append(now - begin)
    assert pauses == pytest.approx([0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0], abs=0.11)
    last = child(tmp_path, ["/bin/false"])
    last.wait(120)
    last.started = now
    with pytest.raises(ClusterError, match="exit code 1"):
        restarts.due(now, last)
    lived = child(tmp_path, ["/bin/false"])
    lived.wait(120)
    lived.started = now
    assert restarts.due(now + 31, lived)
