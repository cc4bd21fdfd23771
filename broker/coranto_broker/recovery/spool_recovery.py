"""Recover a spool folder and check it against the in-sync record: keep the journal's content, set the rest aside."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from coranto.effects import Clock
from coranto.errors import CorantoError
from coranto_broker.recovery.in_sync_records import InSyncRecords, StoredRecord, Stranded
from coranto_broker.spool.durable_spool import SpoolFolder
from coranto_broker.spool.in_sync import Judgement, judge
from coranto_broker.spool.recovery import Recovered, recover

_log = structlog.get_logger(__name__)


async def recover_spool(
    folder: SpoolFolder, records: InSyncRecords, clock: Clock, *, distrusted: bool = False
) -> Recovered:
    """Recover a folder, and set aside content that is not part of the journal. Waits until etcd responds.

    Nothing else may use the folder during the call. Raises OSError if the folder cannot be read or changed durably; the
    call may then be repeated. `distrusted`: a sync has failed there (see `recover`).
    """
    recovered = await asyncio.to_thread(recover, folder, distrusted=distrusted)
    recovered, reading = await _verified(recovered, folder, records, clock)
    record = reading.record
    for sealed in list(recovered.sealed):
        fragment = sealed.fragment
        if not sealed.settled and judge(record, sealed.stamp, fragment.end, records.me) is Judgement.DIVERGED:
            _log.error(
                "fragment.set_aside",
                fragment=fragment.content_path,
                folder=str(folder.path / "set-aside"),
            )
            sealed.set_aside()
            recovered.sealed.remove(sealed)
    if recovered.lost_end and record is not None and (record.members or record.closed):
        recovered = recovered.found_elsewhere(folder)
    if judge(record, recovered.stamp, recovered.spool.end, records.me) is Judgement.FINAL:
        recovered.watermark.raise_to(recovered.spool.end)
    return replace(recovered, journal_id=reading.journal_id)


async def _verified(
    recovered: Recovered, folder: SpoolFolder, records: InSyncRecords, clock: Clock
) -> tuple[Recovered, StoredRecord]:
    failures = 0
    while True:
        spool = recovered.spool
        lost = recovered.lost_end > spool.end
        try:
            reading = await records.verify(
                folder.journal, folder.create_revision, recovered.stamp, spool.end, lost=lost
            )
            return recovered, reading
        except Stranded as error:
            _log.error(
                "spool.set_aside",
                journal=folder.journal,
                begin=spool.fragment.begin,
                end=spool.end,
                reason=str(error),
                folder=str(folder.path / "set-aside"),
            )
            recovered = recovered.without_spool(folder)
        except CorantoError as error:
            _log.warning("spool.waiting_for_record", journal=folder.journal, error=str(error))
            await clock.sleep(min(5.0, 0.25 * 2 ** min(failures, 8)))
            failures += 1
