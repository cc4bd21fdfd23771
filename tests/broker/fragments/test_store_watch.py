"""The watch over stores: probes, refusals, and the metric of both."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from coranto.fragments.stores import StoreRegistry
from coranto.testing.clocks import HurriedClock
from coranto_broker.fragments.store_watch import StoreWatch
from coranto_broker.metrics import Metrics
from coranto_broker.settings import BrokerSettings

URL, JOURNAL = "file:///frags/", "a/journal"


async def test_a_store_is_healthy_once_it_was_probed_and_while_it_accepts_fragments(tmp_path: Path) -> None:
    metrics, tasks = Metrics(), list[asyncio.Task[None]]()

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(work))  # type: ignore[arg-type]

    (tmp_path / "frags").mkdir()
    watch = StoreWatch(BrokerSettings(data_dir=tmp_path), HurriedClock(), StoreRegistry(tmp_path), metrics, spawn)

    def sample() -> float | None:
        return metrics.registry.get_sample_value("coranto_fragment_store_healthy", {"store": URL})

    assert not watch.is_healthy(JOURNAL, URL)
    assert watch.held_back(JOURNAL, URL) == ""
    assert await watch.problem(JOURNAL, URL, None) == ""
    assert watch.is_healthy(JOURNAL, URL)
    assert sample() == 1.0
    watch._probed(URL, healthy=False)
    assert sample() == 0.0
    watch._forgotten(URL)
    assert sample() is None
    watch._seen(URL)
    assert sample() is None, "a store that is not probed is not reported"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
