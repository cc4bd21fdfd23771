"""Concurrent diagnoses of many journals, so that a journal that waits for its brokers does not delay the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from coranto.audit.gathering import CONCURRENCY
from coranto.client import JournalInfo
from coranto.recovery.plan import Diagnosis
from coranto.wire import protocol_pb2 as pb


async def diagnose_all(
    examine: Callable[[JournalInfo], Awaitable[Diagnosis]], journals: Sequence[JournalInfo]
) -> Diagnosis:
    """Return the diagnoses of journals as one, in the order of the journals. Raises the errors of `examine`.

    Fully suspended journals are skipped: they have no content, and no broker.
    """
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(info: JournalInfo) -> Diagnosis:
        async with gate:
            return await examine(info)

    served = [info for info in journals if info.spec.suspend.level != pb.JournalSpec.Suspend.FULL]
    found = await asyncio.gather(*map(one, served))
    return Diagnosis(
        [step for each in found for step in each.steps],
        [loss for each in found for loss in each.losses],
        [remark for each in found for remark in each.remarks],
    )
