"""Changes of a stream's journals in one etcd transaction, even if the answer is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coranto import labels
from coranto.client.client import JournalClient
from coranto.client.retry import Retry
from coranto.client.values import JournalInfo
from coranto.effects import Clock
from coranto.errors import ApplyOutcomeUnknown, EtcdTransactionFailed
from coranto.streams.model.stream import STREAM_LABEL, decode_segment
from coranto.wire import protocol_pb2 as pb


class Applied(NamedTuple):
    """The etcd revision of a change or, if the answer was lost, a revision that includes it."""

    revision: int
    is_exact: bool


async def apply_changes(
    client: JournalClient, changes: Sequence[pb.ApplyRequest.Change], clock: Clock
) -> Applied | None:
    """Apply changes, conditioned on their expected revisions. Returns None for a conflict.

    Raises ApplyOutcomeUnknown if it is unknown whether an attempt whose answer was lost was applied.
    """
    retry = Retry(client.config.retry_timeout)
    unknown: ApplyOutcomeUnknown | None = None
    while True:
        try:
            return Applied((await client.apply(changes)).etcd.revision, True)
        except EtcdTransactionFailed:
            if unknown is None:
                return None
            break
        except ApplyOutcomeUnknown as error:
            unknown = error
            delay = retry.failed(clock.monotonic())
            if delay is None:
                break
            await clock.sleep(delay)
    names = [("name", each.delete or each.upsert.name) for each in changes]
    present = {info.name: info for info in (await client.list(labels.label_selector(include=names))).journals}
    if all(_appears_applied(each, present) for each in changes):
        return Applied(max((each.mod_revision for each in present.values()), default=0), False)
    raise unknown


async def try_changes(client: JournalClient, changes: Sequence[pb.ApplyRequest.Change]) -> bool:
    """Apply changes once. Returns False if they conflict or the outcome is unknown: read the state again."""
    try:
        await client.apply(changes)
    except (EtcdTransactionFailed, ApplyOutcomeUnknown):
        return False
    return True


def _appears_applied(change: pb.ApplyRequest.Change, present: Mapping[str, JournalInfo]) -> bool:
    """Return True if a journal has the change, perhaps with later changes."""
    if change.delete:
        return change.delete not in present
    found = present.get(change.upsert.name)
    if found is None or not labels.value_of(change.upsert.labels, STREAM_LABEL):
        return found is not None
    wanted, current = decode_segment(JournalInfo(change.upsert, 0, 0, pb.Route())), decode_segment(found)
    same = (wanted.epoch, wanted.range, wanted.predecessors) == (current.epoch, current.range, current.predecessors)
    return same and current.sealing >= wanted.sealing and current.begin >= wanted.begin
