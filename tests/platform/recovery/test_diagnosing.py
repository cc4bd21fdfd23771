"""Concurrent diagnoses of several journals."""

from __future__ import annotations

import asyncio

from coranto.client import JournalInfo
from coranto.recovery import Diagnosis, Remark
from coranto.recovery.diagnosing import diagnose_all
from coranto.wire import protocol_pb2 as pb


async def test_a_waiting_journal_does_not_delay_others_and_the_order_is_kept() -> None:
    others = asyncio.Event()

    async def examine(info: JournalInfo) -> Diagnosis:
        if info.name == "a":
            await others.wait()
        else:
            others.set()
        return Diagnosis(remarks=[Remark(info.name, "looked at")])

    journals = [JournalInfo(pb.JournalSpec(name=name), 1, 1, pb.Route()) for name in ("a", "b")]
    async with asyncio.timeout(60):
        found = await diagnose_all(examine, journals)
    assert [each.subject for each in found.remarks] == ["a", "b"]
