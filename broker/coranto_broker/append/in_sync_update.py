"""The in-sync record during an append: the check that replicas may continue the journal, and the update.

The record names the replicas that hold all acknowledged content (`coranto_broker.spool.in_sync`).
"""

from __future__ import annotations

from collections.abc import Sequence

from coranto.coordination.etcd import Op, unmodified
from coranto.journal_ids import fallen_id
from coranto_broker.recovery.in_sync_records import InSyncRecords
from coranto_broker.replication.pipeline import Pipeline, ReplicationFailed
from coranto_broker.replication.resolver import Resolution
from coranto_broker.spool import in_sync
from coranto_broker.spool.in_sync import Takeover


async def find_takeover(records: InSyncRecords, resolution: Resolution, pipeline: Pipeline) -> Takeover:
    """Decide whether the pipeline's synchronized replicas may continue the journal."""
    spool = pipeline.spool
    assert resolution.item is not None
    found = Takeover.LOST
    if pipeline.reading is not None:
        found = in_sync.takeover(pipeline.reading.record, pipeline.names, spool.stamp, spool.end)
    if found is not Takeover.CLEAN:  # The record may have changed.
        reading = pipeline.reading = await records.read(resolution.item.id, resolution.item.create_revision)
        found = in_sync.takeover(reading.record, pipeline.names, spool.stamp, spool.end)
        if found is Takeover.LOST and reading.record is not None:
            resolution.require_replica.index.note_head(reading.record.floor)
    if found is Takeover.CLEAN and _was_closed_below(pipeline):
        return Takeover.VERIFY
    return found


def _was_closed_below(pipeline: Pipeline) -> bool:
    """Return True if the record was closed below the replicas' end after they had checked their spools against it.

    Content in between was never acknowledged, and perhaps no replica has it. Continuing after it could leave a gap.
    """
    record = pipeline.reading.record if pipeline.reading is not None else None
    if record is None or not record.closed or pipeline.spool.end <= record.floor:
        return False
    return pipeline.checked_record != record


async def record_replicas(
    records: InSyncRecords, resolution: Resolution, pipeline: Pipeline, ops: Sequence[Op] = (), *, fell: bool = False
) -> tuple[bool, int]:
    """Record the pipeline's replicas as in sync, and apply `ops` in the same transaction.

    If the journal's head `fell`, it gets another id, since offsets after the replicas' end are written again. Returns
    False if another change was faster, and the etcd revision to read through (0: none). Raises ReplicationFailed if a
    pipeline of a later Route was recorded, which replaces this one.
    """
    reading, spool = pipeline.reading, pipeline.spool
    assert reading is not None
    revision = pipeline.header.etcd.revision + resolution.require_replica.folder.base
    if reading.record is not None and reading.record.revision > revision:
        raise ReplicationFailed("a pipeline of a later Route than this one's was recorded")
    journal_id = fallen_id(reading.journal_id, spool.end, revision) if fell else reading.journal_id
    record = in_sync.recorded(reading.record, reading.create_revision, revision, pipeline.names, spool.end, journal_id)
    read_through = 0
    if ops or record != reading.record:
        compares = [unmodified(each.kv) for each in resolution.assignments]
        result, pipeline.reading = await records.write(reading, record, compares, ops)
        if ops or not result.succeeded:
            read_through = result.header.revision
        if not result.succeeded:
            return False, read_through
    else:
        records.keep(reading)  # An earlier attempt may have written it without an answer.
    pipeline.recorded = True
    spool.settle(spool.end)
    pipeline.show()
    return True, read_through
