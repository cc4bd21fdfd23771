"""Diagnoses of many journals: several at once, so that one that waits for its brokers does not hold up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from coranto.audit.gathering import CONCURRENCY
from coranto.client import JournalInfo
from coranto.recovery.plan import Diagnosis


async def diagnosed(
    examine: Callable[[JournalInfo], Awaitable[Diagnosis]], journals: Sequence[JournalInfo]
) -> Diagnosis:
    """Return the diagnoses of journals as one, in the order of the journals. Raises what `examine` raises."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(info: JournalInfo) -> Diagnosis:
        async with gate:
            return await examine(info)

    found = await asyncio.gather(*map(one, journals))
    return Diagnosis(
        [step for each in found for step in each.steps],
        [loss for each in found for loss in each.losses],
        [remark for each in found for remark in each.remarks],
    )
