"""Mutual exclusion of the runs of a window: one at a time replaces its rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

import dagster as dg

from coranto.errors import Fenced
from coranto.fragments.windows import Window
from dagster_coranto.instance.pool_slot import PoolSlot

if TYPE_CHECKING:
    from coranto_consumers.spark.consumer.windows import WindowConsumer, WindowReport

POOLS: Final = 17
"""The number of pools of a consumer, and so of its windows that can be materialised concurrently.

Dagster cannot remove a pool while a run may claim it, so not every window has its own: windows whose first numbers
differ by a multiple of this share a pool. It is prime, because first numbers of merged windows are far apart.
"""


def pool_of(consumer: str, window: Window) -> str:
    """Return the name of the pool for the runs of a window. Dagster shows it."""
    return f"coranto_{consumer}_windows_{window.first % POOLS:02}"


def slot_factory(context: dg.AssetExecutionContext) -> Callable[[str], PoolSlot]:
    """Return the function that creates a run's slot in a pool."""
    return lambda pool: PoolSlot(context.instance, context.run.run_id, pool, context.log.info)


def materialize_exclusively(
    consumer: WindowConsumer, name: str, new_slot: Callable[[str], AbstractContextManager[object]]
) -> WindowReport:
    """Materialise a window while no other run does. `new_slot` returns a context that holds a slot in a pool.

    If the window is merged in the meantime, this waits for a slot of the larger window. Raises the errors of
    `WindowConsumer.materialize`, including Fenced if a run outside Dagster, or a run that was presumed dead,
    materialises the same window.
    """
    window = consumer.window(name)
    while True:
        pool = pool_of(consumer.name, window)
        with new_slot(pool):
            window = consumer.window(name)
            if pool_of(consumer.name, window) != pool:
                continue
            try:
                return consumer.materialize(window.name)
            except Fenced:
                merged = consumer.window(name)
                if merged.name == window.name:
                    raise
                window = merged
