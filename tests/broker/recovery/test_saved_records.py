"""In-sync records on a broker's disk: reading them back, and power loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from coranto.errors import InvalidInput
from coranto.testing.sim.loop import simulated
from coranto.testing.sim.timeline import Process
from coranto_broker.recovery.saved_records import SavedRecord, SavedRecords
from coranto_broker.spool.in_sync import Epoch, InSyncRecord
from tests.simulation.kit.disk import SimDisk

DATA = Path("/data")
RECORD = InSyncRecord(7, ("local#me",), (Epoch(40, 0),), written=41)


@pytest.mark.parametrize("synced", [True, False])
def test_records_survive_power_loss_if_acknowledged_appends_do(synced: bool) -> None:
    # Found by simulation: the name of a synced file was lost. After a restore of etcd, the journal's end was unknown.
    with simulated(1) as loop:
        disk, process = SimDisk(loop, Random(1)), Process(loop, "broker")
        disk.for_process(process).write_atomic(DATA / "identity.json", b"{}")
        disk.for_process(process).sync_folder(DATA.parent)
        records = SavedRecords(DATA, disk.for_process(process), synced=lambda _: synced)
        for name, record in (("a/journal", RECORD), ("b/journal", RECORD), ("a/journal", replace(RECORD, written=42))):
            records.save(name, record)
        saved = [SavedRecord("a/journal", replace(RECORD, written=42)), SavedRecord("b/journal", RECORD)]
        assert sorted(records, key=lambda each: each.journal) == saved
        process.kill()
        disk.crash("all")
        again = SavedRecords(DATA, disk.for_process(Process(loop, "broker again")))
        assert sorted(again, key=lambda each: each.journal) == (saved if synced else [])


def test_records_of_deleted_journals_are_kept_for_a_while() -> None:
    with simulated(1) as loop:
        disk = SimDisk(loop, Random(1)).for_process(Process(loop, "broker"))
        records = SavedRecords(DATA, disk)
        records.save("a/journal", RECORD)
        for exists, now, gone in (((), 10.0, 10.0), (("a/journal",), 15.0, 0.0), ((), 20.0, 20.0), ((), 29.0, 20.0)):
            records.sweep(set(exists), now, keep_seconds=10.0)
            assert [each.gone for each in records] == [gone]
        records.sweep(set(), 30.0, keep_seconds=10.0)
        assert list(records) == []


def test_a_file_that_is_not_a_record_is_refused() -> None:
    with simulated(1) as loop:
        disk = SimDisk(loop, Random(1)).for_process(Process(loop, "broker"))
        disk.write_atomic(DATA / "records" / "bad.json", b"{}")
        with pytest.raises(InvalidInput, match="is not an in-sync record"):
            list(SavedRecords(DATA, disk))
